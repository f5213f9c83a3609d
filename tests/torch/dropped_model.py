"""A backward pass that raises on rank 0 with a bucket under way; the model is dropped, its memory given to others.

Rank 0 prints "intact" when nobody has written into memory that it has taken since.
"""

import gc
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline.torch  # noqa: F401

RANK = int(os.environ["RANK"])
SIDE = 600
LATE = 0.5  # seconds that the others' gradients come after rank 0's


class Stop(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Stop.fails and RANK == 0:
            raise ValueError("one rank's own bug")
        return gradient


class Net(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x):
        return self.last(Stop.apply(self.first(x)))


def train(first, last):
    model = nn.parallel.DistributedDataParallel(Net(first, last), bucket_cap_mb=1)
    for step in range(4):
        Stop.fails = step == 3
        if Stop.fails and RANK != 0:
            time.sleep(LATE)
        model(torch.randn(4, SIDE)).sum().backward()


def main():
    backend = os.environ.get("CHECKS_BACKEND", "gloo")
    if backend == "simulated GPU":
        import simulated_gpu  # noqa: F401
    else:
        dist.init_process_group(backend)
    first, last = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    try:
        train(first, last)
    except ValueError:
        pass  # as who goes on with the next model; the traceback, which holds this one, ends here
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(3)
    gc.collect()
    taken = [torch.full((SIDE * SIDE + SIDE,), 7.0) for _ in range(20)]
    time.sleep(2 * LATE)
    written = sum(bool((memory != 7).any()) for memory in taken)
    print("intact" if written == 0 else f"{written} written to", flush=True)
    os._exit(0)


main()
