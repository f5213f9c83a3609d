"""Residuals and velocities of models on CUDA in checkpoints, and under new loss scales."""

import copy

import torch
import torch.distributed as dist
from checks import check, run
from gpu_world import DEVICE, NODES, RANK, SIZE, assert_same_bits, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch

torch.use_deterministic_algorithms(True)
HALF, STEPS = 5, 9


def wrapped(seed, codec, momentum, group=None):
    """In a few buckets, which torch arranges once; over a path of these settings, or the one that a group has."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(512, 10)).to(DEVICE)
    chosen = {"topk_ratio": 0.02, "topk_threshold": 0, "topk_momentum": momentum} if codec == "topk" else {}
    with settings(codec=codec, **chosen):
        group = group or dist.new_group()
        return DistributedDataParallel(model, device_ids=[DEVICE.index], process_group=group, bucket_cap_mb=1)


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randn(16, 64, generator=generator).to(DEVICE)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def assert_same(one, other, what):
    assert one.keys() == other.keys(), what
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), (*what, name)


@check
def a_checkpoint_goes_on_bit_by_bit():
    """Another model that loads it after two backward passes, by which torch has arranged its buckets.

    Under int8 on three nodes and more nothing is lost either, but sums' residuals are then kept by ranks.
    """
    cases = [("topk", 0, True), ("topk", 0.9, False), ("topk", 0.9, True)]
    for codec, momentum, all_ranks in [*cases, ("int8", 0, False)] if NODES == 2 else cases:
        own = 0 if momentum else 0.9
        model = wrapped(1, codec, momentum)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=own)
        train(model, optimizer, range(HALF))
        kept = copy.deepcopy([model.module.state_dict(), optimizer.state_dict()])
        state = paceline.torch.residual_state_dict(model, all_ranks)
        velocities = state["all_ranks_velocities"][RANK] if momentum and all_ranks else state.get("velocities", {})
        assert (len(velocities) > 0) == (momentum > 0) == any(one.any() for one in velocities.values())
        train(model, optimizer, range(HALF, STEPS))
        ends = model.module.state_dict(), paceline.torch.residual_state_dict(model)

        resumed = wrapped(2, codec, momentum)
        second = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=own)
        for step in range(2):
            resumed(batch(step)).square().mean().backward()
        resumed.module.load_state_dict(kept[0])
        second.load_state_dict(kept[1])
        paceline.torch.load_residual_state_dict(resumed, state)
        train(resumed, second, range(HALF, STEPS))
        again = paceline.torch.residual_state_dict(resumed)
        what = (codec, momentum, all_ranks)
        assert_same(resumed.module.state_dict(), ends[0], what)
        assert_same(again["residuals"], ends[1]["residuals"], what)
        assert_same(again.get("velocities", {}), ends[1].get("velocities", {}), what)
        for name, parameter in resumed.named_parameters():
            assert_same_bits(parameter, name)


@check
def a_new_loss_scale_is_for_its_own_models():
    """Of two on one process group: the other one's residuals and velocities stay as they are."""
    for codec, momentum in (("topk", 0.9), ("int8", 0)):
        one = wrapped(1, codec, momentum)
        other = wrapped(2, codec, momentum, one.process_group)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other)]
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=1)
        for step in range(3):
            for model, optimizer in zip((one, other), optimizers):
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                (scaler.scale(loss) if model is one else loss).backward()
            scaler.step(optimizers[0])
            optimizers[1].step()
            before = [paceline.torch.residual_state_dict(model) for model in (one, other)]
            scaler.update()  # twice what it was
            for model, was, factor in zip((one, other), before, (2.0, 1.0)):
                now = paceline.torch.residual_state_dict(model)
                for kind in ("residuals", *(["velocities"] if momentum else [])):
                    scaled = {name: tensor * factor for name, tensor in was[kind].items()}
                    assert_same(now[kind], scaled, (codec, kind, factor))
                    assert any(tensor.any() for tensor in scaled.values()), (codec, kind)
        assert scaler.get_scale() == 32.0


assert SIZE >= 2
run()
