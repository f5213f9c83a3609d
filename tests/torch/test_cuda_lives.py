"""What lasts longer than a step on the CUDA path."""

import datetime

import pytest
import torch
from cuda_stand_in import NoStreams
from support import SIMULATED, Suite, names_of

from paceline._torch.cuda_collectives import CudaCollectives
from paceline._torch.cuda_group import CudaGroup
from paceline._torch.cuda_overlap import CudaCarrier
from paceline.errors import TimeoutError as PacelineTimeoutError

suite = Suite("checks_cuda_lives.py", 2, needs=SIMULATED, timeout=150)


@pytest.mark.parametrize("name", names_of("checks_cuda_lives.py"))
def test_on_two_nodes(name):
    suite.expect(name)


class _SlowPath:
    """Where nothing arrives within a caller's own time-out."""

    rank, size, closed = 0, 2, False

    def __init__(self):
        self.waits = 0

    def all_reduce(self, *_, **__):
        return 1

    def join(self, *_):
        pass

    def wait_arrival(self, seconds=0.0):
        self.waits += 1
        if seconds:
            raise PacelineTimeoutError("1 of 1 all-reduces have not arrived")


def test_an_optimizers_step_waits_also_after_a_wait_in_vain():
    path = _SlowPath()
    group = CudaGroup(0, 2, None, "a group", 0, None)
    group._way, group.communicator = CudaCollectives(path, NoStreams()), path
    work = group._way.allreduce([torch.zeros(4)])
    with pytest.raises(RuntimeError):
        work.wait(datetime.timedelta(seconds=1))
    path.waits = 0
    group.before_step(None)
    assert path.waits == 1
    group.before_step(None)
    assert path.waits == 1, "nothing is under way any more"


class _OnDevice:
    is_cuda = True

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_what_updates_read_later_belongs_to_their_stream():
    carrier = object.__new__(CudaCarrier)
    carrier._updates = "updates"
    there = _OnDevice()
    carrier.reads_later([there, torch.ones(1)])
    assert there.streams == ["updates"]
