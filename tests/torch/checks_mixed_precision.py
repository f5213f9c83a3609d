"""torch.amp on the CPU as scripts use it, through Paceline against torch's own DDP over Gloo (torch 2; two ranks)."""

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, batch, mlp, pair

import paceline.torch  # noqa: F401

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
BROKEN = 1  # the step in which rank 0 overflows


def trained(model, steps=4):
    """[(its parameters, the scale)] after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch(step, 8, 6, dtype=torch.float32))
            assert output.dtype == torch.bfloat16, output.dtype
            loss = output.float().pow(2).mean()
        scaler.scale(loss * (float("inf") if step == BROKEN and RANK == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(([p.detach().clone() for p in model.parameters()], scaler.get_scale()))
    return history


@check
def autocast_and_grad_scaler():
    """Two ranks: a sum of two is the same in every order, so no rounding to bfloat16 falls on another side."""
    assert SIZE == 2
    ours, plain = (trained(model) for model in pair(mlp(0, torch.float32, (6, 33, 17, 3))))
    assert [scale for _, scale in plain] == [64.0, 32.0, 32.0, 64.0]
    for (mine, scale), (theirs, their_scale) in zip(ours, plain):
        assert scale == their_scale, (scale, their_scale)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        assert_same_on_all_ranks(mine)
    before, broken, after = (ours[step][0] for step in (BROKEN - 1, BROKEN, BROKEN + 1))
    assert all(torch.equal(a, b) for a, b in zip(before, broken)), "the step was not skipped"
    assert not any(torch.equal(a, b) for a, b in zip(broken, after)), "nothing is trained any more"


if __name__ == "__main__":
    run()
