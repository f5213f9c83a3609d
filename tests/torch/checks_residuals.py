"""Top-k with error feedback under DDP: nothing is lost, nothing is kept that was not sent, steps can be taken back."""

import gc
import itertools
import os
import tempfile

os.environ["PACELINE_NODE_ID"] = "node " + os.environ["RANK"]  # each rank a node of its own: top-k is for between nodes

import torch
import torch.distributed as dist
from checks import check, run
from models import assert_same_on_all_ranks, batch, gradients, mlp, paceline_off
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch.ddp import attachment_of
from paceline._torch.residual_state import _for_rank

MODERN = hasattr(torch, "compile")
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
WIDTHS = (6, 60, 90, 40, 3)


def model(seed=0, **arguments):
    return DistributedDataParallel(mlp(seed, torch.float32, WIDTHS), bucket_cap_mb=0.01, **arguments)


def plain(seed=0):
    with paceline_off():
        return DistributedDataParallel(mlp(seed, torch.float32, WIDTHS))


def backward(one, step, factor=1.0):
    ((one(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean() * factor).backward()


def residuals(one):
    return paceline.torch.residual_state_dict(one)["residuals"]


def mean_over_ranks(named):
    means = {}
    for name, tensor in named.items():
        total = tensor.double().clone()
        dist.all_reduce(total)
        means[name] = total / SIZE
    return means


def identical(a, b):
    return all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)


@check
def parameters_of_a_model_that_is_gone_are_forgotten():
    """Their ids are given to others, whose optimizer must not be taken for one of ours."""
    one = model(seed=3)
    steps = attachment_of(one).endpoint.steps
    known = steps.models[attachment_of(one).model].parameters
    assert set(known) == {id(p) for p in one.parameters()}
    assert all(steps.owns(p) for p in one.parameters())
    del one
    gc.collect()
    assert not list(known)
    gone = len(steps.dropped)
    assert gone
    other = model(seed=3)
    assert not steps.dropped
    assert steps.owns(next(other.parameters()))


@check
def what_travelled_and_what_stayed_add_up():
    """Mean sent + mean residual after = mean gradient + mean residual before, for every parameter and step."""
    ours, exact = model(), plain()
    before = mean_over_ranks(residuals(ours))
    for step in range(6):
        ours.zero_grad()
        exact.zero_grad()
        backward(ours, step)
        backward(exact, step)
        after = mean_over_ranks(residuals(ours))
        for (name, mine), theirs in zip(ours.module.named_parameters(), exact.module.parameters()):
            left = mine.grad.double() + after[name]
            right = theirs.grad.double() + before[name]
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
        assert_same_on_all_ranks(gradients(ours))
        before = after
    assert any(bool(r.abs().sum() > 0) for r in before.values())
    sent = torch.cat([g.reshape(-1) for g in gradients(ours)])
    exact = 600  # elements in buckets below the threshold, which travel whole
    assert 0 < int((sent != 0).sum()) <= SIZE * 0.055 * sent.numel() + exact, "not sparse"


@check
def it_trains():
    ours = model(1)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (ours(batch(3, 8, 6, dtype=torch.float32)) - 0.5).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses[::10]
    assert_same_on_all_ranks(list(ours.parameters()))


@check
def no_sync_leaves_residuals_alone():
    ours = model(2)
    backward(ours, 0)
    before = residuals(ours)
    with ours.no_sync():
        backward(ours, 1)
    assert identical(before, residuals(ours))


@check
def an_inf_reaches_all_ranks_and_residuals_return():
    """Only rank 1 sees the Inf, in one parameter; the step before it leaves residuals that must not move a bit."""
    for bad in (float("inf"), float("nan")):
        ours = model(3)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            backward(ours, step)
            optimizer.step()
        before = residuals(ours)
        assert any(bool(r.abs().sum() > 0) for r in before.values())
        optimizer.zero_grad()
        backward(ours, 2, factor=bad if RANK == 1 else 1.0)
        finite = torch.cat([g.reshape(-1) for g in gradients(ours)]).isfinite().all()
        assert not finite, "the Inf did not reach this rank"
        assert identical(before, residuals(ours))
        optimizer.zero_grad()
        backward(ours, 3)
        assert torch.cat([g.reshape(-1) for g in gradients(ours)]).isfinite().all()


@check
def an_inf_in_the_second_pass_takes_the_whole_step_back():
    ours = model(3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        backward(ours, step)
        optimizer.step()
    before = residuals(ours)
    optimizer.zero_grad()
    backward(ours, 2)
    backward(ours, 3, factor=float("inf") if RANK == 0 else 1.0)
    assert identical(before, residuals(ours))


@check
def grad_scaler_skips_the_step_and_rescales():
    if not MODERN:
        from torch.cuda.amp import GradScaler  # 1.13 has none for the CPU; ours must not disturb the disabled one

        scaler = GradScaler(enabled=False)
        optimizer = torch.optim.SGD(model(4).parameters(), lr=0.1)
        assert scaler.scale(torch.ones(1)).item() == 1
        scaler.update()
        assert optimizer is not None
        return
    ours = model(4)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def scaled_step(step, factor=1.0):
        optimizer.zero_grad()
        loss = (ours(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    scaled_step(0)
    scaler.update()
    before, weights = residuals(ours), [p.detach().clone() for p in ours.parameters()]
    scaled_step(1, factor=float("inf") if RANK == 0 else 1.0)
    assert not torch.cat([g.reshape(-1) for g in gradients(ours)]).isfinite().all(), "the Inf did not reach this rank"
    assert identical(before, residuals(ours))
    assert all(torch.equal(a, b) for a, b in zip(weights, ours.parameters())), "the step was not skipped"
    scaler.update()
    assert scaler.get_scale() == 512.0
    halved = residuals(ours)
    for name, residual in before.items():
        assert torch.equal(halved[name], residual * 0.5)
    for step in range(2, 5):
        scaled_step(step)
        kept = residuals(ours)
        scaler.update()
    assert scaler.get_scale() == 1024.0
    for name, residual in residuals(ours).items():
        assert torch.equal(residual, kept[name] * 2)
    assert_same_on_all_ranks(list(ours.parameters()))


@check
def an_inf_that_only_grad_scaler_sees():
    """A small parameter travels exactly, beside top-k's buckets: its Inf is no business of top-k's own flag.

    A fused optimizer steps all the same, and its kernels leave everything as it is.
    """
    if not MODERN:
        assert not hasattr(torch.amp, "GradScaler")  # torch's for CUDA does nothing on the CPU: test_older.py
        return
    kinds = [
        (torch.optim.SGD, {}, None),
        (torch.optim.SGD, {"fused": True}, None),
        (torch.optim.AdamW, {"fused": True}, None),
        (torch.optim.Adagrad, {"fused": True}, None),
        (torch.optim.SGD, {"fused": True}, "forward"),
    ]
    for kind, arguments, overlap in kinds:
        ours = model(5)
        optimizer = kind(ours.parameters(), lr=0.01, **arguments)
        optimizer = paceline.torch.DistributedOptimizer(optimizer, model=ours, overlap=overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        kept = residuals(ours)
        for step in range(4):
            before, weights = kept, [p.detach().clone() for p in ours.parameters()]
            optimizer.zero_grad()
            scaler.scale((ours(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean()).backward()
            ours(batch(step, 8, 6, dtype=torch.float32))  # by which an overlapped step's gradients are in hand
            if step == 2:
                next(ours.parameters()).grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            assert all(torch.equal(a, b) for a, b in zip(weights, ours.parameters())) == (step == 2), (kind, step)
            kept = residuals(ours)
            assert identical(before, kept) == (step == 2), (kind, arguments, overlap, step)
            scaler.update()
            if step == 2:
                kept = residuals(ours)
                assert all(torch.equal(kept[name], residual / 2) for name, residual in before.items())


@check
def checkpoint_and_resume():
    """Six steps in one go, or three, a checkpoint and three by a new model: the same bits."""

    def steps(one, optimizer, which):
        for step in which:
            optimizer.zero_grad()
            backward(one, step)
            optimizer.step()

    ours = model(6)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    steps(ours, optimizer, range(3))
    with tempfile.TemporaryFile() as file:
        state = {
            "model": ours.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "residuals": paceline.torch.residual_state_dict(ours),
        }
        torch.save(state, file)
        file.seek(0)
        steps(ours, optimizer, range(3, 6))
        loaded = torch.load(file)
    resumed = model(7)
    resumed.module.load_state_dict(loaded["model"])
    second = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    # Buckets in their final order before the residuals matter, as in the model that ran on.
    backward(resumed, 0)
    resumed.zero_grad()
    backward(resumed, 0)
    second.load_state_dict(loaded["optimizer"])
    paceline.torch.load_residual_state_dict(resumed, loaded["residuals"])
    assert identical(loaded["residuals"]["residuals"], residuals(resumed))
    steps(resumed, second, range(3, 6))
    for a, b in zip(ours.parameters(), resumed.parameters()):
        assert torch.equal(a, b)


@check
def a_state_of_all_ranks_follows_a_resize():
    ours = model(8)
    backward(ours, 0)
    mine = residuals(ours)
    state = paceline.torch.residual_state_dict(ours, all_ranks=True)
    assert len(state["all_ranks"]) == SIZE
    assert identical(state["all_ranks"][RANK], mine)
    paceline.torch.load_residual_state_dict(ours, state)
    assert identical(residuals(ours), mine)
    bigger = {"world_size": 2 * SIZE, "all_ranks": state["all_ranks"] * 2}
    taken = _for_rank(bigger, RANK, SIZE, "gradient")
    for name, residual in mean_over_ranks(mine).items():
        torch.testing.assert_close(taken[name].double(), residual, rtol=1e-5, atol=1e-7)


@check
def wrong_states_are_named():
    ours = model(9)
    backward(ours, 0)
    state = paceline.torch.residual_state_dict(ours)

    def refused(part, wrong):
        try:
            paceline.torch.load_residual_state_dict(ours, wrong)
        except paceline.InvalidArgumentError as error:
            assert part in str(error), str(error)
        else:
            raise AssertionError("accepted")

    refused("all_ranks=True", {**state, "rank": RANK + 5})
    refused("2.weight", {**state, "residuals": {n: r for n, r in state["residuals"].items() if n != "2.weight"}})
    reshaped = {n: (r.t() if n == "2.weight" else r) for n, r in state["residuals"].items()}
    refused("[60, 90]", {**state, "residuals": reshaped})


@check
def two_models_keep_their_residuals_apart():
    first, second = model(10), model(11)
    backward(first, 0)
    before = residuals(first)
    backward(second, 1)
    backward(second, 2)
    assert identical(before, residuals(first))
    assert not identical(residuals(first), residuals(second))


@check
def a_step_that_is_skipped_alone_is_taken_back_alone():
    """Both models' backward passes come before both steps, and one of the two steps is spoilt."""
    if not MODERN:
        assert not hasattr(torch.amp, "GradScaler")
        return
    for spoilt_first, apart in itertools.product((False, True), repeat=2):
        whole, spoilt = (model(seed, process_group=dist.new_group() if apart else None) for seed in (12, 13))
        first, second = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (whole, spoilt))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(2):
            before = [residuals(one) for one in (whole, spoilt)]
            for one in (whole, spoilt):
                one.zero_grad()
                scaler.scale((one(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean()).backward()
            if step == 1:
                next(spoilt.parameters()).grad.view(-1)[0] = float("inf")
            for optimizer in (second, first) if spoilt_first else (first, second):
                scaler.step(optimizer)
            after = [residuals(one) for one in (whole, spoilt)]
            assert [identical(*pair) for pair in zip(before, after)] == [False, step == 1]
            scaler.update()


def rescaled_alone(apart):
    models = [model(seed, process_group=dist.new_group() if apart else None) for seed in (18, 19, 20)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1024.0, 4.0)]

    def passes(which, step):
        models[which].zero_grad()
        loss = (models[which](batch(step, 8, 6, dtype=torch.float32)) ** 2).mean()
        (scalers[which].scale(loss) if which < 2 else loss).backward()

    def spoil(which):
        next(models[which].parameters()).grad.view(-1)[0] = float("inf")
        scalers[which].step(optimizers[which])
        scalers[which].update()

    for step in range(2):
        for which in range(3):
            passes(which, step)
        for scaler, optimizer in zip(scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        optimizers[2].step()
    before = [residuals(one) for one in models]
    for which in range(3):
        passes(which, 2)
    spoil(1)
    assert [scaler.get_scale() for scaler in scalers] == [1024.0, 2.0]
    assert identical({name: r / 2 for name, r in before[1].items()}, residuals(models[1]))
    spoil(0)
    assert identical({name: r / 2 for name, r in before[0].items()}, residuals(models[0]))
    assert any(r.any() for r in before[0].values())
    backward(models[2], 3, factor=float("nan"))
    assert identical(before[2], residuals(models[2])), "its first pass was kept as another model's scale changed"


@check
def a_scaler_rescales_its_own_models_alone():
    """And leaves the step of another one's open, which is taken back afterwards. A third model has no scaler."""
    if not MODERN:
        assert not hasattr(torch.amp, "GradScaler")
        return
    for apart in (False, True):
        rescaled_alone(apart)


@check
def an_inf_of_one_model_leaves_the_others_step_alone():
    """Top-k sees it by itself. The other's backward pass lies before or behind; no scaler, and nobody steps between."""
    for inf_first in (False, True):
        whole, spoilt = model(14), model(15)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (whole, spoilt)]
        exact = plain(14)
        for step in range(3):
            before = [residuals(one) for one in (whole, spoilt)]
            for one in (whole, spoilt, exact):
                one.zero_grad()
            factor = float("inf") if step == 1 and RANK == 0 else 1.0
            passes = [(whole, 1.0), (spoilt, factor)]
            for one, factor in reversed(passes) if inf_first else passes:
                backward(one, step, factor)
            backward(exact, step)
            optimizers[0].step()
            if step != 1:
                optimizers[1].step()
            after = [residuals(one) for one in (whole, spoilt)]
            assert [identical(*pair) for pair in zip(before, after)] == [False, step == 1]
            # What travelled and what stayed add up, in the step of the Inf too.
            means = [mean_over_ranks(named) for named in (before[0], after[0])]
            for (name, mine), theirs in zip(whole.module.named_parameters(), exact.module.parameters()):
                left = mine.grad.double() + means[1][name]
                torch.testing.assert_close(left, theirs.grad.double() + means[0][name], rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                for mine, theirs in zip(whole.module.parameters(), exact.module.parameters()):
                    theirs.copy_(mine)


@check
def a_model_may_step_often_while_another_ones_waits():
    """And what waits is taken back as a whole in the end."""
    often, waits = model(16), model(17)
    backward(waits, 0)
    patient, eager = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (waits, often))
    patient.step()
    before = residuals(waits)
    backward(waits, 1)
    memory = None
    for step in range(6):
        often.zero_grad()
        backward(often, step)
        eager.step()
        taken = attachment_of(often).endpoint.communicator.stats()["residual_bytes"]
        assert memory in (None, taken), (memory, taken)
        memory = taken if step >= 2 else None  # DDP has cut its buckets anew by then
    backward(waits, 2, factor=float("nan") if RANK == 1 else 1.0)
    assert identical(before, residuals(waits))


if __name__ == "__main__":
    run()
