"""Ranks that train on a GPU and meet a fault: which one is the first argument. Survivors write what they saw."""

import faulthandler
import json
import os
import signal
import sys
import time

import torch
from gpu_world import DEVICE, RANK
from torch import nn
from torch.nn.parallel import DistributedDataParallel

REPORT = os.environ["CHECKS_REPORT"]
VICTIM = 1


def note(**facts):
    with open(f"{REPORT}.{RANK}", "w") as report:
        json.dump(facts, report)


def fail_now(which):
    note(at=time.monotonic())
    if which == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif which == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif which == "raises":
        raise ValueError("their own bug")


def wrapped(net):
    """DDP, or on "cuda:paceline" a sharded model."""
    if "cuda:paceline" not in os.environ.get("CHECKS_BACKEND", ""):
        return DistributedDataParallel(net.to(DEVICE), device_ids=[DEVICE.index])
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net.to(DEVICE))


def local(parameter):
    """This rank's shard, where there are shards."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def main():
    which, where = sys.argv[1:3]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 16))
    model = wrapped(net)
    fused = os.environ.get("CHECKS_FUSED") == "1"  # then the host does not wait before the step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    snapshots = {}
    for step in range(1_000_000):
        snapshots[step] = [local(p).detach().clone() for p in model.parameters()]
        snapshots.pop(step - 3, None)
        optimizer.zero_grad()
        data = torch.randn(8, 512, device=DEVICE)
        try:
            loss = (model(data) ** 2).mean()
            if RANK == VICTIM and step == 20 and where == "before":
                fail_now(which)
            loss.backward()
            if RANK == VICTIM and step == 20 and where == "after":
                fail_now(which)
            optimizer.step()
        except ValueError:
            raise
        except BaseException as error:
            seen = time.monotonic()
            now = [local(p) for p in model.parameters()]
            # A host that runs ahead hears of it a step later. What died before its backward pass ended step 20; of what
            # died after it, all that the step needed may have arrived.
            allowed = [snapshots[20]] if where == "before" and 20 in snapshots else snapshots.values()
            same = any(all(torch.equal(a, b) for a, b in zip(one, now)) for one in allowed)
            kinds = [kind.__name__ for kind in type(error).__mro__]
            note(kind=type(error).__name__, kinds=kinds, text=str(error), at=seen, unchanged=same, step=step)
            faulthandler.dump_traceback_later(5)  # what it hangs in, if it does
            raise  # the process must be able to end by itself


main()
