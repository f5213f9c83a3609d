"""A script that names the backend, started by torchrun, and has nothing else of ours but what $SCRIPT_IMPORT says."""

import os

exec(os.environ.get("SCRIPT_IMPORT", ""))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("paceline")
rank, size = dist.get_rank(), dist.get_world_size()
for group in (None, dist.new_group(list(range(size))), dist.new_group([size - 1])):
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        continue
    total = torch.ones(1000)
    dist.all_reduce(total, group=group)
    assert (total == dist.get_world_size(group)).all()
print(f"rank {rank} of {size} is done", flush=True)
dist.destroy_process_group()
