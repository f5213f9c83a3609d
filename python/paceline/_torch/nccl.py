"""torch's own NCCL as an object that Paceline makes: for groups inside a node, and for what reduces nothing."""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError


def nccl_backend(store, rank, size, timeout, prefix="paceline-nccl/"):
    """torch's ProcessGroupNCCL over `size` ranks that use the same prefix."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise UnsupportedError(
            f"torch {torch.__version__} was built without NCCL, which joins the GPUs of a node; install torch for CUDA"
        )
    options = kind.Options()
    if timeout:
        options._timeout = datetime.timedelta(seconds=timeout)
    return kind(dist.PrefixStore(prefix, store), rank, size, options)


@contextlib.contextmanager
def errors_are_ours():
    """NCCL made meanwhile leaves lost ranks to the guard.

    By itself torch would wait a minute for others' traces, then end the process: the error that names the rank would
    never be seen. And the thread that writes traces sleeps for eight minutes afterwards, for which the process's end
    would wait. Variables that the user has set stay.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    handling = "TORCH_NCCL_ASYNC_ERROR_HANDLING" if version >= (2, 2) else "NCCL_ASYNC_ERROR_HANDLING"
    ours = {handling: "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    added = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def take_place(backend, device, other):
    """`other` carries the device's tensors from now on, in whichever process group has `backend`.

    Where the backend is a whole process group (older torch), its methods go on handing them over.
    """
    if isinstance(backend, dist.ProcessGroup):
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            mine = group._get_backend(torch.device(device.type)) is backend
        except (AttributeError, RuntimeError):
            continue
        if mine:
            group._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, other)
