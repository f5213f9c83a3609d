"""What the checks of overlap="forward" share: a small model in many buckets, trained with and without a barrier."""

import os

import torch
import torch.distributed as dist
from models import assert_same_on_all_ranks, batch, mlp
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch.ddp import attachment_of

if os.environ.get("CHECKS_NODES"):  # each rank is a node: codecs are for what travels between nodes
    os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"
os.environ.setdefault("PACELINE_FUSION_THRESHOLD", "5000")  # many buckets, on older torch too
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MODERN = hasattr(torch, "compile")
WIDTHS = (6, 60, 90, 40, 3)


def model(seed=0, module=None, **arguments):
    return DistributedDataParallel(mlp(seed, torch.float32, WIDTHS) if module is None else module, **arguments)


def loss_of(one, step):
    return (one(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean()


def overlapped(optimizer, one=None, **arguments):
    return paceline.torch.DistributedOptimizer(optimizer, model=one, overlap="forward", **arguments)


def train(one, optimizer, steps=12, loss=loss_of):
    for step in range(steps):
        optimizer.zero_grad()
        loss(one, step).backward()
        optimizer.step()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def same(a, b):
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_state(ours, plain):
    """Bit by bit: models or optimizers."""
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert set(mine) == set(theirs)
    for key in theirs:
        assert same(mine[key], theirs[key]), f"{key} differs: {str(mine[key])[:300]} / {str(theirs[key])[:300]}"


def compare(program=train, kinds=(sgd, adam), make=model, each_rank_alike=True):
    """program(model, optimizer) with overlap and with a barrier leaves the same bits, in model and optimizer."""
    for kind in kinds:
        ours, plain = make(), make()
        optimizer, reference = overlapped(kind(ours.parameters()), ours), kind(plain.parameters())
        operations = attachment_of(ours).overlap.taken
        program(ours, optimizer)
        assert attachment_of(ours).overlap.taken > operations, "nothing was overlapped"
        program(plain, reference)
        assert_same_state(ours, plain)
        assert_same_state(optimizer, reference)
        if each_rank_alike:
            assert_same_on_all_ranks(list(ours.parameters()))


def raises(kind, part, action):
    try:
        action()
    except kind as error:
        assert part in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")
