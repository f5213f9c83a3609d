"""Ranks whose training needs each other's messages on the GPU; one is killed. Survivors write what they saw."""

import faulthandler
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from gpu_world import DEVICE, RANK, SIZE
from torch import nn

REPORT = os.environ["CHECKS_REPORT"]
VICTIM, LAST = 1, 8  # ranks that share a GPU take turns on it, so that a step of three takes a second or two
EXCHANGE = os.environ["CHECKS_EXCHANGE"]


def note(**facts):
    with open(f"{REPORT}.{RANK}", "w") as report:
        json.dump(facts, report)


def exchanged(tensor):
    received = torch.empty_like(tensor)
    if EXCHANGE == "all_to_all":
        dist.all_to_all_single(received, tensor)
        return received
    operations = [
        dist.P2POp(dist.isend, tensor, (RANK + 1) % SIZE),
        dist.P2POp(dist.irecv, received, (RANK - 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def main():
    faulthandler.dump_traceback_later(50)  # what it hangs in, if it does
    torch.manual_seed(0)
    net = nn.Linear(512, 512).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(1_000_000):
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        data = torch.randn(8 * SIZE, 512, device=DEVICE)
        try:
            if RANK == VICTIM and step == LAST:
                torch.cuda.synchronize()
                note(at=time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            (net(exchanged(data)) ** 2).mean().backward()
            optimizer.step()
        except BaseException as error:
            seen = time.monotonic()
            same = all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
            kinds = [kind.__name__ for kind in type(error).__mro__]
            note(kind=type(error).__name__, kinds=kinds, text=str(error), at=seen, unchanged=same, step=step)
            faulthandler.dump_traceback_later(5)  # what it hangs in, if it does
            raise  # the process must be able to end by itself


main()
