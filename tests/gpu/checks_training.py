"""DDP training on CUDA through Paceline: parameters against plain DDP, float64 and the residuals' own books."""

import contextlib
import copy
import functools
import os
import random
import time

import torch
import torch.distributed as dist
from checks import check, keep_ports, run
from gpu_world import DEVICE, NODES, RANK, SIZE, SLOTS, added, assert_same_bits, gather, of_my_node, settings, shards
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.torch
from paceline import _cuda
from paceline._torch import gates
from paceline._torch.ddp import attachment_of

torch.use_deterministic_algorithms(True)
STEPS = 12


def network(seed=0, width=512):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(DEVICE)


def batch(step, rank=RANK, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 64, generator=generator).to(DEVICE, dtype)


def loss_of(model, data):
    return (model(data) ** 2).mean()


def wrap(model, process_group=None, **arguments):
    """A DDP model over a process group of its own, so that the settings of this moment hold for it."""
    group = process_group or dist.new_group()
    return DistributedDataParallel(model, device_ids=[DEVICE.index], process_group=group, **arguments)


def wrap_plain(model, **arguments):
    os.environ["PACELINE_DISABLE"] = "1"
    try:
        return DistributedDataParallel(model, device_ids=[DEVICE.index], **arguments)
    finally:
        del os.environ["PACELINE_DISABLE"]


