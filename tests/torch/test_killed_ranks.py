"""Which rank is killed makes no difference, nor whether the others share a node with it: all name it, and soon.

Rank 0 is the one where torch keeps its store, and from which Gloo and DDP expect things.
"""

import socket

import pytest
from support import Launch

NODES = {"CHECKS_NODES": "1"}
CASES = [
    ("training", 0, {}),
    ("training", 0, NODES),
    ("buffers", 0, {}),
    ("collectives", 0, NODES),
    ("broadcasts", 0, NODES),
    ("groups", 0, {}),
    ("beginnings", 0, {"TORCH_DIST_INIT_BARRIER": "1"}),
]


NAMES = [f"{what}{', nodes' * (extra is NODES)}" for what, _, extra in CASES]


@pytest.mark.parametrize(("what", "victim", "nodes"), CASES, ids=NAMES)
def test_kill_9_is_named_within_two_seconds(what, victim, nodes):
    done = Launch("killed_ranks.py", 3, [what, str(victim)], timeout=120, **nodes).end()
    assert not done.hung, done.everything()
    assert done.statuses[victim] == "-9", done.everything()
    for rank in {0, 1, 2} - {victim}:
        report = done.reports[rank]
        assert report.get("kind") == "PeerLostError", done.everything()
        assert f"rank {victim} (host {socket.gethostname()})" in report["text"], report["text"]
        assert report["at"] - done.reports[victim]["at"] < 2, done.everything()
