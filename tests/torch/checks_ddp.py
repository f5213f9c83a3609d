"""DDP through Paceline against torch's own DDP over Gloo, in float64: every mode of DDP."""

import contextlib
import copy
import inspect
import signal
import time
import warnings

import torch
import torch.distributed as dist
from checks import check, keep_ports, run
from models import (
    Mixed,
    assert_same_gradients,
    assert_same_on_all_ranks,
    batch,
    gradients,
    mlp,
    paceline_off,
    pair,
    square,
    train,
)
from torch.nn.parallel import DistributedDataParallel
from words import hear, tell

import paceline.torch
from paceline._torch.ddp import attachment_of

MODERN = hasattr(torch, "compile")
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def refused(part, action):
    """What torch itself can't do, in its own words."""
    try:
        action()
    except (RuntimeError, TypeError, ValueError) as error:
        assert part in str(error), str(error)
    else:
        raise AssertionError("this torch can do it after all")


@check
def plain_training():
    train(*pair(mlp(0)), 4, square)


@check
def bytes_travelled_through_paceline():
    ours, _ = pair(mlp(0))
    before = attachment_of(ours).endpoint.communicator.stats()["operations"]
    square(ours, 0)
    assert attachment_of(ours).endpoint.communicator.stats()["operations"] > before
    assert ours._get_ddp_logging_data()["comm_hook"] == "paceline"


@check
def a_model_left_on_the_host_gets_torchs_own_sentence():
    """A group for CUDA tensors alone (torch 2) has no way on which models on the host could be compared."""
    group = dist.new_group(backend="cuda:gloo") if MODERN else dist.new_group()
    refused("device_ids", lambda: DistributedDataParallel(mlp(0), device_ids=[0], process_group=group))


@check
def who_has_waited_gives_way_with_its_first_bucket():
    ours, plain = pair(mlp(0), bucket_cap_mb=0.0003)
    attachment = attachment_of(ours)
    communicator, given = attachment.endpoint.communicator, []
    give_way = communicator.give_way
    communicator.give_way = lambda op, seconds: given.append(seconds) or give_way(op, seconds)
    try:
        for step in range(4):
            attachment._waited = 0.5 if step % 2 else 0.001
            train(ours, plain, 1, lambda model, _, at=step: square(model, at))
            assert given == ([0.25] if step % 2 else []), (step, given)
            given.clear()
    finally:
        del communicator.give_way
    wait = communicator.wait
    communicator.wait = lambda op: tell(f"{RANK} waits") or wait(op)
    if RANK == SIZE - 1:
        for rank in range(SIZE - 1):
            hear(f"{rank} waits")
        time.sleep(0.1)
    square(ours, 9)
    del communicator.wait
    assert RANK == SIZE - 1 or attachment._waited > 0.02, attachment._waited


@check
def many_buckets_and_their_rebuild():
    """Three buckets or more (older torch fills 1 MiB first); DDP rebuilds them after the first step."""
    ours, plain = pair(mlp(1, widths=(6, 300, 500, 300, 3)), bucket_cap_mb=0.1)
    orders = []
    original = attachment_of(ours).all_reduce

    def spy(bucket):
        orders.append((bucket.index(), bucket.buffer().numel()))
        return original(bucket)

    attachment_of(ours).all_reduce = spy
    train(ours, plain, 3, square)
    assert len({index for index, _ in orders}) > 2, orders


@check
def find_unused_parameters():
    torch.manual_seed(3)
    ours, plain = pair(Mixed(), find_unused_parameters=True)

    def forward(model, step):
        model(batch(step, 4, 2, 5, 5), use_branch=(step + RANK) % 3 != 0).pow(2).mean().backward()

    train(ours, plain, 5, forward)


@check
def parameters_unused_on_every_rank():
    torch.manual_seed(3)
    ours, plain = pair(Mixed(), find_unused_parameters=True)
    for model in (ours, plain):
        model(batch(0, 4, 2, 5, 5), use_branch=False).pow(2).mean().backward()
    assert ours.module.branch.weight.grad is None and plain.module.branch.weight.grad is None
    assert_same_gradients(ours, plain)


