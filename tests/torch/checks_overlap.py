"""overlap="forward" against the same training with a barrier, 200 steps, every optimizer: bit by bit, on all ranks."""

import os

import torch
from checks import check, run
from overlap_world import SIZE, compare, model, overlapped, train

from paceline._torch.ddp import attachment_of

STEPS = int(os.environ.get("CHECKS_STEPS", "200"))


def equals_the_barrier(kind, **arguments):
    def make(parameters):
        return kind(parameters, **arguments)

    compare(lambda one, optimizer: train(one, optimizer, STEPS), (make,))


@check
def sgd():
    equals_the_barrier(torch.optim.SGD, lr=0.05, weight_decay=1e-3)


@check
def sgd_with_momentum():
    equals_the_barrier(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1)


@check
def sgd_with_nesterov_momentum():
    equals_the_barrier(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@check
def adam():
    equals_the_barrier(torch.optim.Adam, lr=1e-3)


@check
def adamw():
    equals_the_barrier(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, amsgrad=True)


@check
def all_ranks_send_in_one_order_that_serves_the_first_layers_first():
    one = model()
    optimizer = overlapped(torch.optim.SGD(one.parameters(), lr=0.05), one)
    train(one, optimizer, 40)
    order = attachment_of(one).overlap.order.order
    assert order is not None and sorted(order) == list(range(len(order))) and len(order) > 2, order
    orders = [None] * SIZE
    torch.distributed.all_gather_object(orders, order)
    assert orders == [order] * SIZE, orders


if __name__ == "__main__":
    run()
