"""Large buckets that are sent in parts without a barrier between iterations, by DDP on simulated GPUs."""

import contextlib

import torch
from checks import check, run
from simulated_gpu import RANK, SIZE, assert_same_on_all_ranks, plain, settings, wrapped
from torch import nn

import paceline.torch
from paceline._torch import buckets, cuda_overlap, ddp, gates

buckets._LEAST = 4096
cuda_overlap._GRANULE = 64
WIDE, STEPS = 96, 36


class Model(nn.Module):
    """Most parameters are those of a layer near the end, as VGG's are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        first = [nn.Linear(16, 16) for _ in range(4)]
        self.layers = nn.Sequential(*first, nn.Tanh(), nn.Linear(16, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4))

    def forward(self, inputs):
        return self.layers(inputs)


def train(model, optimizer, steps=STEPS):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        optimizer.zero_grad()
        (model(torch.randn(8, 16, generator=generator)) ** 2).mean().backward()
        optimizer.step()


def sgd(model, **arguments):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **arguments)


@contextlib.contextmanager
def overlapped(fused=False, **arguments):
    """(model, optimizer, BucketOrder, Communicator)"""
    with wrapped(Model(), bucket_cap_mb=0.003, **arguments) as (model, communicator):
        made = sgd(model, fused=True) if fused else sgd(model)
        optimizer = paceline.torch.DistributedOptimizer(made, model=model, overlap="forward")
        yield model, optimizer, ddp.attachment_of(model).overlap.order, communicator
        optimizer.synchronize()


@check
def in_parts_and_in_an_order_gradients_are_those_of_plain_ddp():
    theirs = plain(Model())
    train(theirs, sgd(theirs))
    with overlapped() as (model, optimizer, order, communicator):
        train(model, optimizer)
        optimizer.synchronize()
        for (name, a), b in zip(model.module.named_parameters(), theirs.module.parameters()):
            assert torch.equal(a, b), name
        parts = [key for key in order.order if sum(other[0] == key[0] for other in order.order) > 1]
        assert len(parts) > 4 and sorted(order.order) == sorted(order._sizes), order.order
        # A part goes in the order's place, by itself, and all of it goes.
        elements = [count for count, _ in communicator.asked[-len(order.order) :]]
        assert elements == [order._sizes[key] for key in order.order]
        assert sum(elements) == sum(p.numel() for p in model.parameters())


@check
def behind_a_gate_gradients_are_those_of_plain_ddp():
    theirs = plain(Model())
    train(theirs, sgd(theirs, fused=True))
    gates._CPU_STANDS_IN = True
    waits = []
    with overlapped(fused=True) as (model, optimizer, order, _):
        order.learns = False
        overlap = ddp.attachment_of(model).overlap
        original = overlap.carrier.wait
        overlap.carrier.wait = lambda operation: waits.append(operation) or original(operation)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + RANK)
            optimizer.zero_grad()
            waits.clear()
            loss = (model(torch.randn(8, 16, generator=generator)) ** 2).mean()
            assert not waits, "the forward pass waits on the device"
            under_way = len(overlap._flights)
            loss.backward()
            assert len(waits) == under_way and (step < 2 or under_way > 1), "for all of the step before"
            optimizer.step()
        optimizer.synchronize()
        for (name, a), b in zip(model.module.named_parameters(), theirs.module.parameters()):
            assert torch.equal(a, b), name
    gates._CPU_STANDS_IN = False


@check
def parts_in_every_order():
    """What a trial could choose: the last part of the large bucket first, others between its parts."""
    ends = []
    for turn in range(4):
        with overlapped() as (model, optimizer, order, _):
            order.learns = False
            train(model, optimizer, 3)
            keys = sorted(order._sizes)
            order.order = [keys, keys[::-1], keys[1::2] + keys[::2], keys[::2][::-1] + keys[1::2]][turn]
            train(model, optimizer, 6)
            optimizer.synchronize()
            assert_same_on_all_ranks(model)
            ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end))


@check
def a_pass_that_raises_between_parts():
    with overlapped() as (model, optimizer, order, communicator):
        order.learns = False
        train(model, optimizer, 3)
        keys = sorted(order._sizes)
        many = next(key for key in keys if key[1] > 1)
        order.order = [many, *(key for key in keys if key != many)]
        overlap = ddp.attachment_of(model).overlap
        submit, sent = overlap.carrier.submit, []

        def refuses(flight, part):
            if sent:
                raise ValueError("refused")
            sent.append((flight, submit(flight, part)))
            return sent[0][1]

        overlap.carrier.submit = refuses
        try:
            train(model, optimizer, 1)
        except (ValueError, RuntimeError) as error:
            assert "refused" in str(error)
        else:
            raise AssertionError("nothing was raised")
        overlap.carrier.submit = submit
        ((flight, operation),) = sent
        assert flight.unsent == len(flight.parts) - 1 and flight.operation == operation
        overlap.settle()  # what was sent is waited for, what was not is not
        assert communicator.arrived(operation) and flight.arrived and not overlap._under_way


@check
def residuals_and_rounding_keep_to_whole_buckets():
    for codec, cut in (("fp16", True), ("int8", False), ("topk", False)):
        with settings(codec=codec), overlapped() as (model, optimizer, order, _):
            train(model, optimizer, 6)
            assert any(part for _, part in order._sizes) == cut, codec
            optimizer.synchronize()
            assert_same_on_all_ranks(model)


@check
def int8_has_an_order_and_what_it_is_worked_out_from_leaves_no_residuals():
    with settings(codec="int8"), overlapped() as (model, optimizer, order, communicator):
        order.learns = False
        train(model, optimizer, 3)
        optimizer.synchronize()
        before = communicator.stats()["residual_bytes"]
        order.learns = True
        train(model, optimizer, STEPS)
        optimizer.synchronize()
        assert order.order is not None and sorted(order.order) == sorted(order._sizes)
        assert communicator.stats()["residual_bytes"] == before > 0
        assert_same_on_all_ranks(model)
    with settings(codec="topk"), overlapped() as (model, optimizer, order, _):
        train(model, optimizer, 6)
        assert order.order is None and order.step is None, "few bytes are not worth measuring"


if __name__ == "__main__":
    assert SIZE == 2
    run()
