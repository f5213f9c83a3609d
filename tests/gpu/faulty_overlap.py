"""Ranks that overlap updates on GPUs: rank 1 fails between two buckets. Survivors write which parameters changed.

Arguments: killed or stopped; fused or not.
"""

import faulthandler
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from faulty_notes import note
from gpu_world import DEVICE, RANK, SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.torch
from paceline._torch.ddp import attachment_of

which, fused = sys.argv[1], sys.argv[2] == "fused"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 16)).to(DEVICE)
model = DistributedDataParallel(net, device_ids=[DEVICE.index], bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")


def loss():
    return (model(torch.randn(8, 512, device=DEVICE)) ** 2).mean()


for _ in range(3):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
overlap, store = attachment_of(model).overlap, dist.distributed_c10d._get_default_store()
order = overlap.order
order.order = sorted(order._sizes, reverse=True)
original, sent = overlap.carrier.submit, []


def submit(flight, part):
    """The first layer's bucket is exchanged, then rank 1 fails."""
    if RANK == 1 and sent:
        overlap.carrier.wait(sent[0])
        for rank in range(SIZE):
            if rank != 1:
                store.get(f"rank {rank} has the first")
        note(at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL if which == "killed" else signal.SIGSTOP)
    sent.append(original(flight, part))
    if RANK != 1 and len(sent) == 1:
        while not overlap.carrier.there(sent[0]):
            time.sleep(0.001)
        store.set(f"rank {RANK} has the first", "yes")
    return sent[-1]


optimizer.zero_grad()
parameters = list(model.parameters())
first = loss()
torch.cuda.synchronize()
before = [p.detach().clone() for p in parameters]
overlap.carrier.submit = submit
arrived = set()
try:
    first.backward()
    arrived = {id(p) for p, _ in next(f for f in overlap._flights if f.index == order.order[0][0]).gradients}
    optimizer.step()
    loss().backward()  # fused updates are behind a gate on the device: the host hears of it here
except paceline.PacelineError as error:
    seen = time.monotonic()
    torch.cuda.synchronize()
    changed = [id(p) for a, p in zip(before, parameters) if not torch.equal(a, p)]
    note(
        kind=type(error).__name__,
        kinds=[kind.__name__ for kind in type(error).__mro__],
        text=str(error),
        at=seen,
        unchanged=all(one in arrived for one in changed),
    )
    faulthandler.dump_traceback_later(5)  # what it hangs in, if it does
    raise  # the process must be able to end by itself
