"""What lasts longer than a step on the CUDA path, on simulated GPUs: residuals, models that go, waits in vain."""

import copy
import gc

import torch
import torch.distributed as dist
from checks import check, run
from simulated_gpu import RANK, SIZE, settings, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch import ddp, residual_state
from paceline.errors import InvalidArgumentError

STEPS = 8


def counted(communicator, *names):
    """A list to which the communicator's calls of these methods add their names."""
    calls = []

    def wrap(name):
        original = getattr(communicator, name)

        def method(keys):
            calls.append(name)
            original(keys)

        setattr(communicator, name, method)

    for name in names:
        wrap(name)
    return calls


def residual_of(model, parameter):
    attachment = ddp.attachment_of(model)
    raw = torch.zeros(parameter.shape)
    attachment.endpoint.communicator.read_residual(attachment._keys[id(parameter)], raw.data_ptr(), raw.numel())
    return raw


def batch(step, width):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(100 * step + RANK))


# --- residuals --------------------------------------------------------------------------------------------------------


def train_to_a_nan(clip, overlap):
    """(commits before the last step, whether its NaN left anything kept)"""
    torch.manual_seed(0)
    with settings(codec="int8"), wrapped(nn.Linear(64, 64)) as (model, communicator):
        calls = counted(communicator, "commit_residuals", "rollback_residuals")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if overlap:
            optimizer = paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = (model(batch(step, 64)) ** 2).mean()
            (loss * float("nan") if step == STEPS - 1 else loss).backward()
            if clip:
                if overlap:
                    optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if overlap:
            optimizer.synchronize()
            ddp.attachment_of(model).overlap.settle()
        return calls, residual_of(model, model.module.weight).abs().sum().item()


@check
def every_step_keeps_its_residuals_also_with_clipping_before_it():
    for overlap in (False, True):
        calls, kept = train_to_a_nan(clip=False, overlap=overlap)
        clipped_calls, clipped_kept = train_to_a_nan(clip=True, overlap=overlap)
        assert calls.count("commit_residuals") == clipped_calls.count("commit_residuals") == STEPS - 1, (overlap, calls)
        assert calls.count("rollback_residuals") == clipped_calls.count("rollback_residuals") == 1
        assert kept > 0 and clipped_kept > 0, overlap


@check
def models_on_one_group_are_kept_and_taken_back_apart():
    """Their passes lie in one another, and one's numbers are not finite: what the other has sent and kept adds up."""
    for codec, overlap in (("int8", False), ("topk", False), ("int8", True)):
        torch.manual_seed(0)
        sparse = settings(codec=codec, topk_ratio=0.05, topk_threshold=1000)
        with sparse, wrapped(nn.Linear(64, 64, bias=False)) as (whole, _):
            spoilt = DistributedDataParallel(nn.Linear(64, 64, bias=False), process_group=whole.process_group)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (whole, spoilt)]
            if overlap:
                optimizers[0] = paceline.torch.DistributedOptimizer(optimizers[0], model=whole, overlap="forward")
            gradients = torch.zeros(2, 64, 64)  # what the ranks had, and what arrived
            for step in range(STEPS):
                kept = residual_of(spoilt, spoilt.module.weight)
                for one in (spoilt, whole) if step % 2 else (whole, spoilt):
                    one.zero_grad()
                    loss = (one(batch(step, 64)) * batch(step + 50, 64)).sum()
                    (loss * float("nan") if one is spoilt and step % 4 == 2 else loss).backward()
                mine = batch(step + 50, 64).T @ batch(step, 64)
                dist.all_reduce(mine)
                optimizers[0].step()
                if overlap:
                    optimizers[0].synchronize()
                gradients += torch.stack([mine / SIZE, whole.module.weight.grad])
                optimizers[1].step()
                if step % 4 == 2:
                    assert torch.equal(kept, residual_of(spoilt, spoilt.module.weight)), (codec, step)
                assert spoilt.module.weight.grad.isfinite().all() == (step % 4 != 2)
            if overlap:
                ddp.attachment_of(whole).overlap.settle()
            left = residual_of(whole, whole.module.weight)
            dist.all_reduce(left)
            torch.testing.assert_close(gradients[1] + left, gradients[0], rtol=1e-4, atol=1e-3)
            assert left.abs().max() > 0.01
            del spoilt, one


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


