"""overlap="forward" in training loops of all kinds: each leaves the bits that the same loop with a barrier leaves."""

import copy
import functools
import io
import pickle
import warnings

import torch
import torch.distributed as dist
from checks import check, run
from models import Mixed, batch
from overlap_world import (
    MODERN,
    RANK,
    SIZE,
    adam,
    assert_same_state,
    compare,
    loss_of,
    model,
    overlapped,
    same,
    sgd,
    train,
)
from torch import nn

import paceline.torch
from paceline._torch import buckets
from paceline._torch.ddp import attachment_of


@check
def torchs_other_optimizers():
    for name in ("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor"):
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            compare(lambda one, optimizer: train(one, optimizer, 6), (functools.partial(kind, lr=1e-3),))


@check
def for_each_and_fused_kernels():
    for way in ("foreach", "fused"):
        try:
            torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], **{way: True})
        except (TypeError, RuntimeError):
            continue  # not on this torch's CPU
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            compare(
                lambda one, optimizer: train(one, optimizer, 20),
                (functools.partial(kind, lr=1e-3, **{way: True}),),
            )


@check
def a_learning_rate_that_changes_right_after_the_step():
    for before in (False, True):

        def program(one, optimizer):
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
                for step in range(8):
                    optimizer.zero_grad()
                    loss_of(one, step).backward()
                    optimizer.step()
                    scheduler.step()

        if not before:
            compare(program)
            continue
        ours, plain = model(), model()
        first, second = sgd(ours.parameters()), sgd(plain.parameters())
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (first, second)]
        assert overlapped(first, ours) is first and isinstance(first, torch.optim.SGD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(8):
                for one, optimizer, scheduler in zip((ours, plain), (first, second), schedulers):
                    optimizer.zero_grad()
                    loss_of(one, step).backward()
                    optimizer.step()
                    scheduler.step()
        assert_same_state(ours, plain)
        assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] != 0.05


@check
def hyperparameters_are_those_of_the_step():
    def program(one, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.01

    compare(program)
    if MODERN:  # a tensor is changed in place

        def with_a_tensor(one, optimizer):
            for step in range(6):
                optimizer.zero_grad()
                loss_of(one, step).backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"].mul_(0.5)

        compare(with_a_tensor, (lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),))


@check
def every_place_and_way_to_clear_gradients():
    def at_the_end(one, optimizer, clear):
        for step in range(6):
            loss_of(one, step).backward()
            optimizer.step()
            clear(one, optimizer)

    def before_backward(one, optimizer, clear):
        for step in range(6):
            loss = loss_of(one, step)
            clear(one, optimizer)
            loss.backward()
            optimizer.step()

    ways = [lambda one, o, none=none: o.zero_grad(set_to_none=none) for none in (True, False)]
    ways += [lambda one, o, none=none: one.zero_grad(set_to_none=none) for none in (True, False)]
    ways += [lambda one, o: [setattr(p, "grad", None) for p in one.parameters()]]
    for loop in (at_the_end, before_backward):
        for clear in ways:
            for views in (False, True):
                make = functools.partial(model, gradient_as_bucket_view=views)
                compare(functools.partial(loop, clear=clear), (sgd,), make)


@check
def gradients_that_are_never_cleared():
    def program(one, optimizer):
        for step in range(5):
            loss_of(one, step).backward()
            optimizer.step()

    compare(program)


@check
def several_passes_before_a_step():
    def program(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, 2 * step).backward()
            loss_of(one, 2 * step + 1).backward()
            optimizer.step()

    compare(program)