@check
def static_graph():
    train(*pair(mlp(4), static_graph=True), 4, square)
    sizes = "bucket_cap_mb_list"  # with sizes of their own there are several in the first pass, too
    if sizes in inspect.signature(DistributedDataParallel).parameters:
        train(*pair(mlp(4), static_graph=True, **{sizes: [0.0002, 0.0005]}), 4, square)


@check
def gradient_as_bucket_view():
    ours, plain = pair(mlp(5), gradient_as_bucket_view=True)
    train(ours, plain, 4, square)


@check
def bucket_views_with_zeroed_gradients():
    ours, plain = pair(mlp(5), gradient_as_bucket_view=True)
    for step in range(3):
        for model in (ours, plain):
            for gradient in gradients(model):
                gradient.zero_()
            square(model, step)
        assert_same_gradients(ours, plain)


@check
def no_sync():
    """Accumulated steps are not communicated; the next one carries their sum."""
    ours, plain = pair(mlp(6))
    for step in range(4):
        for model in (ours, plain):
            model.zero_grad()
            before = attachment_of(ours).endpoint.communicator.stats()["operations"]
            with model.no_sync():
                square(model, 10 * step)
                square(model, 10 * step + 1)
            assert attachment_of(ours).endpoint.communicator.stats()["operations"] == before
            square(model, 10 * step + 2)
        assert_same_gradients(ours, plain)


@check
def gradients_accumulate_over_synchronised_steps():
    ours, plain = pair(mlp(6))
    for model in (ours, plain):
        square(model, 0)
        square(model, 1)
    assert_same_gradients(ours, plain)


@check
def broadcast_buffers():
    torch.manual_seed(7)
    ours, plain = pair(Mixed(), find_unused_parameters=True, broadcast_buffers=True)

    def forward(model, step):
        model(batch(step, 4, 2, 5, 5)).pow(2).mean().backward()

    train(ours, plain, 3, forward)
    forward_again = batch(9, 4, 2, 5, 5)
    for model in (ours, plain):
        model(forward_again)
    torch.testing.assert_close(ours.module.norm.running_mean, plain.module.norm.running_mean)


@check
def sync_batch_norm_stays_torchs_business():
    """Paceline takes the gradients only; what else the model communicates goes its own way."""
    ours, plain = pair(Mixed(), find_unused_parameters=True, broadcast_buffers=False)

    def forward(model, step):
        total = model(batch(step, 4, 2, 5, 5)).pow(2).mean()
        dist.all_reduce(total.detach().clone())
        total.backward()

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        for model, optimizer in zip((ours, plain), optimizers):
            optimizer.zero_grad()
            forward(model, step)
        assert_same_gradients(ours, plain)
        for optimizer in optimizers:
            optimizer.step()


@check
def an_interrupted_pass_keeps_what_writes_into_its_buckets():
    """Ctrl-C while the other ranks are late: memory that is still written to is nobody else's, and the wait goes on."""

    def interrupt(*_):
        raise KeyboardInterrupt

    model, _ = pair(mlp(4), bucket_cap_mb=2e-4)
    for step in range(3):
        square(model, step)
    attachment = attachment_of(model)
    dist.barrier()
    if RANK == 0:
        for rank in range(1, SIZE):
            hear(f"{rank} will be interrupted")
        time.sleep(0.3)  # the others' handlers run when their waits are over: by then their signals are there
        square(model, 9)
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    communicator = attachment.endpoint.communicator
    wait = communicator.wait

    def wait_for_the_signal(op):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        tell(f"{RANK} will be interrupted")
        return wait(op)

    communicator.wait = wait_for_the_signal
    try:
        square(model, 9)
    except KeyboardInterrupt:
        del communicator.wait
        assert attachment._running, "dropped with what they write to"
        attachment._finish()
        assert not attachment._running
    else:
        raise AssertionError("the signal came too late")
    finally:
        signal.signal(signal.SIGALRM, before)


class TwoTypes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.single = torch.nn.Linear(6, 8)
        self.double_ = torch.nn.Linear(8, 3).double()

    def forward(self, x):
        return self.double_(torch.tanh(self.single(x.float())).double())


@check
def mixed_dtypes():
    torch.manual_seed(9)
    ours, plain = pair(TwoTypes())
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            square(model, step)
        assert_same_gradients(ours, plain, rtol=2e-6, atol=1e-7)


