"""Ranks whose communicators get others beside them, as the CUDA path makes them; or who disagree how many."""

import ctypes
import os
import sys

import torch.distributed as dist

import paceline.torch
from paceline import _library
from paceline import communicator as core
from paceline._torch import endpoints
from paceline.errors import MismatchError

assert paceline.torch is not None
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def together():
    """Two companions by way of the first communicator alone: torch's store may be gone by then."""
    library = _library.load()
    library.paceline_comm_companion.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
    first = endpoints.connect(dist.group.WORLD, "test/wires", announce=False)
    dist.destroy_process_group()
    beside = []
    for _ in range(2):
        handle = ctypes.c_void_p()
        assert library.paceline_comm_companion(first._open_handle(), ctypes.byref(handle)) == 0
        beside.append(handle)
    before = first.stats()
    count = 5000
    for handle in beside:
        data = (ctypes.c_float * count)(*[rank + 1.0] * count)
        where = ctypes.addressof(data)
        arguments = first._op_args(core.ALL_REDUCE, input=where, output=where, count=count)
        assert library.paceline_run(handle, ctypes.byref(arguments), ctypes.byref(_library.Result())) == 0
        assert list(data) == [size * (size + 1) / 2] * count
    after = first.stats()
    assert after["payload_sent"] - before["payload_sent"] > 2 * count, (before, after)
    assert after["operations"] == before["operations"], "its own operations alone are counted"
    for handle in reversed(beside):
        assert library.paceline_comm_destroy(handle) == 0
    assert first.stats()["payload_sent"] >= after["payload_sent"]
    first.close()


def disagree():
    os.environ["PACELINE_WIRE_THREADS"] = "auto" if rank == 0 else "2"
    try:
        endpoints.connect(dist.group.WORLD, "test/wires", announce=False)
    except MismatchError as error:
        assert "wire_threads is 'auto' on rank 0" in str(error) and "'2' on rank 1" in str(error), error
    else:
        raise AssertionError("ranks that disagree found each other")


{"together": together, "disagree": disagree}[sys.argv[1]]()
print("well", flush=True)
