"""Whole models on init_process_group("paceline"), without Gloo: DDP and ZeroRedundancyOptimizer."""

import copy

import no_gloo  # noqa: F401
import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, batch, mlp
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from paceline._torch import backend

backend.register()
dist.init_process_group("paceline")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MODERN = hasattr(torch, "compile")


def reference_step(model, optimizer, step):
    """The same step on one process: the mean over all ranks' batches."""
    optimizer.zero_grad()
    loss = sum((model(batch(step, 5, 6, rank=r)) ** 2).mean() for r in range(SIZE)) / SIZE
    loss.backward()
    optimizer.step()


def compare(model, alone):
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def train_against_one_process(make_optimizer, **arguments):
    model = DistributedDataParallel(mlp(0), **arguments)
    alone = copy.deepcopy(model.module)
    optimizer, second = make_optimizer(model), torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        (model(batch(step, 5, 6)) ** 2).mean().backward()
        optimizer.step()
        reference_step(alone, second, step)
    compare(model, alone)
    assert_same_on_all_ranks(list(model.parameters()))


@check
def ddp_by_torchs_own_reducer():
    for arguments in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        train_against_one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), **arguments)


class Phase(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x):
        return (self.weight * x).abs()


@check
def complex_parameters():
    """On older torch too, whose Gloo refuses them; by torch's reducer and by the import."""
    alone = Phase()
    (sum(alone(batch(0, 5, rank=r)).sum() for r in range(SIZE)) / SIZE).backward()
    model = DistributedDataParallel(Phase())
    model(batch(0, 5)).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, alone.weight.grad, rtol=1e-12, atol=1e-13)


@check
def buffers_are_rank_0s():
    """Batch norm's statistics: each forward pass begins with those that rank 0 has."""
    model = DistributedDataParallel(torch.nn.Sequential(mlp(4), torch.nn.BatchNorm1d(3).double()))
    on_rank_0 = copy.deepcopy(model.module)
    for step in range(3):
        model(batch(step, 5, 6))
        on_rank_0(batch(step, 5, 6, rank=0))
    mine, theirs = (dict(module.named_buffers()) for module in (model.module, on_rank_0))
    assert RANK == 0 or not torch.equal(mine["1.running_mean"], theirs["1.running_mean"])
    model.eval()
    model(batch(3, 5, 6))
    assert mine["1.num_batches_tracked"] == 3 and len(mine) == 3
    for name, buffer in mine.items():
        assert torch.equal(buffer, theirs[name]), name


@check
def zero_redundancy_optimizer():
    def make(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    train_against_one_process(make)


@check
def the_optimizers_state_gathers_on_one_rank():
    model = DistributedDataParallel(mlp(1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    (model(batch(0, 5, 6)) ** 2).mean().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if RANK == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@check
def ddp_by_import_on_the_same_process_group():
    import paceline.torch  # noqa: F401
    from paceline._torch.ddp import attachment_of

    train_against_one_process(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    model = DistributedDataParallel(mlp(2))
    # No second one beside the group's own, whose backend torch 1.13 has in the group's place.
    group = dist.distributed_c10d._get_default_group()
    own = group if hasattr(group, "paceline_endpoint") else group._get_backend(torch.device("cpu"))
    assert attachment_of(model).endpoint.communicator is own.paceline_endpoint.communicator
    assert model._get_ddp_logging_data()["comm_hook"] == "paceline"


class Expert(torch.nn.Module):
    """With a name of the rank's own, and a buffer whose size is its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.name = f"expert_{RANK}"
        self.add_module(self.name, torch.nn.Linear(6, 3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(3 + RANK if MODERN else 3))  # older torch spreads rank 0's in any case

    def forward(self, x):
        return getattr(self, self.name)(x)


@check
def what_torch_lets_differ_between_ranks():
    import paceline.torch  # noqa: F401

    model = DistributedDataParallel(Expert(), broadcast_buffers=False)
    alone = copy.deepcopy(model.module)
    (model(batch(0, 5, 6)) ** 2).mean().backward()
    (sum((alone(batch(0, 5, 6, rank=r)) ** 2).mean() for r in range(SIZE)) / SIZE).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)
    assert_same_on_all_ranks([p.grad for p in model.parameters()])


@check
def join_with_uneven_inputs():
    model = DistributedDataParallel(mlp(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + RANK):
            optimizer.zero_grad()
            (model(batch(step, 5, 6)) ** 2).mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(list(model.parameters()))


if __name__ == "__main__":
    run()
