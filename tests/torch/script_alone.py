"""A job of one rank that no launcher started, whose models keep torch's way; its argument names the backend."""

import os
import sys

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import paceline.torch  # noqa: E402, F401

dist.init_process_group(sys.argv[1], store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
print("trained")
