"""A link that goes down under a running job, for real: a namespace's interface taken down, with its sockets open."""

import os
import re
import sys
from pathlib import Path

from lab_tools import ROOT, run_lab
from presence import measured

CUTTER = str(Path(__file__).with_name("link_cutter.py"))


def ranks_of(seconds, rounds):
    result = run_lab(
        "--nodes", "2", "--rate", "1gbit", "--quiet", command=[sys.executable, CUTTER, str(seconds), str(rounds)],
        prefix=["env", f"PYTHONPATH={os.pathsep.join([str(ROOT / 'python'), os.environ.get('PYTHONPATH', '')])}"],
        timeout=120,
    )  # fmt: skip
    text = result.stdout + result.stderr
    lines = dict(re.findall(r"rank (\d): (.*)", text))
    assert sorted(lines) == ["0", "1"], text
    return lines


def test_a_link_that_is_down_for_a_second_costs_time_alone():
    def longest_round(line):
        found = re.fullmatch(r"20 right sums, a round took ([\d.]+) s at most", line)
        assert found, line
        return float(found[1])

    lines = measured(lambda: ranks_of(1, 20), lambda lines: all(longest_round(line) < 10 for line in lines.values()))
    for line in lines.values():
        assert 0.5 < longest_round(line) < 10, line  # the outage was felt


def test_a_link_that_stays_down_ends_with_a_named_error_after_the_deadline():
    def failure(line):
        found = re.match(r"(\w+) after ([\d.]+) s: (.*)", line)
        assert found, line
        return found

    lines = measured(
        lambda: ranks_of(0, 200), lambda lines: all(float(failure(line)[2]) < 5 + 2 for line in lines.values())
    )
    for rank, line in lines.items():
        found = failure(line)
        assert found[1] in ("TimeoutError", "PeerLostError"), line
        assert float(found[2]) < 5 + 2, line
        other = 1 - int(rank)
        assert f"rank {other} (host node{other})" in found[3], line