def train(model, steps=STEPS, lr=0.1, start=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return model


def assert_equal(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(a, b), (name, (a - b).abs().max().item())


def assert_all_ranks_equal(model):
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, name)


@check
def a_fused_optimizer_behind_a_gate_is_bit_equal_to_one_that_waits():
    """For each codec; the host runs ahead where there is a gate, and residuals are kept a step later."""
    steps = 60
    given = []
    original = gates.fits
    for codec in ("none", "fp16", *(("int8", "topk") if NODES == 2 else ())):
        ends = []
        for gated in (True, False):
            gates.fits = lambda optimizer, gated=gated: given.append(gated) or (gated and original(optimizer))
            try:
                with settings(codec=codec, topk_threshold=0):
                    model = wrap(network())
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
                    for step in range(steps):
                        optimizer.zero_grad()
                        loss_of(model, batch(step)).backward()
                        optimizer.step()
                        assert not hasattr(optimizer, "found_inf")
                    torch.cuda.synchronize()
                    ends.append([model, optimizer.state_dict()["state"]])
            finally:
                gates.fits = original
        assert_equal(ends[0][0], ends[1][0])
        assert_all_ranks_equal(ends[0][0])
        for one, other in zip(ends[0][1].values(), ends[1][1].values()):
            assert all(torch.equal(one[name], other[name]) for name in one), codec
    assert given.count(True) >= steps


@check
def the_model_travels_through_paceline():
    model = wrap(network())
    attachment = attachment_of(model)
    before = attachment.endpoint.communicator.stats()
    train(model, 3)
    dist.barrier()  # all have all: so this rank has sent all
    after = attachment.endpoint.communicator.stats()
    size = sum(p.numel() * 4 for p in model.parameters())
    assert after["operations"] - before["operations"] >= 3
    sent = (after["wire_bytes"] - before["wire_bytes"]) * SLOTS
    wanted = 3 * size * 2 * (NODES - 1) / NODES
    assert abs(sent / wanted - 1) < 0.03, (sent, wanted)


MODES = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


@check
def exact_equals_plain_ddp_bit_by_bit():
    """Two ranks add two numbers: there is one order."""
    assert SIZE == 2
    for arguments in MODES:
        ours, plain = wrap(network(), **arguments), wrap_plain(network(), **arguments)
        train(ours)
        train(plain)
        assert_all_ranks_equal(ours)
        assert_equal(ours.module, plain.module)


@check
def all_ranks_are_equal_in_every_mode_of_ddp():
    for arguments in MODES:
        assert_all_ranks_equal(train(wrap(network(), **arguments)))


@check
def exact_and_16_bits_follow_float64():
    reference = network().double()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (loss_of(reference, batch(step, rank, torch.float64)) / SIZE).backward()
        optimizer.step()
    moved = [(a.double() - b).norm() for a, b in zip(network().parameters(), reference.parameters())]
    for codec, bound in (("none", 2e-4), ("fp16", 2e-3), ("bf16", 2e-2)):
        with settings(codec=codec):
            model = train(wrap(network()))
        assert_all_ranks_equal(model)
        for (name, p), q, way in zip(model.module.named_parameters(), reference.parameters(), moved):
            error = (p.double() - q).norm() / way
            assert error < bound, (codec, name, error.item())


def replay(codec, **chosen):
    """A copy of the model is trained by what the residuals say was sent: both must stay equal, bit by bit.

    The gradients of a node's ranks are added up first, and each of them keeps the residual of its shards. Of two ranks
    or nodes there is one order. Where DDP rebuilds its buckets (it does not for find_unused_parameters) shards change
    hands in a node, and what the former owner kept comes with its gradient: that sum is rounded once more.
    """
    assert NODES == 2 and SLOTS <= 2
    replay_with(codec, assert_equal if SLOTS == 1 else assert_close, **chosen)
    replay_with(codec, assert_equal, find_unused_parameters=True, **chosen)


def assert_close(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), (name, (a - b).abs().max().item())


def replay_with(codec, compare, find_unused_parameters=False, **chosen):
    with settings(codec=codec, **chosen):
        model = wrap(network(), find_unused_parameters=find_unused_parameters)
        attachment = attachment_of(model)
        copy_ = network()
        mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(copy_.parameters(), lr=0.1, momentum=0.9)
        old = {name: torch.zeros(p.shape) for name, p in model.module.named_parameters()}
        for step in range(STEPS):
            mine.zero_grad()
            theirs.zero_grad()
            loss_of(model, batch(step)).backward()
            loss_of(copy_, batch(step)).backward()
            mine.step()
            kept = paceline.torch.residual_state_dict(model)["residuals"]
            new = {name: added(of_my_node(gather(residual))) for name, residual in kept.items()}
            for name, p in copy_.named_parameters():
                gradient = added(of_my_node(gather(p.grad)))
                v = (gradient.double() / SIZE + old[name].double()).float()
                p.grad.copy_(added(gather(v - new[name])[::SLOTS]))
            theirs.step()
            old = new
            compare(model.module, copy_)
        assert_all_ranks_equal(model)
        assert any(r.any() for r in old.values()) == (codec != "none"), "no residual was kept"
        assert attachment.endpoint.codec == codec


@check
def exact_equals_its_replay():
    replay("none")


@check
def top_k_equals_its_replay():
    replay("topk", topk_ratio=0.02, topk_threshold=0)
    replay("topk", topk_ratio=0.02, topk_threshold=0, topk_fp16=1)


@check
def int8_equals_its_replay():
    replay("int8")


def reached_by_top_k(v, ratio):
    """Where |v| reaches the threshold that top-k reads off its histograms: its last place's, less the lowest 7 bits.

    Of so few elements it looks at all. There velocities become zero, also where what comes first takes every place.
    """
    last = v.abs().topk(max(int(ratio * v.numel()), 1)).values[-1:]
    return v.abs() >= (last.view(torch.int32) >> 7 << 7).view(torch.float32)


@check
def top_k_with_momentum_equals_its_replay():
    """By the rule of codec.h: velocity' = momentum · velocity + gradient, zero where the threshold is reached.

    What is not sent must be velocity' + residual, and what is sent is what the optimizer without a momentum applies.
    """
    assert NODES == 2 and SLOTS <= 2
    ratio, momentum = 0.02, 0.9
    # One bucket, which DDP never rebuilds: shards and their velocities stay where they are.
    with settings(codec="topk", topk_ratio=ratio, topk_momentum=momentum):
        model = wrap(network(), bucket_cap_mb=100, find_unused_parameters=True)
    attachment = attachment_of(model)
    names, original, buckets = attachment.parameter_names(), attachment.all_reduce, []

    def noted(bucket):
        buckets.append([names[id(p)] for p in bucket.parameters()])
        return original(bucket)

    def flat(tensors):
        """In the bucket's order; of all ranks of this node together."""
        return added(of_my_node(gather(torch.cat([tensors[name].reshape(-1).cpu() for name in buckets[0]]))))

    attachment.all_reduce = noted
    copy_ = network()
    parameters = dict(copy_.named_parameters())
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, copy_))
    velocity = residual = torch.zeros(sum(p.numel() for p in copy_.parameters()))
    for step in range(STEPS):
        mine.zero_grad()
        theirs.zero_grad()
        loss_of(model, batch(step)).backward()
        loss_of(copy_, batch(step)).backward()
        mine.step()
        gradient = flat({name: p.grad for name, p in parameters.items()})
        left = flat(paceline.torch.residual_state_dict(model)["residuals"])
        float32 = torch.tensor(momentum).item()  # as the path multiplies by it
        velocity = (float32 * velocity.double() + gradient.double() / SIZE).float()
        v = velocity + residual
        reached = torch.cat([reached_by_top_k(v[first:end], ratio) for first, end in shards(len(v))])
        assert torch.allclose(left[~reached], v[~reached], rtol=1e-6, atol=1e-12), step
        went = reached & (left == 0)
        assert 0.98 * ratio * len(v) <= went.sum() <= ratio * len(v), (step, int(went.sum()), len(v))
        average = added(gather(v * went)[::SLOTS])
        for name, part in zip(buckets[0], average.split([parameters[name].numel() for name in buckets[0]])):
            parameters[name].grad.copy_(part.view(parameters[name].shape))
        theirs.step()
        assert_close(model.module, copy_)
        velocity, residual = velocity * ~reached, left
    assert_all_ranks_equal(model)
    assert buckets == [buckets[0]] * STEPS, [len(one) for one in buckets]
    assert attachment.endpoint.momentum == momentum and velocity.any() and residual.any()