@check
def what_no_rank_uses_owes_what_it_owed():
    """Whatever the pass that it was left out of has sent; what is used meanwhile goes on."""
    half, single = torch.bfloat16, torch.float32
    for codec, dtype, overlap, passes in (
        ("int8", single, False, 1),
        ("int8", half, False, 1),
        ("topk", single, False, 1),
        ("topk", half, False, 1),
        ("topk", single, False, 2),
        ("topk", single, True, 1),
    ):
        torch.manual_seed(0)
        sparse = settings(codec=codec, topk_ratio=0.05, topk_threshold=1000)
        with sparse, wrapped(Branches().to(dtype), find_unused_parameters=True) as (model, _):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if overlap:
                optimizer = paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")
            for step in range(STEPS):
                before = paceline.torch.residual_state_dict(model)["residuals"]
                optimizer.zero_grad(set_to_none=True)
                left_out = step in (3, 5, 6)
                for again in range(passes):
                    inputs, factors = (batch(number, 64).to(dtype) for number in (step + 10 * again, step + 50))
                    (model(inputs, both=not left_out) * factors).sum().backward()
                assert (model.module.second.weight.grad is None) == left_out
                optimizer.step()
                after = paceline.torch.residual_state_dict(model)["residuals"]
                same = {name: torch.equal(before[name], after[name]) for name in before}
                assert same == {"first.weight": False, "second.weight": left_out}, (codec, dtype, overlap, step, same)


@check
def momentum_is_for_small_buckets_too():
    sums = {}
    with settings(codec="topk", topk_momentum=0.9, topk_ratio=0.5):
        for side in (64, 600):  # buckets of 16 KiB and of 1.4 MiB
            with wrapped(nn.Linear(side, side, bias=False)) as (model, _):
                total = torch.zeros(side, side)
                for _ in range(12):
                    model.zero_grad()
                    model(torch.ones(1, side)).sum().backward()  # 1 everywhere
                    total += model.module.weight.grad
                sums[side] = total.mean().item()
    assert sums[600] > 15, sums  # without a momentum it would be 12
    assert abs(sums[64] - sums[600]) < 0.02 * sums[600], sums


@check
def sixteen_bit_models_have_room_for_their_residuals():
    for codec in ("int8", "topk"):
        with settings(codec=codec), wrapped(nn.Linear(1000, 1000).to(torch.bfloat16)) as (model, _):
            for step in range(3):
                model.zero_grad()
                model(batch(step, 1000).to(torch.bfloat16)).square().mean().backward()


@check
def what_is_owed_stays_the_same_on_other_numbers_of_ranks():
    """A checkpoint of 4 ranks, then of 1: the next average has all of it once."""
    for former in (4, 1):
        random = torch.Generator().manual_seed(former)
        shapes = {"weight": (300, 300), "bias": (300,)}
        saved = [{name: torch.randn(s, generator=random) for name, s in shapes.items()} for _ in range(former)]
        state = {"world_size": former, "unit": "average", "all_ranks": saved}
        with settings(codec="topk", topk_ratio=0.5, topk_threshold=0), wrapped(nn.Linear(300, 300)) as (model, _):
            residual_state.write_state(ddp.attachment_of(model), state)
            owed = torch.zeros(300, 300)
            for _ in range(4):
                model.zero_grad()
                (model(torch.zeros(1, 300)).sum() * 0).backward()  # no gradient but what is owed
                owed += model.module.weight.grad
            expected = sum(of["weight"].double() for of in saved)
            torch.testing.assert_close(owed.double(), expected, rtol=1e-5, atol=1e-5, msg=f"of {former} ranks")


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 40))


def trained_on(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, 64)).square().mean().backward()
        optimizer.step()


