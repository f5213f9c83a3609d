"""A training script on two nodes, each with a torchrun of its own: one node is lost, the other one goes on alone.

resized_nodes.py FOLDER: at the first start the node whose agent has the variable VICTIM is killed after a step, agent
and all. What a rank found at the second start is in FOLDER/RANK.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401
from paceline._torch.ddp import attachment_of


def step(model):
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()


def main(folder):
    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    attachment_of(model)  # raises where the model does not travel through Paceline
    step(model)
    dist.barrier()
    if is_first and "VICTIM" in os.environ:
        if os.environ["LOCAL_RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if is_first:
        while True:  # until the others' end is heard of
            step(model)
    assert torch.equal(model.module.weight.grad, torch.full((4, 8), 4.0))
    (folder / str(rank)).write_text(f"{size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
