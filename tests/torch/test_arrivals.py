"""Who never comes to init_process_group() is named, although torch itself has the ranks meet there."""

import datetime
import pickle

import pytest
import torch.distributed as dist
from ranks import free_port
from support import MODERN, Launch

import paceline.torch
from paceline._torch import arrivals
from paceline.errors import PacelineError, TimeoutError

assert paceline.torch is not None
LATE = RuntimeError("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1")
LIMIT = datetime.timedelta(seconds=60)


def waiting(how, absent, *port):
    """Reports of the ranks that came, of three, and everything printed."""
    done = Launch("latecomers.py", 3, [how, ",".join(map(str, absent)), *port], timeout=100).end()
    assert not done.hung, done.everything()
    return [done.reports[rank] for rank in range(3) if rank not in absent], done.everything()


@pytest.fixture
def torchruns_port():
    store = dist.TCPStore("127.0.0.1", 0, None if MODERN else -1, True, LIMIT, wait_for_workers=False)
    yield str(store.port)


def check_named(reports, everything, begin, kind="DistStoreError"):
    for report in reports:
        assert report["kind"] == "TimeoutError", everything
        assert report["text"].startswith(f"{begin} never came to init_process_group(), for which"), report["text"]
        wanted = {"RuntimeError", "OSError"} | ({kind} if MODERN else set())  # what catches torch's own
        assert wanted <= set(report["kinds"]), report["kinds"]


@pytest.mark.parametrize(
    ("how", "absent", "begin"),
    [("env", [1], "rank 1 of 3"), ("tcp", [1], "rank 1 of 3"), ("env", [1, 2], "ranks 1, 2 of 3")],
)
def test_where_rank_0_serves_the_store(how, absent, begin):
    check_named(*waiting(how, absent), begin)


def test_where_rank_0_itself_is_missing():
    """Nobody knows more than that it is not where it should be."""
    reports, everything = waiting("env", [0])
    check_named(reports, everything, "rank 0", "DistNetworkError")
    for report in reports:
        assert "MASTER_ADDR and MASTER_PORT" in report["text"], report["text"]


@pytest.mark.parametrize(("absent", "begin"), [([0], "rank 0 of 3"), ([0, 2], "ranks 0, 2 of 3")])
def test_where_torchrun_serves_the_store(torchruns_port, absent, begin):
    check_named(*waiting("torchrun", absent, torchruns_port), begin)


def test_a_rank_of_another_node_may_have_come_under_another_count_of_restarts(torchruns_port, monkeypatch):
    """Every agent of torchrun counts the failures of its own workers."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    store = dist.TCPStore("127.0.0.1", int(torchruns_port), 3, False, LIMIT, wait_for_workers=False)
    for rank, count in ((0, "1"), (1, "0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        meeting = arrivals._Meeting()
        meeting.begins("127.0.0.1", int(torchruns_port), rank, 3, LIMIT)
        meeting.has(store)
    for agents, absent in (("2", [2]), ("1", [0, 2])):
        monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
        assert meeting._absent() == absent


def test_after_one_that_failed_another_meeting_goes_well(torchruns_port):
    done = Launch("latecomers.py", 3, ["again", "1", str(free_port()), torchruns_port], timeout=100).end()
    assert [report.get("kind") for report in done.reports] == ["none"] * 3, done.everything()


def test_an_address_that_is_not_this_hosts_is_no_rank_that_never_came():
    """Rank 0 serves there, and can't reach it (TEST-NET-1): torch's error says which address."""
    where = f"tcp://192.0.2.1:{free_port()}"
    with pytest.raises((RuntimeError, OSError)) as raised:
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=2, timeout=datetime.timedelta(seconds=2))
    assert not isinstance(raised.value, PacelineError)


@pytest.mark.parametrize("kind", ["store", "file"])
def test_torchs_error_stays_where_ranks_meet_otherwise(kind, tmp_path):
    how = {"store": dist.HashStore()} if kind == "store" else {"init_method": f"file://{tmp_path}/meeting"}
    with pytest.raises(RuntimeError, match=r"(?i)time.?out|timed out") as raised:
        dist.init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=2), **how)
    assert not isinstance(raised.value, PacelineError)
    assert arrivals._meeting.get() is None


@pytest.mark.parametrize("name", ["DistStoreError", "DistNetworkError"] if MODERN else ["RuntimeError"])
def test_torchs_types_outlive_another_process(name):
    kind = getattr(dist, name, RuntimeError)
    error = pickle.loads(pickle.dumps(arrivals._like(kind("late"), "rank 1 of 3 never came")))
    assert isinstance(error, kind) and isinstance(error, TimeoutError) and str(error) == "rank 1 of 3 never came"


def test_only_a_time_out_is_about_who_came(torchruns_port, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def came(rank):
        meeting = arrivals._Meeting()
        meeting.begins("127.0.0.1", int(torchruns_port), rank, 3, LIMIT)
        meeting.has(dist.PrefixStore("one", dist.TCPStore("127.0.0.1", int(torchruns_port), 3, False, LIMIT)))
        return meeting

    came(2)
    meeting = came(1)
    assert meeting.named(RuntimeError("Connection reset by peer")) is None
    assert meeting.named(TimeoutError("rank 0 (host b) did not come within 3 s")) is None
    assert "rank 0 of 3 never came" in str(meeting.named(LATE))
    # One that has no Paceline leaves no key: torch has counted it.
    assert meeting.named(RuntimeError("Timed out after 5 seconds waiting for clients. 3/3 clients joined.")) is None
    assert "rank 0 of 3" in str(meeting.named(RuntimeError("Timed out … waiting for clients. 2/3 clients joined.")))
    came(0)
    assert meeting.named(LATE) is None
