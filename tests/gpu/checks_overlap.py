"""overlap="forward" on CUDA against the same training with a barrier: bit by bit, on all ranks."""

import copy
import os
import random
import time

import torch
import torch.distributed as dist
from checks import check, run
from gpu_world import DEVICE, RANK, SIZE, SLOTS, assert_same_bits, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch import gates
from paceline._torch.ddp import attachment_of

torch.use_deterministic_algorithms(True)
STEPS = 200


def network(seed=0, width=256):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(DEVICE)


def batch(step, rank=RANK):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 64, generator=generator).to(DEVICE)


def loss_of(model, step):
    return (model(batch(step)) ** 2).mean()


def wrap(module=None, group=None, **arguments):
    arguments.setdefault("bucket_cap_mb", 0.1)
    module = network() if module is None else module
    group = dist.new_group() if group is None else group
    return DistributedDataParallel(module, device_ids=[DEVICE.index], process_group=group, **arguments)


def overlapped(optimizer, model):
    assert attachment_of(model) is not None
    return paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")


def train(model, optimizer, steps=STEPS, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def same(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def compare(kind, program=train, codec="none", **wrapping):
    """program(model, optimizer) with and without overlap: the same model, the same optimizer state."""
    with settings(codec=codec):
        group = dist.new_group()
        ours, plain = wrap(group=group, **wrapping), wrap(group=group, **wrapping)
        optimizer, reference = overlapped(kind(ours.parameters()), ours), kind(plain.parameters())
        program(ours, optimizer)
        assert attachment_of(ours).overlap.taken > 0
        program(plain, reference)
    assert same(ours.state_dict(), plain.state_dict()), "parameters differ"
    assert same(optimizer.state_dict(), reference.state_dict()), "the optimizers' states differ"
    for name, parameter in ours.named_parameters():
        assert_same_bits(parameter, name)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-3),
    "momentum": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


@check
def bit_equal_to_the_barrier_exactly():
    for kind in OPTIMIZERS.values():
        compare(kind)


@check
def bit_equal_to_the_barrier_in_fp16():
    for kind in OPTIMIZERS.values():
        compare(kind, codec="fp16")


@check
def bit_equal_to_the_barrier_with_residuals():
    with settings(topk_threshold=0, topk_ratio=0.02):
        compare(sgd, codec="topk")
    compare(sgd, codec="int8")


@check
def other_modes_of_ddp():
    for arguments in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        compare(sgd, lambda m, o: train(m, o, 20), **arguments)


@check
def hyperparameters_are_those_of_the_step():
    def program(model, optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()

    compare(sgd, program)


@check
def clipping_after_synchronize_and_reads_between_steps():
    def program(model, optimizer):
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            with torch.no_grad():
                model.module(batch(step + 500))
            if step == 10:
                saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(model, optimizer, 10, 20)

    compare(OPTIMIZERS["adam"], program)
    compare(OPTIMIZERS["fused adamw"], program)


@check
def a_loss_scale_that_overflows():
    def program(model, optimizer):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step in range(12):
            optimizer.zero_grad()
            factor = float("inf") if step == 5 and RANK == 0 else 1.0
            scaler.scale(loss_of(model, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9

    compare(sgd, program)
    compare(OPTIMIZERS["fused sgd"], program)


@check
def the_first_layer_is_enqueued_before_the_last_gradients_have_arrived():
    """Rank 1 sends the last layer's bucket only when rank 0's host has left the next pass's first layer."""
    for kind in ("momentum", "fused sgd"):
        _first_layer_is_enqueued(OPTIMIZERS[kind], f"first layer has run, {kind}")


def _first_layer_is_enqueued(kind, run_out):
    model = wrap()
    optimizer = overlapped(kind(model.parameters()), model)
    overlap, store = attachment_of(model).overlap, dist.distributed_c10d._get_default_store()
    order = overlap.order
    order.learns = False  # nothing but the order below is tried
    # After ten iterations DDP's own statistics, which wait for its last backward pass, are seldom taken.
    train(model, optimizer, 12)
    order.order = sorted(order._sizes, reverse=True)
    assert len(order.order) > 2
    original, seen = overlap.carrier.submit, []

    def submit(flight, part):
        if flight.index == 0 and RANK == 1:
            store.get(run_out)
        return original(flight, part)

    def first_layer_has_run(_module, _inputs, _output):
        last = next(f for f in overlap._flights if f.index == 0)
        seen.append((last.arrived, overlap.carrier.there(last.operation)))
        store.set(run_out, "yes")

    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.module[0].parameters()]
    ahead = batch(8)  # with one hardware queue a copy to the device waits for what waits for rank 1
    overlap.carrier.submit = submit
    loss_of(model, 7).backward()
    overlap.carrier.submit = original
    optimizer.step()
    hook = model.module[0].register_forward_hook(first_layer_has_run) if RANK == 0 else None
    model(ahead)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.module[0].parameters()))
    if hook is not None:
        hook.remove()
        assert seen == [(False, False)], seen


@check
def the_order_of_buckets_comes_from_the_devices_times():
    """Printed for the log: what was measured. All ranks send in rank 0's order."""
    model = wrap(network(width=1024), bucket_cap_mb=1)
    optimizer = overlapped(sgd(model.parameters()), model)
    train(model, optimizer, 40)
    order = attachment_of(model).overlap.order
    report = order.report()
    if RANK == 0:
        print(report, flush=True)
    count = len(order._sizes)
    assert count > 2 and sorted(report["order"]) == sorted(order._sizes), report
    assert report["ready"] == sorted(report["ready"]) and report["ready"][0] == 0 < report["ready"][-1]
    assert min(report["length"]) > 0 and min(report["ahead"]) >= 0 and report["ahead"] == report["behind"]
    assert max(report["tail"]) == report["tail"][-1] > report["tail"][0] >= 0, "the first layer is wanted first"
    orders = [None] * SIZE
    dist.all_gather_object(orders, report["order"])
    assert orders == [report["order"]] * SIZE, orders


@check
def gradients_under_way_are_named():
    model = wrap()
    optimizer = overlapped(sgd(model.parameters()), model)
    loss_of(model, 0).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except paceline.UnsupportedError as error:
        assert "optimizer.synchronize()" in str(error)
    else:
        raise AssertionError("clipped what had not arrived")
    optimizer.step()


@check
def a_thousand_steps_with_delays():
    """Random sleeps of the host and of the device: no order of events may hang or change a bit."""
    for kind in ("momentum", "fused sgd"):
        _steps_with_delays(OPTIMIZERS[kind])


def _steps_with_delays(kind):
    ends = []
    for how in (True, False):
        model = wrap(network(width=64), bucket_cap_mb=0.01)
        optimizer = kind(model.parameters())
        if how:
            overlapped(optimizer, model)
        source = random.Random(RANK)

        def delay(_module, _inputs, source=source):
            if source.random() < 0.05:
                time.sleep(source.random() * 0.002)
            if source.random() < 0.05:
                torch.cuda._sleep(int(source.random() * 2_000_000))

        for module in model.module:
            module.register_forward_pre_hook(delay)
        train(model, optimizer, 1000 if SLOTS == 1 else 150)
        ends.append(model.state_dict())
    assert same(*ends)


@check
def a_gate_that_closes_amid_an_update_stops_none_of_it_or_all():
    """A tensor whose gradient has arrived is updated as a whole. Of the live word its kernel's blocks read both."""
    steps = attachment_of(wrap()).endpoint.steps
    word = torch.zeros((), pin_memory=True)
    live = gates.tensor_at(word.data_ptr(), DEVICE)
    parameter = nn.Parameter(torch.zeros(1 << 26, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    half, source = {"live": 0, "read": 0}, random.Random(RANK)
    for trial in range(300):
        way = "read" if trial % 2 else "live"
        word.zero_()
        with torch.no_grad():
            parameter.zero_()
        torch.cuda.synchronize()
        optimizer.found_inf = live if way == "live" else steps.read_gate(live)
        optimizer.step()
        until = time.perf_counter() + source.random() * 4e-4
        while time.perf_counter() < until:
            pass
        word.fill_(1.0)
        torch.cuda.synchronize()
        half[way] += int(parameter.detach().unique().numel() > 1)
    del optimizer.found_inf
    if RANK == 0:
        print(
            f"figure: half updated of 150 each, by the live word {half['live']}, read once {half['read']}", flush=True
        )
    assert half["read"] == 0, half


@check
def what_gates_cost():
    """Reported, not judged: seconds of a step with a barrier and without, and how long the host waited of that."""
    for how, fused in ((False, False), (True, False), (False, True), (True, True)):
        model = wrap(network(width=2048), bucket_cap_mb=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        waited = [0.0]
        if how:
            overlapped(optimizer, model)
            carrier = attachment_of(model).overlap.carrier
            original = carrier.wait

            def timed(operation, original=original, waited=waited):
                started = time.perf_counter()
                finite = original(operation)
                waited[0] += time.perf_counter() - started
                return finite

            carrier.wait = timed
        train(model, optimizer, 30)
        torch.cuda.synchronize()
        waited[0], begin = 0.0, time.perf_counter()
        train(model, optimizer, 20)
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) / 20 * 1e3
        if RANK == 0:
            waiting = f"{waited[0] / 20 * 1e3:.2f} ms of it waiting"
            print(f"figure: overlap {how}, fused {fused}: {took:.2f} ms a step, {waiting}", flush=True)


if __name__ == "__main__":
    assert os.environ["CHECKS_REPORT"]
    run()
