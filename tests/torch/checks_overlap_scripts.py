"""overlap="forward" in scripts that change things between the passes: the barrier's bits, or an error that names what.

All updates are as late as they can be: none is found to have arrived before something waits for it.
"""

import functools

import torch
from checks import check, run
from overlap_world import (
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


if __name__ == "__main__":
    run()
