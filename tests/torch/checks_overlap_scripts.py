"""overlap="forward" in scripts that change things between the passes: the barrier's bits, or an error that names what.

All updates are as late as they can be: none is found to have arrived before something waits for it.
"""

import functools
import os

import torch
from checks import check, run
from overlap_world import (
    MODERN,
    adam,
    assert_same_state,
    compare,
    loss_of,
    model,
    overlapped,
    raises,
    same,
    sgd,
    train,
)
from torch import nn

import paceline.torch
from paceline._torch import carriers

carriers.CpuCarrier.there = lambda self, operation: False


def layers_of(one):
    return [list(layer.parameters()) for layer in one.module if isinstance(layer, nn.Linear)]


@check
def gradients_that_stay_while_ddp_makes_other_buckets():
    """As views of the buckets, which DDP makes anew as the second forward pass begins, from what .grad holds."""

    def never_cleared(one, optimizer):
        for step in range(3):
            loss_of(one, step).backward()
            optimizer.step()

    def several_passes(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, 2 * step).backward()
            loss_of(one, 2 * step + 1).backward()
            optimizer.step()

    for program in (never_cleared, several_passes):
        compare(program, make=functools.partial(model, gradient_as_bucket_view=True))


@check
def parameter_groups_that_change_between_backward_and_step():
    def added(optimizer, layers):
        optimizer.add_param_group({"params": layers[2], "lr": 0.2})

    def appended(optimizer, layers):
        optimizer.param_groups[0]["params"] += layers[2]

    def dropped(optimizer, layers):
        del optimizer.param_groups[1]

    def thinned(optimizer, layers):
        optimizer.param_groups[0]["params"] = layers[0][:1]

    for change in (added, appended, dropped, thinned):
        for before_step in (True, False):
            made = []
            for ours in (True, False):
                one = model()
                layers = layers_of(one)
                optimizer = sgd([{"params": layers[0]}, {"params": layers[1], "lr": 0.1}])
                if ours:
                    overlapped(optimizer, one)
                for step in range(5):
                    optimizer.zero_grad()
                    loss_of(one, step).backward()
                    if step == 2 and before_step:
                        change(optimizer, layers)
                    optimizer.step()
                    if step == 2 and not before_step:
                        change(optimizer, layers)
                made.append((one, optimizer))
            (one, optimizer), (plain, reference) = made
            assert_same_state(one, plain)
            for mine, theirs in zip(one.parameters(), plain.parameters()):
                assert same(optimizer.state.get(mine), reference.state.get(theirs))


@check
def an_optimizer_more_between_backward_and_step():
    ends = []
    for ours in (True, False):
        one = model()
        layers, optimizers = layers_of(one), []
        for step in range(5):
            if step == 0:
                optimizers.append(sgd(layers[0] + layers[3]))
            one.zero_grad()
            loss_of(one, step).backward()
            if step == 2:
                optimizers.append(adam(layers[1]))
            if ours and step in (0, 2):
                overlapped(optimizers[-1], one)
            for optimizer in optimizers:
                optimizer.step()
        ends.append(one.state_dict())
    assert same(*ends)


class Single(nn.Module):
    """Parameters of one element, which torch can add to whatever their strides are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, data):
        return data * self.scale + self.shift


@check
def backward_passes_that_ddp_takes_no_part_in():
    """They add to .grad, also where it stands for a gradient on its way."""

    def graph_used_twice(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(one, step)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()

    def around_ddp(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            loss_of(one.module, step + 1).backward()
            optimizer.step()

    def of_higher_order(one, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            loss_of(one.module, step + 1).backward(create_graph=True)
            for parameter in one.parameters():
                parameter.grad = parameter.grad.detach()
            optimizer.step()

    for program in (graph_used_twice, around_ddp, of_higher_order):
        for views in (False, True):
            for make in (model, lambda **given: model(module=Single(), **given)):
                compare(program, make=functools.partial(make, gradient_as_bucket_view=views), each_rank_alike=False)


@check
def a_comm_hook_that_comes_later_is_refused():
    one, plain = model(), model()
    optimizer = overlapped(sgd(one.parameters()), one)
    train(one, optimizer, 2)
    raises(
        paceline.UnsupportedError,
        "register_comm_hook",
        lambda: one.register_comm_hook(None, lambda state, bucket: bucket.buffer()),
    )
    train(one, optimizer, 2)
    reference = sgd(plain.parameters())
    train(plain, reference, 2)
    train(plain, reference, 2)
    assert_same_state(one, plain)


@check
def parameters_of_several_models():
    """Read through any of them, they are up to date: a module under two DDPs, a parameter that two models share."""

    def twice():
        module = model().module
        return [model(module=module), model(module=module)]

    def shared():
        pair = [model(0), model(1)]
        pair[1].module[4].weight = pair[0].module[4].weight
        return [pair[0], model(module=pair[1].module)]

    def in_turn(models, ours):
        optimizers = [sgd(models[0].parameters()), adam(models[1].parameters())]
        if ours:
            for one, optimizer in zip(models, optimizers):
                overlapped(optimizer, one)
        for step in range(6):
            for one, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss_of(one, step).backward()
                optimizer.step()

    def by_one_optimizer(models, ours):
        known = {id(p): p for one in models for p in one.parameters()}
        optimizer = sgd(list(known.values()))
        if ours:
            overlapped(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            for one in models:
                loss_of(one, step).backward()
            optimizer.step()

    for make in (twice, shared):
        for program in (in_turn, by_one_optimizer):
            ends = []
            for ours in (True, False):
                models = make()
                program(models, ours)
                ends.append([one.state_dict() for one in models])
            assert same(*ends), (make.__name__, program.__name__)


@check
def a_modules_dict_that_is_merged_into_another():
    one, plain = model(), model()
    train(one, overlapped(sgd(one.parameters()), one), 3)
    train(plain, sgd(plain.parameters()), 3)
    for merge in (dict, lambda parameters: {**parameters}):
        mine, theirs = ([merge(layer._parameters) for layer in m.module] for m in (one, plain))
        assert same(mine, theirs)


class Complex(nn.Module):
    """Weights of complex numbers, which DDP's buckets hold as pairs of real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.real = nn.Linear(6, 60)
        self.complex = nn.Parameter(0.05 * torch.randn(60, 3, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64).t())
        self.single = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, data):
        return (self.real(data).tanh().to(torch.complex64) @ self.complex @ self.transposed.t() * self.single).abs()


