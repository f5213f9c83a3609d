"""A training script that torchrun starts again once its last rank is gone: from the checkpoint on, to the same end.

restarted.py FOLDER WAY: at the first start the last rank leaves in the middle of training, "killed" or "ended".
What every rank found is in FOLDER/RANK.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401
from paceline._torch.ddp import attachment_of

STEPS = 6
LAST = 3  # the first start's


def network():
    torch.manual_seed(5)  # the same on all ranks
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def data(step, rank):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(model, optimizer, inputs):
    optimizer.zero_grad()
    (model(inputs) ** 2).mean().backward()
    optimizer.step()


def in_one_process(size):
    """Where one process with the data of all ranks ends."""
    model = network()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        train(model, optimizer, torch.cat([data(step, rank) for rank in range(size)]))
    return model


def main(folder, way):
    # Torch 2.15's Gloo can't meet again: it finds the first start's addresses in the store.
    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    plain = network()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = optimizer_of(model)
    kept, first = folder / "checkpoint", 0
    if restart:
        first, weights, momenta = torch.load(kept)
        plain.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
    for step in range(first, STEPS):
        if restart == 0 and step == LAST and rank == size - 1:
            while not kept.exists() or torch.load(kept)[0] < LAST:
                time.sleep(0.01)  # the launcher ends rank 0 as soon as it sees this one gone
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit("a rank that has had enough")
        train(model, optimizer, data(step, rank))
        attachment_of(model)  # raises where the model does not travel through Paceline
        if rank == 0:
            torch.save((step + 1, plain.state_dict(), optimizer.state_dict()), folder / "next")
            (folder / "next").rename(kept)
    right = in_one_process(size)
    for ours, its in zip(plain.parameters(), right.parameters()):
        torch.testing.assert_close(ours, its, rtol=1e-5, atol=1e-6)
    assert not torch.equal(next(right.parameters()), next(network().parameters()))
    (folder / str(rank)).write_text(f"start {restart}, {size} ranks, steps {first} to {STEPS}: right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
