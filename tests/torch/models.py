"""Small models and the comparison with torch's own DDP, for the checks."""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def paceline_off():
    os.environ["PACELINE_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["PACELINE_DISABLE"]


class Mixed(torch.nn.Module):
    """Convolution, batch norm, a branch that some steps leave unused, a frozen layer; float64."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.branch = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 3)
        self.double()

    def forward(self, x, use_branch=True):
        x = self.norm(torch.relu(self.conv(x))).mean((2, 3))
        x = self.frozen(x)
        if use_branch:
            x = x + self.branch(x)
        return self.head(x)


def mlp(seed, dtype=torch.float64, widths=(6, 17, 9, 3)):
    torch.manual_seed(seed)
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)


class Own(torch.nn.Module):
    """A forward of the script's own: torch.compile passes by what of torch's own DDP calls, such as Sequential's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def graphs_compiled():
    """How many of a model's graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def pair(model, **arguments):
    """(travelling through Paceline, torch's own): the same model twice under DDP."""
    from paceline._torch.ddp import attachment_of

    twin = copy.deepcopy(model)
    ours = DistributedDataParallel(model, **arguments)
    attachment_of(ours)
    with paceline_off():
        plain = DistributedDataParallel(twin, **arguments)
    return ours, plain


def batch(step, *shape, dtype=torch.float64, rank=None):
    """A random batch that differs between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def square(model, step):
    """A backward pass of an mlp()."""
    (model(batch(step, 5, 6)) ** 2).mean().backward()


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_gradients(ours, plain, rtol=1e-11, atol=1e-13):
    mine, theirs = gradients(ours), gradients(plain)
    assert len(mine) == len(theirs) and mine, (len(mine), len(theirs))
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_same_on_all_ranks(tensors):
    """Bit-identical everywhere."""
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    for part in parts:
        assert torch.equal(part, parts[0])


def train(ours, plain, steps, forward, lr=0.1, contexts=(contextlib.nullcontext,)):
    """Trains both with SGD; compares gradients and parameters after every step."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m in (ours, plain)]
    for step in range(steps):
        for model, optimizer in zip((ours, plain), optimizers):
            optimizer.zero_grad()
            forward(model, step)
        assert_same_gradients(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert_same_on_all_ranks(list(ours.parameters()))
