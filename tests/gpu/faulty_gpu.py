"""Ranks that train on a GPU and meet a fault. Who sees it writes what it saw.

Arguments: killed, stopped, raises (rank 1), cut (the link of rank 1's node; nobody dies), differs (rank 1's model;
nobody dies) or nothing (all train to an end); before or after the backward pass. With backend nccl torch's own group
sums up the losses meanwhile, and nobody waits for that; with CHECKS_READS=1 every host does, at once.
CHECKS_DESTROYS=1: the process group is destroyed before the error goes on. CHECKS_DOUBLE=1: the last layer is in
float64, which torch's own group carries, in a bucket that comes first.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from gpu_world import DEVICE, RANK
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline._torch.ddp import attachment_of

REPORT = os.environ["CHECKS_REPORT"]
BACKEND = os.environ.get("CHECKS_BACKEND", "gloo")
VICTIM = 1
LAST = 10  # ranks that share a GPU take turns on it, and NCCL's kernels wait for each other's turns
facts = {}


def note(**more):
    facts.update(more)
    with open(f"{REPORT}.{RANK}", "w") as report:
        json.dump(facts, report)


class Double(nn.Linear):
    def forward(self, x):
        return super().forward(x.double()).float()


def interface():
    names = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    assert len(names) == 1, names
    return names[0]


def fail_now(which):
    if which == "cut":
        subprocess.run(["ip", "link", "set", interface(), "down"], check=True)
        note(cut=time.monotonic())
        return
    note(at=time.monotonic())
    if which == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif which == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif which == "raises":
        raise ValueError("their own bug")


def wrapped(net):
    """DDP, or on "cuda:paceline" a sharded model."""
    if "cuda:paceline" not in BACKEND:
        return DistributedDataParallel(net.to(DEVICE), device_ids=[DEVICE.index])
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net.to(DEVICE))


def local(parameter):
    """This rank's shard, where there are shards."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def comes_to_rest():
    """NCCL's kernels that wait for a lost rank have ended, and with them all that the GPU had to do."""
    torch.cuda.synchronize()
    return True


def end_of_training(model, steps):
    """Nothing has gone wrong: all ranks hold the same, and part in order."""
    torch.cuda.synchronize()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    note(trained=steps, equal=torch.equal(mine, first), finite=bool(torch.isfinite(mine).all()))
    dist.destroy_process_group()


def main():
    which, where = sys.argv[1:3]
    torch.manual_seed(0)
    width = 17 if which == "differs" and RANK == VICTIM else 16
    last = Double(2048, width).double() if os.environ.get("CHECKS_DOUBLE") == "1" else nn.Linear(2048, width)
    net = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), last)
    try:
        model = wrapped(net)
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        note(kind=type(error).__name__, kinds=kinds, text=str(error), unchanged=True, rests=comes_to_rest())
        raise
    fused = os.environ.get("CHECKS_FUSED") == "1"  # then the host does not wait before the step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
    snapshots, works = {}, []

    def meet(step, loss):
        """The fault; then what NCCL has under way when the others hear of it, for the victim takes no part."""
        if RANK == VICTIM and step == LAST:
            fail_now(which)
        if BACKEND == "nccl":
            summed = loss.detach().clone()
            works.append(dist.all_reduce(summed, async_op=True))
            del works[:-3]
            if os.environ.get("CHECKS_READS") == "1":
                works[-1].wait()
                summed.item()

    if hasattr(model, "reducer"):
        note(path=attachment_of(model).endpoint.communicator.describe())
    steps = LAST if which == "nothing" else 1_000_000
    for step in range(steps):
        snapshots[step] = [local(p).detach().clone() for p in model.parameters()]
        snapshots.pop(step - 3, None)
        optimizer.zero_grad()
        data = torch.randn(8, 512, device=DEVICE)
        try:
            loss = (model(data) ** 2).mean()
            if where == "before":
                meet(step, loss)
            loss.backward()
            if where == "after":
                meet(step, loss)
            optimizer.step()
        except ValueError:
            raise
        except BaseException as error:
            seen = time.monotonic()
            faulthandler.dump_traceback_later(6)  # what it hangs in, if it does
            now = [local(p) for p in model.parameters()]
            # A host that runs ahead hears of it a step later. What died before its backward pass ended that step; of
            # what died after it, all that the step needed may have arrived.
            allowed = [snapshots[LAST]] if where == "before" and LAST in snapshots else snapshots.values()
            same = any(all(torch.equal(a, b) for a, b in zip(one, now)) for one in allowed)
            kinds = [kind.__name__ for kind in type(error).__mro__]
            note(kind=type(error).__name__, kinds=kinds, text=str(error), at=seen, unchanged=same, step=step)
            note(rests=comes_to_rest())
            if os.environ.get("CHECKS_DESTROYS") == "1":
                dist.destroy_process_group()
                note(destroyed=True)
            faulthandler.dump_traceback_later(5)
            raise  # the process must be able to end by itself
    end_of_training(model, steps)


main()