@check
def accumulation_without_communication():
    def program(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            with one.no_sync():
                loss_of(one, 3 * step).backward()
                loss_of(one, 3 * step + 1).backward()
            loss_of(one, 3 * step + 2).backward()
            optimizer.step()

    compare(program)


@check
def passes_without_a_step_and_steps_without_a_pass():
    def program(one, optimizer):
        for step in range(8):
            if step != 5:
                optimizer.zero_grad()
                loss_of(one, step).backward()
            if step not in (2, 3):
                optimizer.step()
            if step == 6:
                optimizer.step()

    compare(program)


@check
def closures():
    def program(one, optimizer):
        for step in range(5):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(one, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0

    compare(program)


@check
def parameter_groups_and_one_more_on_the_way():
    ours, plain = model(), model()
    made = []
    for one in (ours, plain):
        layers = [list(layer.parameters()) for layer in one.module if isinstance(layer, nn.Linear)]
        groups = [{"params": layers[0], "lr": 0.1}, {"params": layers[2], "momentum": 0.5, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        if one is ours:
            overlapped(optimizer, one)
        for step in range(8):
            if step == 4:
                optimizer.add_param_group({"params": layers[1], "lr": 0.2})
            optimizer.zero_grad()
            loss_of(one, step).backward()
            optimizer.step()
            one.zero_grad()
        made.append(optimizer)
    assert_same_state(ours, plain)
    assert_same_state(*made)


@check
def several_optimizers_of_one_model():
    """Two that overlap, and one of torch's own that does not know of it."""
    ours, plain = model(), model()
    for one in (ours, plain):
        layers = [list(layer.parameters()) for layer in one.module if isinstance(layer, nn.Linear)]
        optimizers = [sgd(layers[0] + layers[3]), adam(layers[1]), torch.optim.Adagrad(layers[2], lr=0.01)]
        if one is ours:
            overlapped(optimizers[0], one)
            overlapped(optimizers[1], one)
        for step in range(10):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(one, step).backward()
            for optimizer in optimizers[:: -1 if step % 2 else 1]:
                optimizer.step()
    assert_same_state(ours, plain)


@check
def one_optimizer_of_several_models_and_of_a_parameter_of_none():
    results = []
    for ours in (True, False):
        one, other = model(1), model(2)
        torch.manual_seed(3)
        free = nn.Parameter(torch.randn(3))
        optimizer = sgd([*one.parameters(), *other.parameters(), free])
        if ours:
            overlapped(optimizer)
        for step in range(8):
            optimizer.zero_grad()
            out = one(batch(step, 8, 6, dtype=torch.float32)) * free
            (out * other(batch(step, 8, 6, dtype=torch.float32))).pow(2).mean().backward()
            dist.all_reduce(free.grad.div_(SIZE))
            optimizer.step()
        results.append(
            {**one.state_dict(), **{"o" + k: v for k, v in other.state_dict().items()}, "free": free.detach()}
        )
    assert same(*results)


@check
def clipping_after_synchronize():
    def program(one, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            assert norm > 0
            optimizer.step()

    compare(program)


@check
def a_gradient_scaler():
    if not MODERN:
        return

    def program(one, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        for step in range(8):
            optimizer.zero_grad()
            factor = float("inf") if step == 4 and RANK == SIZE - 1 else 1.0
            scaler.scale(loss_of(one, step) * factor).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 128.0, scaler.get_scale()

    compare(program)


@check
def evaluation_and_reads_between_the_steps():
    seen = {True: [], False: []}

    def program(one, optimizer):
        mine = seen[hasattr(optimizer, "synchronize")]
        x = batch(99, 4, 6, dtype=torch.float32)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            optimizer.step()
            one.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                mine.append((one if step % 3 else one.module)(x).clone())
            one.train()
            mine.append(one.module[2].weight.detach().clone())
            mine.append(torch.cat([p.detach().reshape(-1) for p in one.parameters()]))
            mine.append({k: v.clone() for k, v in one.state_dict().items()})

    compare(program, (adam,))
    assert same(seen[True], seen[False])


@check
def direct_reads_after_synchronize():
    ours, plain = model(), model()
    lists = [list(one.parameters()) for one in (ours, plain)]
    optimizers = [overlapped(sgd(lists[0]), ours), sgd(lists[1])]
    for step in range(5):
        for one, optimizer in zip((ours, plain), optimizers):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            optimizer.step()
        optimizers[0].synchronize()
        for a, b in zip(*lists):
            assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


@check
def checkpoints_in_flight_and_resuming():
    ours, plain = model(), model()
    optimizers = [overlapped(adam(ours.parameters()), ours), adam(plain.parameters())]
    for one, optimizer in zip((ours, plain), optimizers):
        train(one, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": ours.state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    file.seek(0)
    state = torch.load(file)
    assert same(state["model"], plain.state_dict()) and same(state["optimizer"], optimizers[1].state_dict())
    for one, optimizer in zip((ours, plain), optimizers):
        train(one, optimizer, 3)  # goes astray, with updates in flight …
        one.load_state_dict(state["model"])  # … and returns
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        train(one, optimizer, 5)
    assert_same_state(ours, plain)
    assert_same_state(*optimizers)


@check
def copies_and_pickles_are_plain():
    ours = model()
    optimizer = overlapped(sgd(ours.parameters()), ours)
    train(ours, optimizer, 3)
    twin = copy.deepcopy(ours.module)
    again = pickle.loads(pickle.dumps(ours.module))
    for module in (twin, again):
        assert same(module.state_dict(), ours.module.state_dict())
        assert type(module[0]._parameters) in (dict, type(nn.Linear(1, 1)._parameters))
        module(torch.ones(1, 6)).sum().backward()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.SGD and same(other.state_dict(), optimizer.state_dict())
        other.step()
    wrapped = copy.deepcopy(ours)
    assert attachment_of(wrapped).overlap is None
    train(wrapped, sgd(wrapped.parameters()), 2)
    train(ours, optimizer, 2)


@check
def other_modes_of_ddp():
    several = {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.001, 0.003]} if buckets._takes_a_list() else {}
    for arguments in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        compare(make=functools.partial(model, **arguments))
    compare(make=functools.partial(model, static_graph=True, **several))


def mixed_loss(one, step):
    return one(batch(step, 4, 2, 5, 5), use_branch=(step + RANK) % 3 != 0 and step % 4 != 1).pow(2).mean()


@check
def unused_and_frozen_parameters_and_buffers():
    def make():
        torch.manual_seed(3)
        return model(module=Mixed(), find_unused_parameters=True)

    compare(lambda one, optimizer: train(one, optimizer, 9, mixed_loss), make=make)


class Tied(nn.Module):
    """What reads other modules' parameters: a tied head, attention, functional calls, lists, recurrent weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(30, 16)
        self.position = nn.Parameter(torch.randn(7, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.functional = nn.Linear(16, 16)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(3)])
        self.normed = nn.utils.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.layer(self.embedding(tokens) + self.position)
        x = x + self.recurrent(x)[0]
        x = x + nn.functional.linear(x, self.functional.weight, self.functional.bias)
        for scale in self.scales:
            x = x * scale
        return self.head(x + self.normed(x))


def tied_loss(one, step):
    tokens = torch.randint(30, (4, 7), generator=torch.Generator().manual_seed(10 * step + RANK))
    return nn.functional.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten())


@check
def modules_that_read_each_others_parameters():
    def program(one, optimizer):
        train(one, optimizer, 6, tied_loss)
        one.eval()  # the transformer's fast path reads all of it at once
        with torch.no_grad():
            tied_loss(one.module, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(program, make=lambda: model(module=Tied()))


@check
def activation_checkpoints():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model(4).module

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)

    compare(make=lambda: model(module=Recomputed()))


@check
def compiled_models():
    if not MODERN:
        return
    for inside in (True, False):

        def program(one, optimizer):
            wrapped = one if inside else torch.compile(one, backend="aot_eager")  # noqa: B023
            train(wrapped, optimizer, 5)

        def make():
            one = model().module
            # torch.compile wants no bucket that is smaller than the first.
            return model(module=torch.compile(one, backend="aot_eager") if inside else one, bucket_cap_mb=2)  # noqa: B023

        compare(program, make=make)
        torch._dynamo.reset()


@check
def traced_modules():
    """TorchScript keeps its parameters where nobody hears of reads: its pass waits for all, the script asks."""

    def make():
        return model(module=torch.jit.script(model(2).module))

    ours, plain = make(), make()
    optimizer = overlapped(sgd(ours.parameters()), ours)
    train(ours, optimizer)
    optimizer.synchronize()
    train(plain, sgd(plain.parameters()))
    for a, b in zip(ours.parameters(), plain.parameters()):  # TorchScript itself rounds now so, now so
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@check
def forward_passes_with_parameters_in_hand():
    """A module's forward that somebody replaced, as torch.cuda.make_graphed_callables does, reads them unheard."""

    def in_hand(linear):
        weight, bias = linear.weight, linear.bias

        def forward(x):
            return nn.functional.linear(x, weight, bias)

        linear.forward = forward

    def make():
        made = model()
        in_hand(next(one for one in made.modules() if isinstance(one, nn.Linear)))
        return made

    compare(lambda one, optimizer: train(one, optimizer, 5), make=make)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("their own bug")


@check
def an_exception_in_backward_leaves_the_model_usable():
    """All ranks fail in the same place; behind the first buckets torch itself does not go on."""

    def program(one, optimizer):
        train(one, optimizer, 3)
        broken = one.module.register_forward_hook(lambda module, inputs, output: Failing.apply(output))
        try:
            loss_of(one, 9).backward()
        except ValueError:
            pass
        else:
            raise AssertionError("no exception")
        broken.remove()
        train(one, optimizer, 3)

    compare(program)


@check
def scripts_hooks_of_the_step_are_called_once():
    if not hasattr(torch.optim.Optimizer, "register_step_post_hook"):
        return
    one = model()
    optimizer = overlapped(sgd(one.parameters()), one)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(one, optimizer, 3)
    assert calls == ["pre", "post"] * 3, calls


@check
def the_group_ends_with_updates_in_flight():
    """Keep it last."""
    ours, plain = model(), model()
    optimizers = [overlapped(sgd(ours.parameters()), ours), sgd(plain.parameters())]
    parameters = [list(one.parameters()) for one in (ours, plain)]
    for one, optimizer in zip((ours, plain), optimizers):
        train(one, optimizer, 4)
    dist.destroy_process_group()
    for a, b in zip(*parameters):
        assert torch.equal(a, b)
    assert not isinstance(ours.module[0]._parameters, paceline._torch.module_reads._Watched)


if __name__ == "__main__":
    run()
