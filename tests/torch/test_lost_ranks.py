"""torch's own collectives over a lost rank raise what names it, and nothing else is held up or changed."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from support import MODERN, environment

import paceline.torch
from paceline import communicator
from paceline._torch import guard, lost_ranks
from paceline.errors import PeerLostError

assert paceline.torch is not None
LOST = PeerLostError("rank 1 (host b) is lost")
GLOO = "[…/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:24217"


class World:
    """A communicator that hears of the lost rank when it has been asked `after` times."""

    def __init__(self, after):
        self.after, self.asked = after, 0

    def check_health(self):
        self.asked += 1
        if self.asked > self.after:
            raise LOST


def opened(monkeypatch, *worlds):
    monkeypatch.setattr(communicator, "open_communicators", lambda: list(worlds))


def test_it_waits_for_the_name(monkeypatch):
    world = World(after=5)
    opened(monkeypatch, World(after=1000), world)
    with pytest.raises(PeerLostError, match="rank 1") as raised, lost_ranks.naming():
        raise RuntimeError(GLOO)
    assert world.asked == 6
    assert GLOO in str(raised.value.__cause__)
    if MODERN:  # what a script catches already
        assert isinstance(raised.value, dist.DistBackendError)


def test_where_nobody_is_lost_torchs_error_stays(monkeypatch):
    opened(monkeypatch, World(after=1000))
    monkeypatch.setattr(lost_ranks, "_HEAR_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="Connection closed") as raised, lost_ranks.naming():
        raise RuntimeError(GLOO)
    assert not isinstance(raised.value, PeerLostError)


def test_nobody_waits_where_there_is_no_job_yet(monkeypatch):
    """As when the ranks meet, and the first one's address is wrong."""
    opened(monkeypatch)
    monkeypatch.setattr(lost_ranks, "_HEAR_SECONDS", 3600)
    assert lost_ranks.named(RuntimeError(GLOO)) is None


@pytest.mark.parametrize("error", [RuntimeError("Tensors must be contiguous"), PeerLostError("rank 2 is lost")])
def test_nobody_is_asked_about_other_errors(monkeypatch, error):
    world = World(after=0)
    opened(monkeypatch, world)
    with pytest.raises(RuntimeError) as raised, lost_ranks.naming():
        raise error
    assert raised.value is error and world.asked == 0


def test_all_that_is_watched_hears_of_it(monkeypatch):
    """Each has something of its own that would wait."""

    class Watched:
        heard = 0

        def look(self):
            pass

        def hear(self):
            self.heard += 1
            return LOST if self is first else None

    first, second = Watched(), Watched()
    opened(monkeypatch, World(after=1000))
    guard.watch(first)
    guard.watch(second)
    try:
        assert isinstance(lost_ranks.named(RuntimeError(GLOO)), PeerLostError)
    finally:
        guard.unwatch(first)
        guard.unwatch(second)
    assert first.heard == second.heard == 1


def test_the_collectives_stay_what_torch_compile_knows_them_by():
    """An older torch compiles nothing: there each is wrapped, once, under both of its names."""
    code = "import torch.distributed as dist; before = dist.all_reduce, dist.broadcast; import paceline.torch; "
    if MODERN:
        code += "assert (dist.all_reduce, dist.broadcast) == before; "
        code += "print(dist.c10d_logger._get_msg_dict._paceline_patched)"
    else:
        code += "now = dist.all_reduce, dist.broadcast; assert [f.__wrapped__ for f in now] == list(before); "
        code += "print((dist.distributed_c10d.all_reduce, dist.distributed_c10d.broadcast) == now)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
