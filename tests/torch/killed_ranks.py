"""A rank is killed in the middle of what all do over and over: killed_ranks.py WHAT VICTIM.

Every rank is a node of its own where CHECKS_NODES is set. Each survivor leaves what it saw, and when.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from faulty_notes import note, seen
from models import batch, mlp
from torch.nn.parallel import DistributedDataParallel

if "CHECKS_NODES" in os.environ:
    os.environ["PACELINE_NODE_ID"] = f"node {os.environ['RANK']}"

import paceline.torch  # noqa: F401
from paceline import communicator as core
from paceline._torch.ddp import attachment_of
from paceline.errors import PeerLostError

RANK = int(os.environ["RANK"])
WHAT, VICTIM = sys.argv[1], int(sys.argv[2])
LAST = 20


def until_killed(step):
    for number in range(1_000_000):
        if RANK == VICTIM and number == LAST:
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        step(number)


def until_heard():
    """Of the victim's end."""
    while True:
        try:
            [communicator] = core.open_communicators()
            communicator.check_health()
        except PeerLostError:
            return
        time.sleep(0.01)


def training():
    model = DistributedDataParallel(mlp(0))

    def step(number):
        model.zero_grad()
        (model(batch(number, 5, 6)) ** 2).mean().backward()
        attachment_of(model)  # raises where the model does not travel through Paceline

    until_killed(step)


def buffers():
    """DDP spreads rank 0's before each forward pass, from C++, by the script's own Gloo."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(6, dtype=torch.float64))
    until_killed(lambda number: model(batch(number, 5, 6)))


def collectives():
    until_killed(lambda number: dist.all_reduce(torch.ones(1000)))


def broadcasts():
    """Its root waits for nobody, and the others for it alone."""
    until_killed(lambda number: dist.broadcast(torch.ones(1000), VICTIM))


def beginnings():
    """The victim has its group; the others are in what ends its making, a barrier in rank 0's store."""
    barrier = dist.distributed_c10d._store_based_barrier

    def later(*args, **kwargs):
        if RANK != VICTIM:
            until_heard()
            barrier(*args, **kwargs)

    dist.distributed_c10d._store_based_barrier = later
    dist.init_process_group("paceline")
    until_killed(lambda number: None)


def groups():
    """The victim is known to be lost when the others make another group, through rank 0's store."""
    if RANK == VICTIM:
        until_killed(lambda number: None)
    until_heard()
    dist.new_group(backend="gloo")


if WHAT != "beginnings":
    dist.init_process_group("gloo" if WHAT in ("training", "buffers") else "paceline")
    dist.barrier()  # a root that waits for nobody could be dead while others are in torch's own
seen(globals()[WHAT])
