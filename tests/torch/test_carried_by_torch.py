"""Gradients that torch's own process group carries (float64, sparse), without a GPU: the step waits for them."""

import pytest
import torch
from fake_steps import backward, optimizer_of
from torch import nn

from paceline._torch import cuda_steps
from paceline.errors import PeerLostError


class Behind:
    """What the current stream holds: done after so many looks."""

    def __init__(self, looks, then=lambda: None):
        self.looks, self.then = looks, then

    def query(self):
        self.looks -= 1
        if self.looks < 0:
            self.then()
        return self.looks < 0


@pytest.fixture
def carried(watched, monkeypatch):
    """(endpoint, behind(Behind)): torch's own group carries some of the gradients."""
    endpoint, _ = watched

    def behind(found):
        monkeypatch.setattr(cuda_steps, "_behind", lambda device: found)
        endpoint.steps.torch_carries()

    return endpoint, behind


@pytest.mark.parametrize("arguments", [{}, {"fused": True}])
@pytest.mark.parametrize("buckets", [0, 3])
def test_what_torch_carries_is_waited_for_on_the_host(carried, fused, arguments, buckets):
    """No gate stands for it, whatever the optimizer and whether or not something of ours is under way as well."""
    endpoint, behind = carried
    optimizer = optimizer_of(endpoint, **arguments)
    waited = Behind(looks=2)
    behind(waited)
    backward(endpoint, buckets)
    optimizer.step()
    assert waited.looks == -1 and "gate" not in endpoint.communicator.said()
    assert not torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))
    optimizer.step()
    assert waited.looks == -1, "once a pass"


@pytest.mark.parametrize("looks", [1, 0])
def test_what_torch_carries_changes_nothing_after_a_fault(carried, fused, looks):
    """NCCL's kernel ends when its group is aborted: with the error known, and garbage in its buffers."""
    endpoint, behind = carried
    optimizer = optimizer_of(endpoint, fused=True)
    lost = PeerLostError("rank 1 is gone")

    def is_lost():
        endpoint.communicator.communicator.error = lost

    if looks:
        is_lost()
    waited = Behind(100 * looks, is_lost)
    behind(waited)
    for _ in range(2):  # a script may catch the first and go on
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))
    assert waited.looks == (99 if looks else -1), "it does not wait for a kernel that does not end"


def test_a_captured_step_of_others_leaves_the_wait_to_the_models_own(carried, monkeypatch):
    """A stream under capture can be asked nothing."""
    endpoint, behind = carried
    waited = Behind(looks=1)
    behind(waited)
    capturing = True
    monkeypatch.setattr(cuda_steps, "_captures", lambda: capturing)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    stranger.step()
    assert waited.looks == 1
    capturing = False
    optimizer_of(endpoint).step()
    assert waited.looks == -1
