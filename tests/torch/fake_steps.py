"""What stands in for a communicator and its endpoint where the optimizer's step is tested without a GPU."""

import ctypes

import pytest
import torch
from torch import nn

from paceline._torch import cuda_steps, gates, guard


class FakeCommunicator:
    """Writes down what is asked of it."""

    closed = False

    def __init__(self):
        self.calls = []
        self.finite = True
        self.error = None
        self.word = ctypes.c_float(0)

    def wait_arrival(self):
        self.calls.append("wait")
        if self.error is not None:
            raise self.error
        return self.finite

    def gate(self):
        self.calls.append("gate")
        if self.error is not None:
            raise self.error
        return ctypes.addressof(self.word)

    not_finite = ()

    def take_not_finite(self):
        taken, self.not_finite = self.not_finite, ()
        return taken

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name.removesuffix("_residuals"))

    def said(self):
        calls, self.calls[:] = list(self.calls), []
        return calls


class FakeEndpoint:
    process_group = None
    device = torch.device("cpu")

    def __init__(self, momentum=0.0, enabled=True):
        self.communicator = FakeCommunicator()
        self.momentum = momentum
        self.steps = cuda_steps.CudaSteps(self, enabled)
        self.steps.add("model", [])


@pytest.fixture
def endpoint():
    made = FakeEndpoint()
    yield made
    made.steps.forget()


def backward(endpoint, buckets_=3, model="model"):
    for index in range(buckets_):
        endpoint.steps.submitted(index == 0, model)


def optimizer_of(endpoint, kind=torch.optim.SGD, **arguments):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    endpoint.steps.models["model"].parameters[id(parameter)] = parameter
    return kind([parameter], lr=0.1, **arguments)


class Below:
    """The communicator under the path."""

    def __init__(self):
        self.error = None

    def check_health(self):
        if self.error is not None:
            raise self.error


@pytest.fixture
def watched(endpoint, monkeypatch):
    """An endpoint whose guard looks at our word, and the backends that were aborted."""
    aborted = []
    endpoint.rank = 0
    endpoint.communicator.communicator = Below()
    monkeypatch.setattr(cuda_steps, "_abort_torch", aborted.append)
    guard.watch(endpoint.steps)
    return endpoint, aborted


@pytest.fixture
def fused(monkeypatch):
    """torch's fused kernels for CPUs look at found_inf too."""
    if not hasattr(torch, "_fused_sgd_"):
        pytest.skip("this torch has no fused SGD")  # what a wait does instead: the tests around
    monkeypatch.setattr(gates, "_CPU_STANDS_IN", True)
