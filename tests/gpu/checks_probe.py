"""The trial at the start, as a script meets it: NCCL for torch's own collectives, nothing chosen by a setting."""

import torch
import torch.distributed as dist
from checks import check, run
from gpu_world import DEVICE, RANK, SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline._torch.ddp import attachment_of
from paceline.errors import UnsupportedError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 256)).to(DEVICE)


def batch(rank):
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(rank)).to(DEVICE)


def is_ours(model):
    try:
        attachment_of(model)
    except UnsupportedError:
        return False
    return True


@check
def all_ranks_choose_alike_and_the_sums_are_right():
    model = DistributedDataParallel(network(), device_ids=[DEVICE.index])
    chosen = [None] * SIZE
    dist.all_gather_object(chosen, is_ours(model))
    assert len(set(chosen)) == 1, chosen
    if RANK == 0:
        print("chosen:", "Paceline" if chosen[0] else "NCCL", flush=True)
    (model(batch(RANK)) ** 2).mean().backward()
    alone = network().double()
    sum((alone(batch(rank).double()) ** 2).mean() / SIZE for rank in range(SIZE)).backward()
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(got.grad.double(), wanted.grad, rtol=1e-3, atol=1e-6)


run()