@check
def complex_parameters():
    if not MODERN:
        return
    for views in (False, True):
        compare(make=lambda views=views: model(module=Complex(), gradient_as_bucket_view=views), each_rank_alike=False)


class Grouped(torch.optim.Optimizer):
    """Updates each parameter by itself, but counts its steps in its groups, and in itself."""

    def __init__(self, parameters, where):
        super().__init__(parameters, {"steps": torch.zeros(()) if where == "tensor" else 0})
        self.where = where
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.where == "tensor":
                group["steps"].add_(1)
            elif self.where == "group":
                group["steps"] += 1
            elif self.where == "self":
                self.steps += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1 / (1 + group["steps"] + self.steps))


@check
def optimizers_that_count_beside_their_state_are_refused():
    ours, plain = model(), model()
    train(ours, overlapped(Grouped(ours.parameters(), "nowhere"), ours, per_parameter=True))
    train(plain, Grouped(plain.parameters(), "nowhere"))
    assert_same_state(ours, plain)
    for where, name in (("group", "['steps']"), ("tensor", "['steps']"), ("self", "self.steps")):
        one = model()
        optimizer = overlapped(Grouped(one.parameters(), where), one, per_parameter=True)
        loss_of(one, 0).backward()
        optimizer.step()
        raises(paceline.UnsupportedError, name, optimizer.synchronize)
    alone = nn.Linear(2, 2)
    os.environ["PACELINE_DISABLE"] = "1"
    try:  # nothing overlaps, and the optimizer is as it was
        optimizer = overlapped(Grouped(alone.parameters(), "group"), per_parameter=True)
    finally:
        del os.environ["PACELINE_DISABLE"]
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 3


class Annealed(torch.optim.Optimizer):
    """Has its learning rate in itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.lr = 0.1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.lr)


@check
def numbers_of_an_optimizer_that_change_right_after_the_step():
    ends = []
    for ours in (True, False):
        one = model()
        optimizer = Annealed(one.parameters())
        if ours:
            overlapped(optimizer, one, per_parameter=True)
        for _ in range(5):
            train(one, optimizer, 1)
            optimizer.lr *= 0.5
        ends.append(one.state_dict())
    assert same(*ends)


@check
def updates_are_no_part_of_what_the_forward_pass_is_part_of():
    """Modes that hear of every operation: a checkpoint that keeps some results, fake tensors; torch.func."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
    except ImportError:
        return

    def keep(_context, operation, *_args, **_kwargs):
        root = operation is torch.ops.aten.sqrt.default  # Adam takes roots as well
        return CheckpointPolicy.MUST_SAVE if root else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model().module

        def forward(self, data):
            contexts = functools.partial(create_selective_checkpoint_contexts, keep)
            return checkpoint(self.roots, data, use_reentrant=False, context_fn=contexts)

        def roots(self, data):
            return (self.inner(data).abs() + 1).sqrt()

    def with_modes(one, optimizer):
        train(one, optimizer, 2)
        with FakeTensorMode(allow_non_fake_inputs=True):
            one.module(torch.ones(2, 6))
        train(one, optimizer, 1)
        torch.func.vmap(torch.func.grad(lambda data: one.module(data).sum()))(torch.ones(4, 6))
        train(one, optimizer, 1)

    compare(kinds=(adam,), make=lambda: model(module=Checkpointed()))
    compare(with_modes)


@check
def updates_that_a_compiler_comes_to():
    """As it traces a function of the script's that reads parameters."""
    if not MODERN:
        return

    def program(one, optimizer):
        traced = torch.compile(lambda data: one.module(data), backend="eager")
        for _ in range(3):
            train(one, optimizer, 1)
            traced(torch.ones(2, 6))
        torch._dynamo.reset()

    compare(program)


@check
def layers_whose_forward_is_compiled():
    """They are compiled once, not once for each set of parameters that wait."""
    if not MODERN:
        return
    compiled = []

    def count(graph, _inputs):
        compiled.append(graph)
        return graph

    def make():
        module = model().module
        module.forward = torch.compile(module.forward, backend=count)
        return model(module=module, bucket_cap_mb=2)

    one = make()
    train(one, sgd(one.parameters()), 3)
    alone = len(compiled)
    one = make()
    train(one, overlapped(sgd(one.parameters()), one), 6)
    assert alone > 0 and len(compiled) == 2 * alone, (alone, len(compiled))
    torch._dynamo.reset()


if __name__ == "__main__":
    run()
