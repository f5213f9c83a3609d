"""A script as a user has it: plain DDP, started by torchrun, mpirun or torch.multiprocessing.

$SCRIPT_IMPORT is the one line that is added to it, $SCRIPT_LATE one that comes after the process group is made.
"""

import os
import sys

exec(os.environ.get("SCRIPT_IMPORT", ""))  # before torch, as the line says

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402


def train():
    dist.init_process_group("gloo")
    exec(os.environ.get("SCRIPT_LATE", ""))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).double())
    torch.manual_seed(rank)
    model(torch.randn(3, 4).double()).pow(2).sum().backward()
    gradient = model.module.weight.grad
    total = gradient.clone()
    globals().get("tdist", dist).all_reduce(total)  # by the name that a line for tiacc_training gives it
    torch.testing.assert_close(total / size, gradient)
    hook = model._get_ddp_logging_data().get("comm_hook", "")
    print(f"rank {rank} of {size} hook '{hook}' backend '{dist.get_backend()}'", flush=True)
    dist.destroy_process_group()


def spawned(rank, size, port):
    exec(os.environ.get("SCRIPT_IMPORT", ""))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["spawn"]:
        mp.spawn(spawned, (2, int(sys.argv[2])), nprocs=2)
    else:
        train()
