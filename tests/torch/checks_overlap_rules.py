"""overlap="forward": what overlaps with what, made certain by ranks that wait for each other; what is refused."""

import gc
import os

import torch
import torch.distributed as dist
from checks import check, run
from overlap_world import RANK, adam, loss_of, model, overlapped, raises, same, sgd, train
from torch import nn

import paceline.torch
from paceline._torch.ddp import attachment_of


def told(key, value=None):
    """Tells all ranks (value), or waits until told."""
    store = dist.distributed_c10d._get_default_store()
    if value is not None:
        store.set(key, value)
    else:
        store.get(key)


def first_layers_first(one):
    """Fixes the order of sending: the first layer's bucket first, the last layer's last."""
    order = attachment_of(one).overlap.order
    order.order = sorted(order._sizes, reverse=True)
    assert len(order.order) > 2


@check
def the_first_layer_runs_before_the_last_gradients_have_arrived():
    """Rank 1 sends the last layer's bucket only when rank 0's next forward pass has left the first layer."""
    one = model()
    optimizer = overlapped(sgd(one.parameters()), one)
    train(one, optimizer, 2)  # DDP's buckets are final
    overlap = attachment_of(one).overlap
    train(one, optimizer, 1)
    first_layers_first(one)
    original, seen = overlap.carrier.submit, []

    def submit(flight, part):
        if flight.index == 0 and RANK == 1:
            told("first layer has run")
        return original(flight, part)

    def first_layer_has_run(_module, _inputs, _output):
        last = next(f for f in overlap._flights if f.index == 0)
        seen.append((last.arrived, overlap.carrier.there(last.operation)))
        told("first layer has run", "yes")

    optimizer.zero_grad()
    overlap.carrier.submit = submit
    before = [p.detach().clone() for p in one.module[0].parameters()]
    loss_of(one, 7).backward()
    overlap.carrier.submit = original
    optimizer.step()
    hook = one.module[0].register_forward_hook(first_layer_has_run) if RANK == 0 else None
    loss_of(one, 8)
    after = [p.detach().clone() for p in one.module[0].parameters()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after)), "the first layer ran without its update"
    if hook is not None:
        hook.remove()
        assert seen == [(False, False)], seen
    optimizer.synchronize()


@check
def the_same_bits_in_any_order():
    ends = []
    for fixed in (False, True):
        one = model()
        optimizer = overlapped(adam(one.parameters()), one)
        train(one, optimizer, 3)
        if fixed:
            first_layers_first(one)
        train(one, optimizer, 10)
        ends.append(one.state_dict())
    assert same(*ends)


@check
def a_step_does_not_wait():
    """Rank 1 sends nothing until rank 0 has left backward() and step()."""
    one = model()
    optimizer = overlapped(sgd(one.parameters()), one)
    train(one, optimizer, 3)
    overlap = attachment_of(one).overlap
    original = overlap.carrier.submit

    def submit(flight, part):
        told("step is over")
        return original(flight, part)

    if RANK == 1:
        overlap.carrier.submit = submit
    optimizer.zero_grad()
    loss_of(one, 3).backward()
    overlap.carrier.submit = original
    optimizer.step()
    if RANK == 0:
        assert not any(flight.arrived for flight in overlap._flights)
        told("step is over", "yes")
    optimizer.zero_grad()
    optimizer.synchronize()


@check
def an_optimizer_of_its_own_waits_for_nothing_of_ours():
    one = model()
    optimizer = overlapped(sgd(one.parameters()), one)
    train(one, optimizer, 2)
    other = nn.Parameter(torch.ones(2))
    plain = sgd([other])
    other.grad = torch.ones(2)
    plain.step()
    assert attachment_of(one).overlap._flights, "it waited"
    optimizer.synchronize()


@check
def gradients_under_way_are_named():
    one = model()
    optimizer = overlapped(sgd(one.parameters()), one)
    train(one, optimizer, 1)
    optimizer.zero_grad()
    loss_of(one, 1).backward()
    parameters = list(one.parameters())
    actions = [
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: parameters[0].grad.add_(1),
        lambda: parameters[0].grad * 2,
        lambda: parameters[0].grad.norm(),
        lambda: torch.cat([p.grad.reshape(-1) for p in parameters]),
        lambda: parameters[0].grad.data,
        lambda: parameters[0].grad.copy_(torch.ones(())),
        lambda: parameters[0].grad[0],
        lambda: torch.optim.SGD(parameters, lr=1.0, foreach=False).step(),
    ]
    for action in actions:
        raises(paceline.UnsupportedError, "optimizer.synchronize()", action)
    raises(paceline.UnsupportedError, "'0.weight'", lambda: parameters[0].grad.sum())
    assert parameters[0].grad.shape == parameters[0].shape and "way" in repr(parameters[0].grad)
    optimizer.synchronize()
    assert parameters[0].grad.norm() > 0
    with optimizer.skip_synchronize():
        optimizer.step()


