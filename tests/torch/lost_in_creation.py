"""The last rank is killed while all make the path for CUDA tensors: a simulated GPU, every rank a node of its own."""

import ctypes
import os
import signal
import sys
import time

os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"

import torch
import torch.distributed as dist
from faulty_notes import note
from support import ROOT

import paceline.torch  # noqa: F401
from paceline import _cuda
from paceline._torch import cuda, cuda_group

_LIBRARIES = ROOT / "build" / "lib" / "simulated"
_driver = ctypes.CDLL(str(_LIBRARIES / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
_cuda.path = lambda: str(_LIBRARIES / "libpaceline_cuda.so")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Communicator(_cuda.CudaCommunicator):
    def __init__(self, *arguments, **named):
        if RANK == SIZE - 1:
            time.sleep(0.5)  # the others are in it
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(*arguments, **named)


def main():
    _cuda.CudaCommunicator = Communicator
    dist.init_process_group(sys.argv[1])
    world = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", 0)
    try:
        if sys.argv[1] == "gloo":
            found = cuda.endpoint_of(world, device)
        else:
            cuda_group.nccl_backend = lambda *_: "NCCL"
            found = world._get_backend(torch.device("cpu")).paceline_cuda._open(device)
    except BaseException as error:
        note(kind=type(error).__name__, text=str(error), at=time.monotonic())
        os._exit(1)
    note(kind="none", text=f"went on with {found}", at=time.monotonic())
    os._exit(0)


main()
