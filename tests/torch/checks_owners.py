"""Top-k on nodes of several ranks: who encodes an element changes, with DDP's buckets and with the number of ranks."""

import os

os.environ["PACELINE_NODE_ID"] = f"node {int(os.environ['RANK']) // 2}"

import torch
import torch.distributed as dist
from checks import check, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch

dist.init_process_group("gloo")
SIDE = 60
STEPS = 60


def model():
    return DistributedDataParallel(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)), bucket_cap_mb=0.01)


def sum_without_gradients(one):
    """What steps bring whose gradients are 0 on all ranks: what is owed."""
    owed = {name: torch.zeros_like(p) for name, p in one.module.named_parameters()}
    for _ in range(STEPS):
        one.zero_grad()
        (one(torch.zeros(1, SIDE)).sum() * 0).backward()
        for name, p in one.module.named_parameters():
            owed[name] += p.grad
    return owed


@check
def a_state_of_other_numbers_of_ranks_is_owed_once():
    for former in (1, 2, 8):
        one = model()
        shapes = {name: p.shape for name, p in one.module.named_parameters()}
        random = torch.Generator().manual_seed(former)
        saved = [{name: torch.randn(shape, generator=random) for name, shape in shapes.items()} for _ in range(former)]
        paceline.torch.load_residual_state_dict(one, {"world_size": former, "all_ranks": saved})
        for name, owed in sum_without_gradients(one).items():
            mean = sum(of[name].double() for of in saved) / former
            torch.testing.assert_close(owed.double(), mean, rtol=1e-5, atol=1e-5)


@check
def what_the_first_cut_of_the_buckets_left_is_paid_after_the_second():
    """DDP cuts its buckets anew after the first backward pass."""
    one = model()
    torch.manual_seed(dist.get_rank())
    local = {name: torch.randn(p.shape) for name, p in one.module.named_parameters()}
    loss = sum((p * local[name]).sum() for name, p in one.module.named_parameters())
    (loss + one(torch.zeros(1, SIDE)).sum() * 0).backward()  # the gradient is `local`
    first = {name: p.grad.clone() for name, p in one.module.named_parameters()}
    rest = sum_without_gradients(one)
    for name, mine in local.items():
        dist.all_reduce(mine)
        torch.testing.assert_close(first[name] + rest[name], mine / dist.get_world_size(), rtol=1e-5, atol=1e-5)


run()
