"""What torch's own collectives raise over a lost rank is the error that names it.

Beside the gradients a script sums up its losses, and DDP sends buffers, by Gloo or NCCL. These see that a connection
has ended as soon as Paceline does, and say which address it was, or only that it was aborted; the engine knows the rank
and its host. Only Paceline's error tells the script, and whoever reads its last line, who is lost.
"""

import contextlib
import functools
import sys
import time

import torch.distributed as dist

from paceline import communicator as core
from paceline._torch import guard
from paceline._torch.work import as_torch_error
from paceline.errors import PacelineError

#: After torch's error; a rank that is killed is known to the others within some hundred milliseconds.
_HEAR_SECONDS = 1.0
_LOOK_SECONDS = 0.01
#: Of Gloo's, NCCL's and older torch's stores' errors.
_WORDS = ("gloo", "NCCL", "Connection", "Broken pipe")
#: What a torch without a logger of exceptions (before 2.1) has, by its public names.
_UNLOGGED = (
    "init_process_group",
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter", "scatter"),
    *("scatter_object_list", "send"),
)


def named(error):
    """The error that names the lost rank, where there is one and `error` says that torch met it too; else None.

    It waits for a moment: torch may be the first to see it. torch's own NCCL groups end with it.
    """
    if not _may_be_a_lost_rank(error) or not core.open_communicators():
        return None
    until = time.monotonic() + _HEAR_SECONDS
    while True:
        found = guard.hear() or _failure_of_any()
        if found is not None:
            return as_torch_error(found)
        if time.monotonic() >= until:
            return None
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def naming():
    """What fails within because a rank is lost raises the error that names it."""
    try:
        yield
    except RuntimeError as error:
        better = named(error)
        if better is None:
            raise
        raise better from error


def patch():
    """For all of torch's collectives. They stay the functions that they are, for torch.compile knows them by that."""
    logger = getattr(dist, "c10d_logger", None)
    # No torch logs new_group()'s exceptions; other modules of torch 2 have that function from before.
    _wrap("_new_group_with_tag" if hasattr(dist.distributed_c10d, "_new_group_with_tag") else "new_group")
    if not hasattr(logger, "_get_msg_dict"):
        for name in _UNLOGGED:
            _wrap(name)
        return
    original = logger._get_msg_dict
    if getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def describe(*args, **kwargs):  # what each of them calls when it has caught an exception, to log it
        caught = sys.exc_info()[1]
        better = named(caught) if isinstance(caught, RuntimeError) else None
        if better is not None:
            raise better from caught
        return original(*args, **kwargs)

    describe._paceline_patched = True
    logger._get_msg_dict = describe


def patch_buffers(cls):
    """DDP sends its buffers from C++, before a forward pass."""
    cls._distributed_broadcast_coalesced = naming()(cls._distributed_broadcast_coalesced)


def _wrap(name):
    original = getattr(dist.distributed_c10d, name, None)
    if original is None or getattr(original, "_paceline_patched", False):
        return
    wrapped = naming()(original)
    wrapped._paceline_patched = True
    for module in (dist.distributed_c10d, dist):
        if getattr(module, name, None) is original:
            setattr(module, name, wrapped)


def _may_be_a_lost_rank(error):
    """Not a wrong argument: NCCL's and the stores' errors have types of their own (newer torch), Gloo's its name."""
    if isinstance(error, PacelineError):
        return False
    types = tuple(filter(None, (getattr(dist, name, None) for name in ("DistError", "DistBackendError"))))
    return isinstance(error, types) or any(word in str(error) for word in _WORDS)


def _failure_of_any():
    """Of the communicators that this process has, the failure of one that failed."""
    for communicator in core.open_communicators():
        try:
            communicator.check_health()
        except PacelineError as error:
            return error
    return None