def same_tensors(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@check
def a_checkpoint_goes_on_bit_by_bit():
    """Another model that loads it after two backward passes, by which torch has arranged its buckets."""
    for codec, momentum, all_ranks in (
        ("topk", 0, True),
        ("topk", 0.9, False),
        ("topk", 0.9, True),
        ("int8", 0, False),
    ):
        chosen = {"topk_ratio": 0.05, "topk_threshold": 1000, "topk_momentum": momentum} if codec == "topk" else {}
        own = 0 if momentum else 0.9
        with settings(codec=codec, **chosen), wrapped(two_layers(1), bucket_cap_mb=0.01) as (model, _):
            first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=own)
            trained_on(model, first, range(5))
            kept = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
            state, steps = paceline.torch.residual_state_dict(model, all_ranks), copy.deepcopy(first.state_dict())
            velocities = state.get("velocities") or (state.get("all_ranks_velocities") or [None] * SIZE)[RANK]
            assert (velocities is not None) == (momentum > 0)
            assert velocities is None or all(velocity.any() for velocity in velocities.values())
            trained_on(model, first, range(5, 9))
            end = paceline.torch.residual_state_dict(model)
            with wrapped(two_layers(2), bucket_cap_mb=0.01) as (resumed, _):
                second = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=own)
                for step in range(2):
                    resumed(batch(step, 64)).square().mean().backward()
                resumed.module.load_state_dict(kept)
                second.load_state_dict(steps)
                paceline.torch.load_residual_state_dict(resumed, state)
                trained_on(resumed, second, range(5, 9))
                assert same_tensors(resumed.module.state_dict(), model.module.state_dict()), (codec, momentum)
                again = paceline.torch.residual_state_dict(resumed)
                assert same_tensors(again["residuals"], end["residuals"]), (codec, momentum)
                assert same_tensors(again.get("velocities", {}), end.get("velocities", {})), (codec, momentum)


@check
def velocities_follow_other_numbers_of_ranks():
    """Their sum stays what it was: the next average has all of their momentum once."""
    for former, local_size in ((4, 2), (1, 1), (2, 2)):
        random = torch.Generator().manual_seed(former)
        zeros = {"weight": torch.zeros(300, 300), "bias": torch.zeros(300)}
        saved = [{name: torch.randn(z.shape, generator=random) for name, z in zeros.items()} for _ in range(former)]
        state = {"world_size": former, "unit": "average", "local_size": local_size}
        state |= {"all_ranks": [zeros] * former, "all_ranks_velocities": saved}
        sparse = settings(codec="topk", topk_ratio=0.5, topk_threshold=0, topk_momentum=0.5)
        with sparse, wrapped(nn.Linear(300, 300)) as (model, _):
            residual_state.write_state(ddp.attachment_of(model), state)
            (model(torch.zeros(1, 300)).sum() * 0).backward()  # no gradient but what is carried on
            expected = 0.5 * sum(of["weight"].double() for of in saved)
            left = paceline.torch.residual_state_dict(model)["residuals"]["weight"].double()
            dist.all_reduce(left)
            went = model.module.weight.grad.double()
            torch.testing.assert_close(went + left, expected, rtol=1e-5, atol=1e-5)
            assert went.any() and left.any()


