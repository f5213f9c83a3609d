"""DistributedOptimizer(overlap="forward") against the same training with a barrier: bit by bit, on all ranks."""

import os

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, batch, mlp
from torch.nn.parallel import DistributedDataParallel

import paceline.torch

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
STEPS = int(os.environ.get("CHECKS_STEPS", "200"))
WIDTHS = (6, 60, 90, 40, 3)


def model(seed=0, **arguments):
    arguments.setdefault("bucket_cap_mb", 0.005)
    return DistributedDataParallel(mlp(seed, torch.float32, WIDTHS), **arguments)


def loss_of(one, step):
    return (one(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean()


def train(one, optimizer, steps=STEPS):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(one, step).backward()
        optimizer.step()


def overlapped(one, kind, **arguments):
    return paceline.torch.DistributedOptimizer(kind(one.parameters(), **arguments), model=one, overlap="forward")


def assert_bit_equal(one, other):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values()):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (name, (a - b).abs().max().item())


def equals_the_barrier(kind, **arguments):
    ours, plain = model(), model()
    optimizer = overlapped(ours, kind, **arguments)
    reference = kind(plain.parameters(), **arguments)
    train(ours, optimizer)
    train(plain, reference)
    assert_bit_equal(ours, plain)
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert set(mine["state"]) == set(theirs["state"])
    for key, state in theirs["state"].items():
        for name, value in state.items():
            same = (
                torch.equal(mine["state"][key][name], value)
                if torch.is_tensor(value)
                else mine["state"][key][name] == value
            )
            assert same, (key, name)
    assert_same_on_all_ranks(list(ours.parameters()))


@check
def sgd():
    equals_the_barrier(torch.optim.SGD, lr=0.05)


@check
def momentum():
    equals_the_barrier(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


@check
def nesterov():
    equals_the_barrier(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@check
def adam():
    equals_the_barrier(torch.optim.Adam, lr=1e-3)


@check
def adamw():
    equals_the_barrier(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, amsgrad=True)


if __name__ == "__main__":
    run()
