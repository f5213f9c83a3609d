"""Ranks that meet a fault: which one is the first argument. Each surviving rank writes what it saw, and when."""

import datetime
import inspect
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from faulty_notes import note, seen
from models import batch, mlp
from torch.nn.parallel import DistributedDataParallel
from words import hear, tell

import paceline.torch
from paceline._torch.ddp import attachment_of
from paceline.errors import PeerLostError, ResourceExhaustedError, UnsupportedError

RANK = int(os.environ["RANK"])
GLOO = (
    "killed_in_training",
    "killed_between_two_passes",
    "killed_in_a_collective_of_torchs_own",
    "one_stays_away_from_a_pass",
)
#: Seconds of the process group, where it is to end.
LIMITS = {"one_never_comes": 3, "one_stays_away_from_a_pass": 6}


def killed_in_training():
    model = DistributedDataParallel(mlp(0))
    for step in range(1_000_000):
        if RANK == 1 and step == 20:
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        (model(batch(step, 5, 6)) ** 2).mean().backward()


def models_of_other_shapes():
    DistributedDataParallel(torch.nn.Sequential(mlp(0), torch.nn.Linear(3, 7 if RANK == 1 else 8)))


def models_of_other_types():
    DistributedDataParallel(torch.nn.Linear(3, 4, dtype=torch.float64 if RANK == 2 else torch.float32))


def models_of_other_tensors():
    DistributedDataParallel(torch.nn.Linear(3, 4, bias=RANK != 0))


def models_frozen_elsewhere():
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(RANK != 1)
    DistributedDataParallel(model)


def models_in_another_order():
    layers = [("first", torch.nn.Linear(3, 3)), ("second", torch.nn.Linear(3, 3))]
    model = torch.nn.Module()
    for name, layer in layers if RANK != 2 else layers[::-1]:
        model.add_module(name, layer)
    DistributedDataParallel(model)


def models_with_names_of_their_own():
    model = torch.nn.Module()
    model.add_module(f"expert_{RANK}", torch.nn.Linear(3, 3))
    model.add_module("head", torch.nn.Linear(3, 7 if RANK == 1 else 8))
    DistributedDataParallel(model)


def buffers_of_other_shapes():
    """Which torch spreads as it makes the model: newer torch has another name for what it does in later passes."""
    model = torch.nn.Linear(3, 4)
    model.register_buffer("seen", torch.zeros(5 if RANK == 1 else 6))
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    said = {"broadcast_buffers": False, "forward_sync_buffers": False} if newer else {}
    DistributedDataParallel(model, **said)


def another_model_first():
    models = [DistributedDataParallel(torch.nn.Linear(3, rows, bias=rows == 4)) for rows in (4, 5)]
    for model in models[::-1] if RANK == 1 else models:
        model(torch.rand(2, 3)).sum().backward()


def killed_between_two_passes(passes=2, **arguments):
    """The others know of it before their hook hands over its first bucket."""
    model = DistributedDataParallel(mlp(0), **arguments)
    for step in range(passes):
        model.zero_grad()
        (model(batch(step, 5, 6)) ** 2).mean().backward()
    if RANK == 1:
        note(at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            attachment_of(model).endpoint.communicator.check_health()
        except PeerLostError:
            break
        time.sleep(0.01)
    (model(batch(passes, 5, 6)) ** 2).mean().backward()


def killed_as_buckets_are_made_anew():
    """As its second pass begins, DDP spreads the order of rank 0's gradients, from C++ by the script's own Gloo."""
    killed_between_two_passes(1)


def killed_before_a_static_graphs_first_pass():
    """Whose buckets DDP hands over when it has ended, beside a sum by the script's own Gloo that it waits for."""
    killed_between_two_passes(0, static_graph=True)


def one_bucket_fails_on_one_rank():
    """The rest of its pass is not sent: the others would take it for what failed."""
    model = DistributedDataParallel(mlp(0), bucket_cap_mb=0.0001)
    failing = []
    attachment = attachment_of(model)
    submit = attachment.submit

    def submits(*args):
        if RANK == 1 and not failing:
            failing.append(1)
            raise ResourceExhaustedError("no memory, in this test")
        if failing:
            failing.append(1)
        return submit(*args)

    attachment.submit = submits
    try:
        (model(batch(0, 5, 6)) ** 2).mean().backward()
    finally:
        assert len(failing) <= 1, f"{len(failing) - 1} buckets were sent after one that failed"


def killed_in_a_collective():
    for step in range(1_000_000):
        if RANK == 1 and step == 20:
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))


