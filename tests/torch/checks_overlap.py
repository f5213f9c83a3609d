"""overlap="forward" against the same training with a barrier, 200 steps, every optimizer: bit by bit, on all ranks."""

import os

import torch
from checks import check, run
from models import batch
from overlap_world import MODERN, SIZE, compare, model, overlapped, train

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


class Strided(torch.nn.Module):
    """Weights that lie in memory in other orders than that of their dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        layers = [torch.nn.Conv2d(2, 5, 3), torch.nn.Tanh(), torch.nn.Conv2d(5, 4, 1), torch.nn.Flatten()]
        self.convolutions = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.transposed = torch.nn.Parameter(0.1 * torch.randn(3, 36).t())
        self.skipping = torch.nn.Parameter((0.1 * torch.randn(3, 8))[:, ::2])

    def forward(self, data):
        return self.convolutions(data) @ self.transposed @ self.skipping


def strided_loss(one, step):
    return (one(batch(step, 4, 2, 5, 5, dtype=torch.float32).to(memory_format=torch.channels_last)) ** 2).mean()


@check
def weights_of_any_memory_format():
    kinds = [lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), lambda p: torch.optim.Adam(p, lr=1e-3)]
    if MODERN:
        kinds.append(lambda p: torch.optim.Adam(p, lr=1e-3, fused=True))
    for views in (False, True):
        compare(
            lambda one, optimizer: train(one, optimizer, 20, strided_loss),
            kinds,
            lambda views=views: model(module=Strided(), gradient_as_bucket_view=views, bucket_cap_mb=0.0005),
        )


@check
def all_ranks_send_in_one_order_that_serves_the_first_layers_first():
    one = model()
    optimizer = overlapped(torch.optim.SGD(one.parameters(), lr=0.05), one)
    train(one, optimizer, 40)
    order = attachment_of(one).overlap.order.order
    assert order is not None and sorted(order) == [(i, 0) for i in range(len(order))] and len(order) > 2, order
    orders = [None] * SIZE
    torch.distributed.all_gather_object(orders, order)
    assert orders == [order] * SIZE, orders


if __name__ == "__main__":
    run()
