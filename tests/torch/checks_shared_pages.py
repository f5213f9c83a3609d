"""DDP's buckets whose pages the node's other ranks reach in place: the same gradients, and memory as it was."""

import gc
import os

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, pair
from torch.nn.parallel import DistributedDataParallel

if "CHECKS_RANKS_A_NODE" in os.environ:
    os.environ["PACELINE_NODE_ID"] = f"node {int(os.environ['RANK']) // int(os.environ['CHECKS_RANKS_A_NODE'])}"
import paceline.torch  # noqa: F401
from paceline._torch.ddp import attachment_of
from paceline._torch.shared_pages import SharedPages

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def chain(layers=6):
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(layers)])


def step(model, seed):
    model.zero_grad(set_to_none=seed % 2 == 0)
    torch.manual_seed(100 * seed + RANK)
    (model(torch.randn(4, 700)) ** 2).mean().backward()
    return [p.grad for p in model.parameters()]


def pages_of(model):
    return [known.pages for known in attachment_of(model)._known.values()]


@check
def gradients_have_the_same_bits():
    for arguments in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True, "bucket_cap_mb": 2}):
        ours, plain = pair(chain(), **arguments)
        for seed in range(5):
            found, wanted = step(ours, seed), step(plain, seed)
            for one, other in zip(found, wanted):
                # Two ranks' sums have one order only.
                assert torch.equal(one, other) if SIZE == 2 else torch.allclose(one, other, atol=1e-7), (
                    arguments,
                    seed,
                )
            assert_same_on_all_ranks(found)
        assert any(isinstance(pages, SharedPages) for pages in pages_of(ours)), (arguments, pages_of(ours))


@check
def small_buckets_stay_as_they_are():
    model = DistributedDataParallel(torch.nn.Linear(40, 40))
    for seed in range(4):
        step_small(model, seed)
    assert pages_of(model) == [False], pages_of(model)


def step_small(model, seed):
    model.zero_grad()
    torch.manual_seed(100 * seed + RANK)
    (model(torch.randn(4, 40)) ** 2).mean().backward()


@check
def memory_is_the_ranks_own_again_when_the_model_has_gone():
    communicator = attachment_of(keep := DistributedDataParallel(chain(1))).endpoint.communicator
    model = DistributedDataParallel(chain(), gradient_as_bucket_view=True)
    for seed in range(4):
        gradients = step(model, seed)
    assert any(pages_of(model)), pages_of(model)
    before = [g.clone() for g in gradients]
    del model
    gc.collect()
    dist.barrier()
    # Views of DDP's buckets outlive it. A process that is forked would write to shared pages.
    child = os.fork()
    if child == 0:
        for gradient in gradients:
            gradient.zero_()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(torch.equal, gradients, before))
    assert not communicator.closed
    del keep


run()
