"""Paceline: fast distributed training on plain Ethernet.

``import paceline.torch`` makes PyTorch's DistributedDataParallel travel through Paceline. This package itself
imports no framework; :class:`Communicator` is the engine's C ABI for Python.
"""

from paceline.communicator import Communicator
from paceline.errors import (
    AbortedError,
    CorruptedError,
    InternalError,
    InvalidArgumentError,
    LibraryNotFoundError,
    MismatchError,
    PacelineError,
    PeerLostError,
    ResourceExhaustedError,
    TimeoutError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "Communicator",
    "CorruptedError",
    "InternalError",
    "InvalidArgumentError",
    "LibraryNotFoundError",
    "MismatchError",
    "PacelineError",
    "PeerLostError",
    "ResourceExhaustedError",
    "TimeoutError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
]
