"""Who never comes to init_process_group() is named, although torch itself has the ranks meet there."""

import datetime

import pytest
import torch.distributed as dist
from support import MODERN, Launch

from paceline._torch import arrivals
from paceline.errors import TimeoutError

LATE = RuntimeError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1")


def waiting(absent, *port):
    """Reports of the ranks that came, of three, and everything printed."""
    done = Launch("latecomers.py", 3, [",".join(map(str, absent)), *port], timeout=100).end()
    assert not done.hung, done.everything()
    return [done.reports[rank] for rank in range(3) if rank not in absent], done.everything()


@pytest.fixture
def torchruns_port():
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, None if MODERN else -1, True, limit, wait_for_workers=False)
    yield str(store.port)


def check_named(reports, everything, begin):
    for report in reports:
        assert report["kind"] == "TimeoutError", everything
        assert report["text"].startswith(f"{begin} never came to init_process_group(), for which"), report["text"]
        wanted = {"RuntimeError", "OSError"} | ({"DistBackendError"} if MODERN else set())
        assert wanted <= set(report["kinds"]), report["kinds"]


@pytest.mark.parametrize(("absent", "begin"), [([1], "rank 1 of 3"), ([1, 2], "ranks 1, 2 of 3"), ([0], "rank 0")])
def test_where_rank_0_serves_the_store(absent, begin):
    reports, everything = waiting(absent)
    check_named(reports, everything, begin)
    if absent == [0]:  # nobody knows more than that nobody is where it should be
        for report in reports:
            assert "MASTER_ADDR and MASTER_PORT" in report["text"], report["text"]


@pytest.mark.parametrize(("absent", "begin"), [([0], "rank 0 of 3"), ([0, 2], "ranks 0, 2 of 3")])
def test_where_torchrun_serves_the_store(torchruns_port, absent, begin):
    check_named(*waiting(absent, torchruns_port), begin)


def test_only_a_time_out_is_about_who_came():
    meeting = arrivals.Meeting()
    store = dist.HashStore()
    meeting.has(store, 0, 2)
    assert meeting.absent() == [1]
    assert meeting.named(RuntimeError("Connection reset by peer")) is None
    assert meeting.named(TimeoutError("rank 1 (host b) did not come within 3 s")) is None
    assert "rank 1 of 2 never came" in str(meeting.named(LATE))
    meeting.has(store, 1, 2)
    assert meeting.absent() == [] and meeting.named(LATE) is None


def test_meetings_in_one_store_are_told_apart():
    store = dist.HashStore()
    first, second = arrivals.Meeting(), arrivals.Meeting()
    first.has(store, 0, 2)
    first.has(store, 1, 2)
    second.has(store, 0, 2)
    assert second.absent() == [1]


def test_after_the_meeting_nothing_is_said():
    assert arrivals.named(LATE) is None