def killed_in_a_collective_of_torchs_own():
    """Beside a model that travels through Paceline, a sum goes by the script's own Gloo."""
    DistributedDataParallel(mlp(0))
    killed_in_a_collective()


def killed_as_buffers_are_sent():
    """DDP sends them before each forward pass, from C++, by the script's own Gloo."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(6, dtype=torch.float64))
    for step in range(1_000_000):
        if RANK == 1 and step == 20:
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch(step, 5, 6))  # no backward pass, which would go by Paceline


def killed_as_a_model_is_wrapped():
    """DDP compares the ranks' parameters and spreads rank 0's, from C++, by the script's own Gloo."""
    DistributedDataParallel(mlp(0))
    for step in range(1_000_000):
        if RANK == 1 and step == 3:
            note(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        DistributedDataParallel(mlp(0))


def killed_while_others_wait_for_a_future():
    if RANK == 1:
        time.sleep(0.5)
        note(at=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()


def shapes_differ():
    dist.all_reduce(torch.ones(3, 4 + RANK))


def dtypes_differ():
    dist.all_reduce(torch.ones(12, dtype=torch.float64 if RANK else torch.float32))


def after_rank(first):
    """For a rank that waits for nobody: called by it once it is through, by the others before they start theirs.

    Not by torch's store: it ends with rank 0, which may have met the fault before another has had its answer.
    """
    if first == RANK:
        tell("through")
    hear("through")


def shapes_differ_from_the_roots():
    """The root waits for nobody; the end of its group does. What it was refused before has ended nothing."""
    if RANK == 1:
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)
        except UnsupportedError:
            pass
        else:
            raise AssertionError("integers have no average")
    if RANK != 1:
        after_rank(1)
    dist.broadcast(torch.rand(3, 4 + RANK % 2), 1)
    if RANK == 1:
        after_rank(1)
    dist.destroy_process_group()


def sent(shape, dtype):
    """The sender waits for nobody either; nor does rank 2, which has no part in it."""
    if RANK == 0:
        dist.send(torch.rand(2, 3), 1)
    after_rank(0)
    if RANK == 1:
        dist.recv(torch.zeros(shape, dtype=dtype), 0)
    dist.destroy_process_group()


def shapes_sent_differ():
    sent((3, 2), torch.float32)


def dtypes_sent_differ():
    sent((2, 3), torch.int32)


def stay_away():
    """Until all others have given up."""
    for rank in set(range(int(os.environ["WORLD_SIZE"]))) - {RANK}:
        hear(f"rank {rank} is through")


def one_never_comes():
    if RANK == 1:
        stay_away()
        return
    dist.all_reduce(torch.ones(3))


def one_stays_away_from_a_pass():
    """As rank 1 evaluates, and the others train on."""
    model = DistributedDataParallel(mlp(0))
    for step in range(4):
        if RANK == 1 and step == 3:
            stay_away()
            return
        model.zero_grad()
        (model(batch(step, 5, 6)) ** 2).mean().backward()


def one_never_comes_within_a_later_time_out():
    dist.set_timeout(datetime.timedelta(seconds=3))
    one_never_comes()


def one_never_comes_within_a_time_out_by_its_older_name():
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    one_never_comes()


def one_never_comes_to_a_monitored_barrier():
    if RANK == 1:
        stay_away()
        return
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=3))


def one_raises():
    if RANK == 1:
        note(at=time.monotonic())
        raise ValueError("their own bug")  # an uncaught exception, as any script may have one
    dist.all_reduce(torch.ones(3))


def main():
    which = sys.argv[1]
    gloo = which.startswith("killed_as_") or which in GLOO
    seconds = LIMITS.get(which, 60)
    assert paceline.torch is not None
    dist.init_process_group("gloo" if gloo else "paceline", timeout=datetime.timedelta(seconds=seconds))
    if which == "one_raises" and RANK == 1:
        dist.barrier()
        one_raises()

    def together():
        if not gloo:
            dist.barrier()  # a rank may be in it still when the fault of two others reaches it
        try:
            globals()[which]()
        finally:
            tell(f"rank {RANK} is through")

    seen(together)


main()
