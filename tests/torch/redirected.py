"""Process groups that a script makes by other ways than init_process_group("gloo"), after tiacc_training's line."""

import torch
import torch.distributed as dist

from paceline._torch import lifetime
from paceline.compat import tiacc_training

tiacc_training.init_tiacc_training()
BY_DEVICE = hasattr(dist.distributed_c10d, "BackendConfig")  # "cpu:gloo,cuda:nccl"


def carries(group=None):
    """Whether Paceline carries a group's CPU tensors."""
    total = torch.ones(1000)
    dist.all_reduce(total, group=group)
    assert (total == dist.get_world_size(group)).all()
    made = dist.distributed_c10d._get_default_group() if group is None else group
    return hasattr(made if hasattr(made, "paceline_endpoint") else backend_of(made), "paceline_endpoint")


def backend_of(group):
    return group._get_backend(torch.device("cpu")) if BY_DEVICE else group


dist.init_process_group(*["cpu:GLOO,cuda:gloo"] if BY_DEVICE else ["gloo"])
ranks = list(range(dist.get_world_size()))
found = {"the first group": carries()}
found["by position"] = carries(dist.new_group(ranks, dist.default_pg_timeout, "gloo"))
found["by name"] = carries(dist.new_group(ranks, backend="gloo"))
if BY_DEVICE:
    found["by device"] = carries(dist.new_group(ranks, dist.default_pg_timeout, "cpu:gloo,cuda:gloo"))
    assert lifetime.redirected("cpu:gloo,cuda:nccl") == "cpu:paceline,cuda:nccl"  # NCCL itself needs a GPU
    kept = dist.get_backend_config(dist.new_group(ranks, backend="cpu:gloo,cuda:gloo"))
    assert kept == "cpu:paceline,cuda:gloo", kept
assert all(found.values()), found
print(f"carried: {', '.join(found)}", flush=True)
dist.destroy_process_group()