@check
def velocities_of_other_shards_begin_at_zero():
    """As many ranks, but several of a node: each would throw away what is of its neighbours' shards."""
    original = residual_state._local_size
    sparse = settings(codec="topk", topk_ratio=0.05, topk_threshold=0, topk_momentum=0.9)
    with sparse, wrapped(nn.Linear(64, 64)) as (model, _):
        trained_on(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        for state in [paceline.torch.residual_state_dict(model, all_ranks) for all_ranks in (True, False)]:
            paceline.torch.load_residual_state_dict(model, state)
            assert paceline.torch.residual_state_dict(model)["velocities"]["weight"].any()
            residual_state._local_size = lambda endpoint: 2
            try:
                paceline.torch.load_residual_state_dict(model, state)
            finally:
                residual_state._local_size = original
            again = paceline.torch.residual_state_dict(model)
            assert not any(velocity.any() for velocity in again["velocities"].values())
            assert again["residuals"]["weight"].any()


class WithNothing(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


@check
def parameters_without_elements_have_no_velocity_to_load():
    with settings(codec="topk", topk_threshold=0, topk_momentum=0.9), wrapped(WithNothing()) as (model, _):
        trained_on(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
        state = paceline.torch.residual_state_dict(model)
        paceline.torch.load_residual_state_dict(model, state)
        again = paceline.torch.residual_state_dict(model)
        assert same_tensors(state["velocities"], again["velocities"]) and state["velocities"]["weight"].any()


@check
def velocities_are_refused_where_no_momentum_is_corrected():
    sparse = {"codec": "topk", "topk_threshold": 0}
    with settings(**sparse, topk_momentum=0.9), wrapped(nn.Linear(4, 4)) as (model, _):
        state = paceline.torch.residual_state_dict(model)
        wrong = {**state, "velocities": {**state["velocities"], "bias": torch.zeros(5)}}
        for bad, said in ((wrong, "velocity of 'bias' has shape [5]"), ({**state, "velocities": {}}, "bias, weight")):
            try:
                paceline.torch.load_residual_state_dict(model, bad)
            except InvalidArgumentError as error:
                assert said in str(error), error
            else:
                raise AssertionError("taken")
        without = {name: part for name, part in state.items() if name != "velocities"}
        paceline.torch.load_residual_state_dict(model, without)  # as it was saved without a momentum: a line says it
    with settings(**sparse), wrapped(nn.Linear(4, 4)) as (model, _):
        try:
            paceline.torch.load_residual_state_dict(model, state)
        except InvalidArgumentError as error:
            assert "PACELINE_TOPK_MOMENTUM" in str(error)
        else:
            raise AssertionError("taken")


@check
def a_new_loss_scale_is_for_its_own_models():
    """Of two on one process group: the other one's residuals and velocities stay as they are."""
    sparse = {"codec": "topk", "topk_ratio": 0.05, "topk_threshold": 1000, "topk_momentum": 0.9}
    torch.manual_seed(0)
    with settings(**sparse), wrapped(nn.Linear(64, 64)) as (one, _):
        other = DistributedDataParallel(nn.Linear(64, 64), process_group=one.process_group)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        before = {}
        for step in range(3):
            for model, optimizer in zip((one, other), optimizers):
                optimizer.zero_grad()
                loss = model(batch(step, 64)).square().mean()
                (scaler.scale(loss) if model is one else loss).backward()
            scaler.step(optimizers[0])
            optimizers[1].step()
            before = {model: paceline.torch.residual_state_dict(model) for model in (one, other)}
            scaler.update()  # twice what it was
            for model, factor in ((one, 2.0), (other, 1.0)):
                after = paceline.torch.residual_state_dict(model)
                for kind in ("residuals", "velocities"):
                    for name, was in before[model][kind].items():
                        assert was.any() and torch.equal(after[kind][name], was * factor), (kind, name, factor)


@check
def residuals_of_another_unit_are_refused():
    with settings(codec="int8"), wrapped(nn.Linear(4, 4)) as (model, _):
        state = paceline.torch.residual_state_dict(model)
        assert state["unit"] == "average"
        paceline.torch.load_residual_state_dict(model, state)
        try:
            paceline.torch.load_residual_state_dict(model, {**state, "unit": "gradient"})
        except InvalidArgumentError as error:
            assert "gradient" in str(error) and "average" in str(error)
        else:
            raise AssertionError("taken")


class TwoTypes(nn.Module):
    """Its backward pass begins with gradients that torch carries."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 4).double()

    def forward(self, inputs):
        return self.head(self.body(inputs).double())


@check
def a_pass_that_begins_with_what_torch_carries_is_a_pass_too():
    """Without an optimizer of torch's, what the last one has kept is settled as the next begins."""
    torch.manual_seed(0)
    with settings(codec="int8"), wrapped(TwoTypes(), bucket_cap_mb=0.001) as (model, communicator):
        calls = counted(communicator, "commit_residuals", "rollback_residuals")
        for step in range(STEPS):
            model.zero_grad()
            loss = model(batch(step, 64)).square().mean()
            (loss * float("nan") if step == STEPS - 1 else loss).backward()
        ddp.attachment_of(model).endpoint.steps.arrive()
        assert calls == ["commit_residuals"] * (STEPS - 1) + ["rollback_residuals"], calls
        assert residual_of(model, model.module.body.weight).abs().sum().item() > 0


@check
def joined_ranks_divide_every_type_alike():
    """What is left of a join() is the mean of the ranks that still have inputs, by whichever way it goes."""
    torch.manual_seed(0)
    with wrapped(TwoTypes(), bucket_cap_mb=0.001) as (model, _):
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + RANK):
                model.zero_grad()
                model(torch.full((1, 64), 1.0 + step)).sum().backward()
        if RANK == 1:  # alone in its last step
            assert torch.equal(model.module.head.bias.grad, torch.ones(4, dtype=torch.float64))
            expected = model.module.head.weight.detach().sum(0).float()
            torch.testing.assert_close(model.module.body.bias.grad, expected)


# --- models that go ---------------------------------------------------------------------------------------------------


@check
def models_one_after_the_other_take_the_memory_of_one():
    taken = []
    with settings(codec="int8"), wrapped(nn.Linear(4, 4)) as (first, communicator):
        group = first.process_group
        for _ in range(4):
            model = nn.parallel.DistributedDataParallel(nn.Linear(700, 900), process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step, 700)).square().mean().backward()
                optimizer.step()
            stats = communicator.stats()
            taken.append((stats["residual_bytes"], stats["pinned_bytes"]))
            del model, optimizer
            gc.collect()
    assert all(one == taken[0] for one in taken), taken


# --- numbers that don't fit -------------------------------------------------------------------------------------------


@check
def gradients_beyond_fp16_are_counted_where_they_are_sent():
    for codec, counts in (("fp16", (0, 1, 1)), ("bf16", (0, 0, 0)), ("none", (0, 0, 0))):
        with settings(codec=codec), wrapped(nn.Linear(4, 4)) as (model, communicator):
            for factor, count in zip((1.0, 1e6, 1.0), counts):
                model.zero_grad()
                (model(torch.ones(1, 4)).sum() * (factor if RANK == 1 else 1.0)).backward()
                expected = min(factor / SIZE, 65504.0 if codec == "fp16" else factor) + 1 / SIZE
                torch.testing.assert_close(model.module.bias.grad, torch.full((4,), expected), rtol=0.01, atol=0)
                assert communicator.stats()["saturated"] == (count if RANK == 1 else 0), codec


@check
def inf_travels_as_it_is_and_is_the_scripts_to_see():
    for codec in ("none", "fp16", "bf16"):
        with settings(codec=codec), wrapped(nn.Linear(4, 4)) as (model, communicator):
            (model(torch.ones(1, 4)).sum() * (float("inf") if RANK == 1 else 1.0)).backward()
            assert model.module.bias.grad.isinf().all(), codec
            assert communicator.stats()["saturated"] == 0, codec


# --- waits ------------------------------------------------------------------------------------------------------------


@check
def what_a_failure_is_heard_by_ends_torchs_own_communication():
    from paceline._torch import cuda_steps
    from paceline.errors import AbortedError, PacelineError

    with wrapped(nn.Linear(4, 4)) as (model, communicator):
        endpoint = ddp.attachment_of(model).endpoint
        heard = []
        original, cuda_steps._abort_torch = cuda_steps._abort_torch, heard.append
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dist.barrier()  # an abort would also end a peer that still attaches its model
        try:
            communicator.abort("a test's end")
            for call in (lambda: model(torch.ones(1, 4)).sum().backward(), optimizer.step, optimizer.step):
                try:
                    call()
                except PacelineError as error:
                    assert isinstance(error, AbortedError), error
                else:
                    raise AssertionError("nothing was raised")
        finally:
            cuda_steps._abort_torch = original
            endpoint.steps._error = None
        assert heard == [endpoint], heard
        weight = model.module.weight.detach().clone()
        assert torch.equal(weight, model.module.weight)


assert SIZE == 2
run()
