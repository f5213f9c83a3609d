"""DDP's join() through Paceline against torch's own over Gloo, in float64: ranks that run out of inputs one by one."""

import inspect

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, gradients, mlp, pair, square
from torch.nn.parallel import DistributedDataParallel

import paceline.torch  # noqa: F401

MODERN = hasattr(torch, "compile")
dist.init_process_group("gloo")
RANK = dist.get_rank()


def uneven(model, divide):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 2 + 2 * RANK
    with model.join(divide_by_initial_world_size=divide):
        for step in range(steps):
            optimizer.zero_grad()
            square(model, step)
            optimizer.step()


@check
def join_with_uneven_inputs():
    ours, plain = pair(mlp(8), bucket_cap_mb=2e-4)
    for model in (ours, plain):
        uneven(model, divide=True)
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert_same_on_all_ranks(list(ours.parameters()))


@check
def join_divided_by_the_ranks_that_are_left():
    ours, plain = pair(mlp(8))
    for model in (ours, plain):
        uneven(model, divide=False)
    for a, b in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@check
def join_divides_sparse_gradients_by_the_ranks_that_are_left_too():
    """Beside dense ones and alone; the passes after it are divided by all again."""
    if not MODERN:
        return  # torch 1.13's own ranks end there: a joined one answers with dense gradients

    def step(model, *words):
        model.zero_grad()
        (model(torch.tensor([words])) ** 2).sum().backward()

    def assert_same():
        for mine, theirs in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())

    for rest in ([mlp(8)], []):
        embedding = torch.nn.EmbeddingBag(20, 6, sparse=True, mode="sum").double()
        ours, plain = pair(torch.nn.Sequential(embedding, *rest), bucket_cap_mb=2e-4)
        for model in (ours, plain):
            with model.join(divide_by_initial_world_size=False):
                for turn in range(2 + RANK):
                    step(model, turn, RANK, 7)
        assert_same()
        for model in (ours, plain):
            step(model, RANK, 3, 9)
        assert_same()


@check
def join_with_a_static_graph():
    """Its first pass, whose buckets DDP hands over late, is one of all ranks: torch's own others hang or end there."""
    sizes = "bucket_cap_mb_list"  # with sizes of their own there are several in the first pass, too
    has_sizes = sizes in inspect.signature(DistributedDataParallel).parameters
    for arguments in ({}, {sizes: [0.0002, 0.0005]}) if has_sizes else ({},):
        for divide in (True, False):
            kept = []
            for model in pair(mlp(8), static_graph=True, **arguments):
                kept.append([])
                with model.join(divide_by_initial_world_size=divide):
                    for step in range(1 + 2 * RANK):
                        model.zero_grad()
                        square(model, step)
                        kept[-1] += [gradient.clone() for gradient in gradients(model)]
            assert kept[0] and len(kept[0]) == len(kept[1])
            for mine, theirs in zip(*kept):
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


if __name__ == "__main__":
    run()