class Norms(torch.optim.SGD):
    """Of no known kind."""


@check
def what_can_not_be_done_is_named():
    give = paceline.torch.DistributedOptimizer
    one = model()
    parameters = list(one.parameters())
    raises(paceline.InvalidArgumentError, "torch.optim.Optimizer", lambda: give(one))
    raises(paceline.InvalidArgumentError, "overlap='backward'", lambda: give(sgd(parameters), overlap="backward"))
    raises(paceline.UnsupportedError, "LBFGS", lambda: overlapped(torch.optim.LBFGS(parameters), one))
    raises(paceline.UnsupportedError, "LBFGS", lambda: overlapped(torch.optim.LBFGS(parameters), per_parameter=True))
    raises(paceline.UnsupportedError, "per_parameter=True", lambda: overlapped(Norms(parameters, lr=0.1), one))
    raises(paceline.InvalidArgumentError, "DistributedDataParallel", lambda: overlapped(sgd(parameters), one.module))
    raises(paceline.InvalidArgumentError, "none of the model's", lambda: overlapped(sgd(parameters), model()))
    raises(paceline.UnsupportedError, "wrap the model", lambda: overlapped(sgd(nn.Linear(2, 2).parameters())))
    names = [("twice", parameters[0]), ("twice", parameters[1])]
    raises(paceline.InvalidArgumentError, "twice", lambda: give(sgd(parameters), names, overlap="forward"))
    raises(paceline.InvalidArgumentError, "lacks", lambda: give(sgd(parameters), [("a", parameters[0])]))
    optimizer = overlapped(Norms(parameters, lr=0.1), one, per_parameter=True)
    raises(paceline.InvalidArgumentError, "already", lambda: overlapped(optimizer, one))
    train(one, optimizer, 2)
    hooked = model()
    hooked.register_comm_hook(None, lambda state, bucket: paceline_never())  # noqa: F821
    raises(paceline.UnsupportedError, "register_comm_hook", lambda: overlapped(sgd(hooked.parameters()), hooked))

    def joined():
        with one.join():
            loss_of(one, 0)

    raises(paceline.UnsupportedError, "join", joined)


@check
def names_of_the_script_stand_in_messages():
    one = model()
    named = [(f"net.{name}", p) for name, p in one.module.named_parameters()]
    optimizer = paceline.torch.DistributedOptimizer(sgd(one.parameters()), named, overlap="forward")
    train(one, optimizer, 1)
    optimizer.zero_grad()
    loss_of(one, 1).backward()
    raises(paceline.UnsupportedError, "'net.2.bias'", lambda: one.module[2].bias.grad.sum())


@check
def without_overlap_and_without_paceline_it_is_the_optimizer_that_it_was():
    one, plain = model(), model()
    optimizer = paceline.torch.DistributedOptimizer(sgd(one.parameters()), one.named_parameters())
    assert attachment_of(one).overlap is None
    for step in range(4):
        optimizer.zero_grad()
        loss_of(one, step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    train(plain, sgd(plain.parameters()), 4)
    assert same(one.state_dict(), plain.state_dict())
    os.environ["PACELINE_DISABLE"] = "1"
    try:
        off = model()
        train(off, overlapped(sgd(off.parameters()), off), 3)
    finally:
        del os.environ["PACELINE_DISABLE"]
    if os.environ.get("PACELINE_CODEC") != "topk":
        on = model()
        train(on, sgd(on.parameters()), 3)
        assert same(off.state_dict(), on.state_dict())


@check
def a_model_that_is_dropped_in_flight():
    """What is under way ends before its memory does; its module has the updates."""
    ours, plain = model(), model()
    optimizer = overlapped(sgd(ours.parameters()), ours)
    overlap, module = attachment_of(ours).overlap, ours.module
    train(ours, optimizer, 3)
    assert overlap._flights
    del ours, optimizer
    gc.collect()
    assert not overlap._flights and not overlap.reads.pending
    train(plain, sgd(plain.parameters()), 3)
    assert same(list(module.parameters()), list(plain.module.parameters()))


@check
def residuals_are_kept_with_the_steps():
    """Top-k with overlap and with a barrier: the same parameters and residuals, also in a checkpoint."""
    if os.environ.get("PACELINE_CODEC") != "topk":
        return
    ends = []
    for how in (True, False):
        models = [model(0), model(1)]  # on one communicator
        optimizers = [sgd(one.parameters()) for one in models]
        if how:
            overlapped(optimizers[0], models[0])
            overlapped(optimizers[1], models[1])
        for step in range(10):
            for one, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss_of(one, step).backward()
                optimizer.step()
        ends.append([(paceline.torch.residual_state_dict(one)["residuals"], one.state_dict()) for one in models])
    assert same(*ends)
    assert any(r.abs().sum() > 0 for r in ends[0][0][0].values())


if __name__ == "__main__":
    run()
