"""Ranks that overlap updates and meet a fault: rank 1 dies (or stops) between two buckets, which both ranks know.

Rank 0 writes what it saw and which parameters have changed.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from faulty_notes import note
from overlap_world import RANK, loss_of, model, overlapped, train

import paceline
from paceline._torch.ddp import attachment_of

which, where = sys.argv[1:3]
one = model()
optimizer = overlapped(torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9), one)
train(one, optimizer, 3)
overlap = attachment_of(one).overlap
order = overlap.order
order.order = sorted(order._sizes, reverse=True)
original, sent = overlap.carrier.submit, []


def submit(flight, part):
    """The first layer's bucket is exchanged, then rank 1 fails."""
    if RANK == 1 and sent:
        overlap.carrier.wait(sent[0])
        dist.distributed_c10d._get_default_store().get("rank 0 has the first")
        note(at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL if which == "killed" else signal.SIGSTOP)
    sent.append(original(flight, part))
    if RANK == 0 and len(sent) == 1:
        while not overlap.carrier.there(sent[0]):
            time.sleep(0.001)
        dist.distributed_c10d._get_default_store().set("rank 0 has the first", "yes")
    return sent[-1]


optimizer.zero_grad()
overlap.carrier.submit = submit
loss = loss_of(one, 3)
parameters = list(one.parameters())
before = [p.detach().clone() for p in parameters]
here = {id(p): False for p in parameters}
try:
    loss.backward()
    for p, _ in next(f for f in overlap._flights if f.index == order.order[0][0]).gradients:
        here[id(p)] = True
    optimizer.step()
    if where == "forward":
        loss_of(one, 4)
    elif where == "state":
        one.state_dict()
    elif where == "synchronize":
        optimizer.synchronize()
    elif where == "end":
        dist.destroy_process_group()
    note(kind="none")
except paceline.PacelineError as error:
    at = time.monotonic()
    again = []
    if where != "end":
        for action in (optimizer.step, optimizer.synchronize, lambda: loss_of(one, 5), one.state_dict):
            try:
                action()
            except paceline.PacelineError as repeated:
                again.append(str(repeated) == str(error))
    changed = [not torch.equal(a, b) for a, b in zip(before, parameters)]
    note(
        kind=type(error).__name__,
        text=str(error),
        at=at,
        again=again,
        untouched=all(not c for c, p in zip(changed, parameters) if not here[id(p)]),
        others=sum(not h for h in here.values()),
        arrived_changed=sum(c for c, p in zip(changed, parameters) if here[id(p)]),
    )
os._exit(1)
