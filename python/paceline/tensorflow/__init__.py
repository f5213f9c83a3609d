"""Paceline for TensorFlow: an asynchronous all-reduce for eager code, tf.function and v1 sessions.

    import paceline.tensorflow as pl

    pl.init()
    mean = pl.allreduce(gradient, op=pl.Average, name="dense/kernel")

One library serves every TensorFlow from 2.13 on. No thread of TensorFlow's is held while an operation travels, and
ranks may reach their operations in different orders: operations are matched by name, and rank 0 decides the order.
"""

import atexit
import threading

from paceline import _state
from paceline.communicator import AVERAGE as Average
from paceline.communicator import MAX as Max
from paceline.communicator import MIN as Min
from paceline.communicator import PRODUCT as Product
from paceline.communicator import SUM as Sum
from paceline.communicator import Communicator, setting
from paceline.errors import InvalidArgumentError, PacelineError, UnsupportedError
from paceline.tensorflow import _operation

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_lock = threading.Lock()
_communicator = None


def init(rank=-1, size=-1, store=None, timeout=0.0):
    """Joins the job; blocks until all ranks are there. A second call does nothing.

    rank, size: -1 asks the launcher's environment. store: an object with put(key, bytes) and get(key) -> bytes | None
    that all ranks reach, None for the launcher's. timeout: seconds, to join and for an all-reduce to wait for ranks
    that have not reached it (rank 0's counts); 0 for the settings' (PACELINE_TIMEOUT for an all-reduce).
    Raises a PacelineError named by the failure.
    """
    global _communicator
    with _lock:
        if _communicator is not None:
            return
        if _state.disabled():
            raise UnsupportedError(
                "PACELINE_DISABLE is set, and TensorFlow has nothing else that would carry this script's all-reduces: "
                "unset it"
            )
        _operation.register()
        communicator = Communicator(
            rank=rank, size=size, store=store, prefix="tensorflow", face=_state.face, timeout=timeout
        )
        try:
            seconds = timeout or float(setting("timeout", _state.face))
            _operation.attach(communicator, seconds, keeps_residuals=setting("codec", _state.face) == "topk")
        except PacelineError:
            communicator.close()
            raise
        _communicator = communicator


def shutdown():
    """Leaves the job once all ranks do. Operations that are not ready on all ranks by then fail."""
    global _communicator
    with _lock:
        if _communicator is None:
            return
        _operation.detach()
        _communicator.close()
        _communicator = None


def is_initialized():
    return _communicator is not None


def _identity():
    if _communicator is None:
        raise InvalidArgumentError("call paceline.tensorflow.init() first")
    return _communicator.identity


def rank():
    """This process's number in the job, from 0."""
    return _identity().rank


def size():
    """The number of processes of the job."""
    return _identity().size


def local_rank():
    """This process's number on its node, from 0."""
    return _identity().local_rank


def local_size():
    """The number of the job's processes on this node."""
    return _identity().local_size


def allreduce(tensor, op=Average, name=None):
    """The element-wise sum (average, minimum, maximum, product) of `tensor` over all ranks, on all ranks.

    tensor: anything that tf.convert_to_tensor takes, of the same shape and dtype (float32, float64, float16,
    bfloat16, int8 to int64, uint8, bool) on all ranks. Average takes floating types.
    name: what ranks match by; equal on all ranks, and one for each tensor. Without one, the k-th unnamed all-reduce of
    a function or graph (in eager code: of a shape, dtype and op) is matched with the k-th of the other ranks, which
    needs the same program on all of them; so is the k-th use of a name in a function. Calls of one tf.function from
    several places, and iterations of a loop, are told apart. What can't be, is refused: two functions of one name in
    one step, for instance. Only a named all-reduce outside of loops, called at one place, may use a codec that keeps a
    residual (PACELINE_CODEC=topk), since the residual is kept by name; the others travel exactly.
    A function or graph runs an all-reduce only where something that it returns or does depends on the value: let that
    be so on all ranks (an average that rank 0 alone prints is waited for in vain).
    The gradient of Sum and Average is the same all-reduce of the gradient; Min, Max and Product have none.

    Raises (where the value is used) tf.errors.InvalidArgumentError with both sides when shape, dtype or op differ
    between ranks, and when its name does not tell it from another; UnavailableError when a rank was lost or has shut
    down; DeadlineExceededError, with the ranks that are missing, when not all have come within init()'s timeout.
    Ctrl-C while an eager call waits for other ranks ends the job after a second and raises KeyboardInterrupt; while a
    function or session runs, Python hears of it when that has ended.
    """
    _identity()
    if op not in (Sum, Average, Min, Max, Product):
        raise InvalidArgumentError(f"op is {op!r}; use Sum, Average, Min, Max or Product")
    return _operation.allreduce(tensor, op, name)


atexit.register(shutdown)
