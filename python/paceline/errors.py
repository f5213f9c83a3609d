"""Every failure of the engine as a named exception: one subclass of PacelineError per code of the C ABI."""

import builtins


class PacelineError(RuntimeError):
    """A failure of Paceline. ``code`` is the C ABI's code, ``str(error)`` its sentence."""

    code = 11


class InvalidArgumentError(PacelineError):
    """An argument or a setting is wrong; the sentence names it and the fix."""

    code = 1


class MismatchError(PacelineError):
    """Ranks asked for different things: the sentence holds the tensor and both shapes (or dtypes, operations)."""

    code = 2


class TimeoutError(PacelineError, builtins.TimeoutError):
    """An operation missed its deadline; the sentence names the rank that did not come."""

    code = 3


class PeerLostError(PacelineError):
    """A rank died or its connection closed; the sentence names rank and host."""

    code = 4


class AbortedError(PacelineError):
    """The communicator was ended by abort(), here or on another rank."""

    code = 5


class UnauthenticatedError(PacelineError):
    """A rank does not know the job's secret."""

    code = 6


class UnavailableError(PacelineError):
    """Something that the operation needs is not there (yet)."""

    code = 7


class ResourceExhaustedError(PacelineError):
    """Memory, file descriptors or another limit is used up."""

    code = 8


class UnsupportedError(PacelineError):
    """Asked for something that this build, framework version or device does not offer."""

    code = 9


class CorruptedError(PacelineError):
    """Bytes from the wire or a file are not what they claim to be."""

    code = 10


class InternalError(PacelineError):
    """A defect of Paceline."""

    code = 11


class LibraryNotFoundError(PacelineError, ImportError):
    """libpaceline.so is missing or of another version."""

    code = 7


BY_CODE = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        MismatchError,
        TimeoutError,
        PeerLostError,
        AbortedError,
        UnauthenticatedError,
        UnavailableError,
        ResourceExhaustedError,
        UnsupportedError,
        CorruptedError,
        InternalError,
    )
}


#: What ends an operation of many ranks because one of them is gone, late or has given up: it does not come to agree on
#: another way either.
RANK_IS_MISSING = (PeerLostError, TimeoutError, AbortedError)


def from_code(code, sentence):
    """The exception of a C ABI code."""
    return BY_CODE.get(code, InternalError)(sentence or f"paceline code {code}")