class Lookup(nn.Module):
    """An embedding and a bag, both worth their rows, and a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.bag = nn.Embedding(20011, 96), nn.EmbeddingBag(6000, 96, mode="sum")
        self.head = nn.Linear(96, 10)

    def forward(self, data):
        tokens, bag = data
        return self.head(self.tokens(tokens).mean(1) + self.bag(bag))


def looked_up(step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return [torch.randint(n, (16, 8), generator=generator).to(DEVICE) for n in (20011, 6000)]


@check
def embeddings_travel_by_rows():
    """As the dense plan adds up, with as many bytes as the rows that are not zero have."""
    steps = 5
    for codec, dtype in (("none", torch.float32), ("fp16", torch.float32), ("none", torch.bfloat16)):
        ends = []
        for sparse in ("auto", "off"):
            with settings(codec=codec, sparse_rows=sparse):
                model = wrap(Lookup().to(DEVICE, dtype))
            communicator = attachment_of(model).endpoint.communicator
            before = communicator.stats()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(model, looked_up(step)).backward()
                optimizer.step()
            dist.barrier()
            after = communicator.stats()
            assert_all_ranks_equal(model)
            rows = after["rows_sent"] - before["rows_sent"]
            assert (0 < rows <= 2 * 16 * 8 * steps * SLOTS) == (sparse == "auto"), rows
            ends.append((model, after["wire_bytes"] - before["wire_bytes"]))
        # NCCL adds in an order of its own, by where a shard lies.
        if SLOTS == 1 and (NODES == 2 or codec == "none"):
            assert_equal(ends[0][0], ends[1][0])
        assert ends[0][1] < ends[1][1] / 10, (ends[0][1], ends[1][1])


@check
def accumulation_without_communication():
    ours, plain = wrap(network()), wrap_plain(network())
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            with model.no_sync() if step % 3 != 2 else contextlib.nullcontext():
                loss_of(model, batch(step)).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_all_ranks_equal(ours)
    if SIZE == 2:
        assert_equal(ours.module, plain.module)
    for a, b in zip(ours.parameters(), plain.parameters()):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), (a - b).abs().max()


@check
def communication_in_every_backward_and_one_step():
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss_of(model, batch(step)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_all_ranks_equal(model)


@check
def uneven_inputs():
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for divide in (True, False):
        with model.join(divide_by_initial_world_size=divide):
            for step in range(3 + RANK):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                optimizer.step()
        assert_all_ranks_equal(model)


@check
def two_models_in_turn():
    group = dist.new_group()
    one, two = wrap(network(1), group), wrap(network(2, 256), group)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (one, two)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(one, batch(step)).backward()
        loss_of(two, batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_all_ranks_equal(one)
    assert_all_ranks_equal(two)


@check
def models_of_16_and_64_bits():
    for dtype in (torch.bfloat16, torch.float64):
        model = wrap(network().to(dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step, dtype=dtype)).backward()
            optimizer.step()
        assert_all_ranks_equal(model)


@check
def a_loss_scale_that_overflows_takes_the_residuals_back():
    for codec in ("topk", "int8"):
        with settings(codec=codec, topk_threshold=0, topk_ratio=0.02):
            model = wrap(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch(step))).backward()
                scaler.step(optimizer)
                scaler.update()
            before = copy.deepcopy(paceline.torch.residual_state_dict(model)["residuals"])
            parameters = [p.clone() for p in model.parameters()]
            optimizer.zero_grad()
            bad = batch(9)
            if RANK == 1:
                bad[3, 3] = float("inf")
            scaler.scale(loss_of(model, bad)).backward()
            scaler.step(optimizer)
            for was, now in zip(parameters, model.parameters()):
                assert torch.equal(was, now)
            held = paceline.torch.residual_state_dict(model)["residuals"]
            for name, was in before.items():
                assert torch.equal(held[name], was), (codec, name)
            scaler.update()
            assert scaler.get_scale() == 2.0**9
            for name, now in paceline.torch.residual_state_dict(model)["residuals"].items():
                assert torch.equal(now, before[name] * 0.5), (codec, name)
            assert_all_ranks_equal(model)


def steps_with_delays(steps, piece_bytes, width, travels_as, **arguments):
    """Random sleeps in the hooks: no order of events may hang, and the ranks end with the same bits.

    Pieces are so short that buckets have several, which lanes may carry past each other.
    """
    made = _cuda.CudaCommunicator
    _cuda.CudaCommunicator = functools.partial(made, piece_bytes=piece_bytes)
    try:
        model = wrap(network(width=width), **arguments)
    finally:
        _cuda.CudaCommunicator = made
    attachment = attachment_of(model)
    described = attachment.endpoint.communicator.describe()
    lanes = os.environ.get("PACELINE_LANES", "1")
    assert f"{travels_as} between nodes, pieces of {piece_bytes} bytes, {lanes} lane" in described, described
    original, source = attachment.all_reduce, random.Random(RANK)

    def delayed(bucket):
        if source.random() < 0.15:
            time.sleep(source.random() * 0.003)
        return original(bucket)

    attachment.all_reduce = delayed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [batch(i) for i in range(20)]
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, data[step % 20]).backward()
        if source.random() < 0.02:
            torch.cuda.synchronize()
        optimizer.step()
    assert_all_ranks_equal(model)
    return model, described


@check
def two_thousand_steps_with_delays():
    steps_with_delays(2000, 4096, 128, "exact", bucket_cap_mb=0.05)


@check
def three_hundred_steps_of_top_k_with_delays():
    """Buckets of 4 MiB: in a node the ranks copy each other's shards, a thread puts ways out on the streams.

    The last bucket is too short for top-k, so exact ones, which NCCL adds up, come between.
    """
    with settings(codec="topk"):
        model, described = steps_with_delays(300, 8192, 1024, "top-k", bucket_cap_mb=1)
    assert SLOTS == 1 or "copies in the node" in described, described
    assert any(residual.any() for residual in paceline.torch.residual_state_dict(model)["residuals"].values())


@check
def what_the_wait_before_the_step_costs():
    """Reported, not judged: seconds in the step's hook, and of a step, for the same model."""
    from paceline._torch import cuda_steps

    model = wrap(network(width=2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited, original = [0.0], cuda_steps.CudaSteps.arrive

    def timed(self):
        started = time.perf_counter()
        original(self)
        waited[0] += time.perf_counter() - started

    cuda_steps.CudaSteps.arrive = timed
    try:
        for step in range(25):
            if step == 5:
                torch.cuda.synchronize()
                waited[0], begin = 0.0, time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
        torch.cuda.synchronize()
        took, waiting = (time.perf_counter() - begin) / 20 * 1e3, waited[0] / 20 * 1e3
        if RANK == 0:
            print(f"figure: the wait before the step: {waiting:.2f} ms of {took:.2f} ms a step", flush=True)
    finally:
        cuda_steps.CudaSteps.arrive = original


@check
def ended_and_made_again():
    ports = keep_ports(3)
    for turn in range(3):
        dist.destroy_process_group()
        next(ports)
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network(turn), device_ids=[DEVICE.index])
        attachment_of(model)
        train(model, 3)
        assert_all_ranks_equal(model)


run()