@check
def half_precision_parameters():
    """16-bit gradients: within two roundings of the exact mean (1.13's Gloo can't broadcast bfloat16)."""
    dtype, step = (torch.bfloat16, 2**-8) if MODERN else (torch.float16, 2**-11)

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(50, dtype=dtype))

        def forward(self, x):
            return self.weight.float() * x

    model = DistributedDataParallel(Halves())
    model(batch(0, 50, dtype=torch.float32)).sum().backward()
    locals_ = [batch(0, 50, dtype=torch.float32, rank=r).to(dtype).double() for r in range(SIZE)]
    mean, largest = sum(locals_) / SIZE, torch.stack(locals_).abs().sum(0)
    error = (model.module.weight.grad.double() - mean).abs()
    assert bool((error <= 2 * step * largest).all()), error
    assert_same_on_all_ranks(gradients(model))


@check
def complex_parameters():
    class Phase(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))

        def forward(self, x):
            return (self.weight * x).abs()

    torch.manual_seed(11)
    if not MODERN:
        refused("scalar type", lambda: pair(Phase()))  # torch 1.13's Gloo itself; see checks_models.py for ours
        return
    ours, plain = pair(Phase())
    for model in (ours, plain):
        model(batch(0, 5)).sum().backward()
    assert_same_gradients(ours, plain)


@check
def channels_last():
    torch.manual_seed(12)
    model = Mixed().to(memory_format=torch.channels_last)
    ours, plain = pair(model, find_unused_parameters=True, gradient_as_bucket_view=True)

    def forward(model, step):
        x = batch(step, 4, 2, 5, 5).to(memory_format=torch.channels_last)
        model(x).pow(2).mean().backward()

    train(ours, plain, 3, forward)
    assert ours.module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@check
def frozen_parameters():
    model = mlp(13)
    model[0].requires_grad_(False)
    ours, plain = pair(model)
    train(ours, plain, 3, square)
    assert ours.module[0].weight.grad is None


@check
def ignored_parameters():
    model = mlp(13)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ours, plain = pair(model)
    for m in (ours, plain):
        square(m, 0)
    assert_same_gradients(ours, plain)


@check
def shared_parameters():
    model = mlp(14, widths=(6, 6, 6, 3))
    model[2].weight = model[0].weight
    train(*pair(model), 3, square)


@check
def several_models_one_after_the_other():
    first, second = pair(mlp(15)), pair(mlp(16, widths=(6, 11, 3)))
    for step in range(3):
        for models in (first, second):
            for model in models:
                model.zero_grad()
                square(model, step)
            assert_same_gradients(*models)


@check
def several_models_in_one_backward():
    first, second = pair(mlp(15)), pair(mlp(16, widths=(6, 11, 3)))
    for step in range(3):
        for a, b in zip(first, second):
            a.zero_grad()
            b.zero_grad()
            (a(batch(step, 5, 6)).pow(2).mean() + b(batch(step, 5, 6)).pow(2).mean()).backward()
        assert_same_gradients(*first)
        assert_same_gradients(*second)


@check
def several_forward_passes_before_one_backward():
    ours, plain = pair(mlp(17))
    for model in (ours, plain):
        (model(batch(0, 5, 6)).pow(2).mean() + model(batch(1, 5, 6)).pow(2).mean()).backward()
    assert_same_gradients(ours, plain)


@check
def activation_checkpoints():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(18)

        def forward(self, x, reentrant):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    for reentrant in (True, False):
        ours, plain = pair(Recomputed(), static_graph=True)
        for step in range(3):
            for model in (ours, plain):
                model.zero_grad()
                x = batch(step, 5, 6).requires_grad_()
                (model(x, reentrant) ** 2).mean().backward()
            assert_same_gradients(ours, plain)


@check
def subgroups():
    """DDP over the even and the odd ranks, and over all but the first: each group is its own set of peers."""
    groups = [dist.new_group(list(ranks)) for ranks in (range(0, SIZE, 2), range(1, SIZE, 2), range(1, SIZE))]
    for mine in groups:
        if dist.get_rank(mine) < 0 or dist.get_world_size(mine) < 2:
            continue
        ours, plain = pair(mlp(19), process_group=mine)
        for step in range(2):
            for model in (ours, plain):
                model.zero_grad()
                square(model, step)
            assert_same_gradients(ours, plain)
    dist.barrier()


