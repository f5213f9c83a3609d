"""DDP with fp16 or bf16 on the wire ($PACELINE_CODEC): within the roundings of the casts, equal on all ranks."""

import os

os.environ["PACELINE_NODE_ID"] = "node " + os.environ["RANK"]

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_gradients, assert_same_on_all_ranks, batch, gradients, mlp, pair

import paceline.torch  # noqa: F401

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
STEP = {"fp16": 2**-11, "bf16": 2**-8}[os.environ["PACELINE_CODEC"]]


@check
def gradients_within_the_casts_roundings():
    """A value is cast once a hop (at most SIZE times) on partial sums no larger than the sum of magnitudes."""
    ours, plain = pair(mlp(0, torch.float32, (6, 200, 300, 3)))
    differs = False
    for step in range(3):
        magnitudes = None
        for model in (ours, plain):
            model.zero_grad()
            (model(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean().backward()
        with plain.no_sync():
            plain.zero_grad()
            exact = [g.clone() for g in gradients(ours)]
            (plain(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean().backward()
            magnitudes = [g.abs().double() for g in gradients(plain)]
            locals_ = [g.double() for g in gradients(plain)]
        for mine, size, local in zip(exact, magnitudes, locals_):
            dist.all_reduce(size)
            dist.all_reduce(local)
            error = (mine.double() - local / SIZE).abs()
            bound = size * STEP * (SIZE + 1) / SIZE + 6e-8
            assert bool((error <= bound).all()), float((error / bound).max())
            differs = differs or bool(error.max() > 0)
        assert_same_on_all_ranks(exact)
    assert differs, "nothing was cast"


@check
def other_dtypes_travel_exactly():
    ours, plain = pair(mlp(1))
    for model in (ours, plain):
        (model(batch(0, 5, 6)) ** 2).mean().backward()
    assert_same_gradients(ours, plain)


@check
def an_inf_stays_an_inf():
    ours, _ = pair(mlp(2, torch.float32))
    factor = float("inf") if RANK == 0 else 1.0
    ((ours(batch(0, 5, 6, dtype=torch.float32)) ** 2).mean() * factor).backward()
    assert not torch.cat([g.reshape(-1) for g in gradients(ours)]).isfinite().all()


if __name__ == "__main__":
    run()
