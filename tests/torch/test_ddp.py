"""DistributedDataParallel through Paceline, each mode against torch's own DDP in float64 (checks_ddp.py)."""

import pytest
from support import Suite, names_of

exact = {2: Suite("checks_ddp.py", 2), 3: Suite("checks_ddp.py", 3)}


@pytest.mark.parametrize("name", names_of("checks_ddp.py"))
def test_two_ranks(name):
    exact[2].expect(name)


@pytest.mark.parametrize("name", names_of("checks_ddp.py"))
def test_three_ranks(name):
    exact[3].expect(name)


def test_says_what_it_does_once_on_rank_0():
    done = exact[2].result()
    lines = [line for line in done.logs[0].splitlines() if line.startswith("paceline: 2 ranks")]
    assert len(lines) == 1, done.logs[0]
    assert "paceline: 2 ranks" not in done.logs[1]


def test_says_that_the_scripts_hook_won():
    done = exact[2].result()
    assert "their_hook" in done.logs[0] and "not by Paceline" in done.logs[0]
