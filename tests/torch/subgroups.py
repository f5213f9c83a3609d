"""Groups of the "paceline" backend in a Gloo world, made and ended again and again: they must leave nothing behind."""

import os

import torch
import torch.distributed as dist

import paceline.torch  # noqa: F401


def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


dist.init_process_group("gloo")
for round in range(8):
    group = dist.new_group(list(range(dist.get_world_size())), backend="paceline")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group(group)
    if round == 1:
        before = held()
after = held()
print(
    "nothing left" if max(a - b for a, b in zip(after, before)) <= 2 else f"{before} before, {after} after", flush=True
)
dist.destroy_process_group()
