"""paceline.torch.DistributedOptimizer(overlap="forward"): updates as their gradients arrive (checks_overlap.py)."""

import os
import signal
import time

import pytest
from support import Launch, Suite, names_of

CODECS = {"exact": {}, "fp16": {"PACELINE_CODEC": "fp16", "CHECKS_NODES": "1"}}
suites = {
    (ranks, codec): Suite("checks_overlap.py", ranks, **settings)
    for ranks in (2, 4)
    for codec, settings in CODECS.items()
}


loops = Suite("checks_overlap_loops.py", 2)


@pytest.mark.parametrize("name", names_of("checks_overlap_loops.py"))
def test_training_loops(name):
    loops.expect(name)


scripts = Suite("checks_overlap_scripts.py", 2)


@pytest.mark.parametrize("name", names_of("checks_overlap_scripts.py"))
def test_scripts(name):
    scripts.expect(name)


TOPK = {"PACELINE_CODEC": "topk", "PACELINE_TOPK_RATIO": "0.05", "PACELINE_TOPK_THRESHOLD": "1000"}
rules = {
    "exact": Suite("checks_overlap_rules.py", 2),
    "topk": Suite("checks_overlap_rules.py", 2, CHECKS_NODES="1", **TOPK),
}


@pytest.mark.parametrize("codec", ["exact", "topk"])
@pytest.mark.parametrize("name", names_of("checks_overlap_rules.py"))
def test_rules(name, codec):
    rules[codec].expect(name)


@pytest.mark.parametrize("where", ["forward", "end"])
def test_after_a_killed_rank_only_what_had_arrived_has_changed(where):
    done = Launch("faulty_overlap.py", 2, ["killed", where], timeout=150).end()
    assert not done.hung, done.everything()
    report, victim = done.reports
    assert report.get("kind") == "PeerLostError" and "rank 1" in report["text"], done.everything()
    assert report["at"] - victim["at"] < 2.0, report["at"] - victim["at"]
    assert report["untouched"] and report["others"] > 2, report
    assert (report["again"] and all(report["again"])) or where == "end", report


def test_a_stopped_rank_is_named_at_the_deadline():
    done = Launch("faulty_overlap.py", 2, ["stopped", "forward"], timeout=150, PACELINE_TIMEOUT="4")
    deadline = time.monotonic() + 40
    while not (done.folder / "report.0").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(done.pid(1), signal.SIGKILL)
    done.end()
    report, victim = done.reports
    assert report.get("kind") in ("TimeoutError", "PeerLostError") and "rank 1" in report["text"], done.everything()
    assert report["at"] - victim["at"] < 6.0, report["at"] - victim["at"]
    assert report["untouched"], report


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", names_of("checks_overlap.py"))
def test_bit_equal_to_the_barrier(name, ranks, codec):
    suites[ranks, codec].expect(name)
