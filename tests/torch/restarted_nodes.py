"""A training script on two nodes, each with a torchrun of its own: one rank leaves, the other one does not notice.

restarted_nodes.py FOLDER VICTIM: at the first start rank VICTIM leaves after a step. What a rank found at the second
start is in FOLDER/RANK.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401
from paceline._torch.ddp import attachment_of


def main(folder, victim):
    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    gone = folder / "gone"
    is_first = not gone.exists()  # nobody leaves before all have made a step
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    attachment_of(model)  # raises where the model does not travel through Paceline
    model(torch.randn(4, 8)).sum().backward()
    if is_first and rank == victim:
        gone.touch()
        os._exit(1)
    if is_first:
        signal.pause()  # its agent ends it
    gradients = [None] * size
    dist.all_gather_object(gradients, model.module.weight.grad.tolist())
    assert all(gradient == gradients[0] for gradient in gradients)
    (folder / str(rank)).write_text(f"{size} ranks, agent's count {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