@check
def a_copied_model_travels_too():
    ours, _ = pair(mlp(20))
    twin = copy.deepcopy(ours)
    for step in range(2):
        for model in (ours, twin):
            model.zero_grad()
            square(model, step)
        assert_same_gradients(ours, twin)
    assert attachment_of(twin) is not attachment_of(ours)


@check
def sparse_gradients():
    torch.manual_seed(21)
    ours, plain = pair(torch.nn.EmbeddingBag(20, 3, sparse=True, mode="sum"))
    for model in (ours, plain):
        model(torch.tensor([[RANK, RANK + 1, 5]])).pow(2).sum().backward()
    torch.testing.assert_close(ours.module.weight.grad.to_dense(), plain.module.weight.grad.to_dense())


@check
def sparse_gradients_that_come_last():
    """An embedding before dense layers: whose gradients are there, too, when the backward pass returns."""
    torch.manual_seed(21)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 64, sparse=True, mode="sum"), *layers)
    ours, plain = pair(model, bucket_cap_mb=0.01)
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            model(torch.tensor([[RANK, RANK + 1, step]])).pow(2).sum().backward()
        assert not attachment_of(ours)._running, "nobody has waited for these"
        for one, other in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())


@check
def the_scripts_own_hook_wins():
    ours, plain = pair(mlp(22))
    seen = []

    def their_hook(state, bucket):
        seen.append(state)
        return dist.all_reduce(bucket.buffer().div_(SIZE), async_op=True).get_future().then(lambda f: f.value()[0])

    ours.register_comm_hook("their state", their_hook)
    before = attachment_of(ours).endpoint.communicator.stats()["operations"]
    for model in (ours, plain):
        square(model, 0)
    assert seen and set(seen) == {"their state"}
    assert attachment_of(ours).endpoint.communicator.stats()["operations"] == before
    assert "their_hook" in ours._get_ddp_logging_data()["comm_hook"]
    assert_same_gradients(ours, plain)
    try:
        ours.register_comm_hook(None, their_hook)
    except RuntimeError as error:
        assert "only be called once" in str(error)
    else:
        raise AssertionError("a second hook was accepted")


@check
def torchs_ready_made_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ours, plain = pair(mlp(23, torch.float32))
    ours.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for model in (ours, plain):
        (model(batch(0, 5, 6, dtype=torch.float32)) ** 2).mean().backward()
    assert_same_gradients(ours, plain, rtol=4e-3, atol=1e-4)
    ours, plain = pair(mlp(23))
    ours._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for model in (ours, plain):
        square(model, 0)
    assert_same_gradients(ours, plain)


@check
def a_wrong_hook_is_refused_by_torch():
    ours, _ = pair(mlp(24))
    try:
        ours.register_comm_hook(None, "not callable")
    except TypeError as error:
        assert "callable" in str(error)
    else:
        raise AssertionError("accepted")


@check
def an_exception_in_backward_leaves_the_model_usable():
    """All ranks fail in the same place; the next step is right again."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("their own bug")

    ours, plain = pair(mlp(25))
    for model in (ours, plain):
        try:
            (Failing.apply(model(batch(0, 5, 6))) ** 2).mean().backward()
        except ValueError:
            pass
        else:
            raise AssertionError("no exception")
        model.zero_grad()
        square(model, 1)
    assert_same_gradients(ours, plain)


@check
def one_rank_alone_gets_no_hook():
    alone = [dist.new_group([r]) for r in range(SIZE)][RANK]
    model = DistributedDataParallel(mlp(26), process_group=alone)
    square(model, 0)
    assert model._get_ddp_logging_data().get("comm_hook", "") != "paceline"


@check
def switched_off():
    with paceline_off():
        model = DistributedDataParallel(mlp(27))
    square(model, 0)
    try:
        paceline.torch.residual_state_dict(model)
    except paceline.UnsupportedError as error:
        assert "PACELINE_DISABLE" in str(error)
    else:
        raise AssertionError("no error")


@check
def no_warning_of_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, _ = pair(mlp(28))
        with contextlib.suppress(StopIteration):
            square(ours, 0)


@check
def destroyed_and_made_again():
    ports = keep_ports(1)
    dist.destroy_process_group()
    next(ports)
    dist.init_process_group("gloo")
    train(*pair(mlp(29)), 2, square)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
