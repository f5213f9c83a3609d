"""DistributedDataParallel through Paceline, its modes against torch's in float64 (checks_ddp.py, checks_join.py).

With torch 2 also under torch.amp (checks_mixed_precision.py) and torch.compile (checks_compiled.py).
"""

import re

import pytest
from support import MODERN, Suite, names_of

SCRIPTS = ("checks_ddp.py", "checks_join.py")
CHECKS = [pytest.param(script, name, id=name) for script in SCRIPTS for name in names_of(script)]
#: The setting has no effect, which is said once.
exact = {(script, ranks): Suite(script, ranks, HOROVOD_CYCLE_TIME="0") for script in SCRIPTS for ranks in (2, 3)}


@pytest.mark.parametrize(("script", "name"), CHECKS)
def test_two_ranks(script, name):
    exact[script, 2].expect(name)


@pytest.mark.parametrize(("script", "name"), CHECKS)
def test_three_ranks(script, name):
    exact[script, 3].expect(name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_says_what_it_does_once_on_rank_0(ranks):
    """Groups of some of the ranks, which three of them make, have no line of their own."""
    done = exact["checks_ddp.py", ranks].result()
    lines = [re.findall(r"^paceline: (\d+ ranks on .*)$", log, re.MULTILINE) for log in done.logs]
    assert [len(found) for found in lines] == [1] + [0] * (ranks - 1), done.everything()
    assert lines[0][0].startswith(f"{ranks} ranks on")


def test_says_nothing_on_other_ranks():
    """Not what concerns a model on a group whose first rank is not the job's."""
    done = exact["checks_ddp.py", 3].result()
    said = re.compile(r"^(paceline: |.*\[paceline \d+\]|.*HOROVOD_CYCLE_TIME).*$", re.MULTILINE)
    assert [said.findall(log) for log in done.logs[1:]] == [[], []], done.everything()
    assert done.logs[0].count("HOROVOD_CYCLE_TIME is known but has no effect yet") == 1, done.logs[0]


def test_says_that_the_scripts_hook_won():
    done = exact["checks_ddp.py", 2].result()
    assert "their_hook" in done.logs[0] and "not by Paceline" in done.logs[0]


if MODERN:  # what older torch answers instead: test_older.py
    # A model this small is compiled sooner here than by processes that have to start for it.
    modern = {
        "checks_mixed_precision.py": Suite("checks_mixed_precision.py", 2),
        "checks_compiled.py": Suite("checks_compiled.py", 2, TORCHINDUCTOR_COMPILE_THREADS="1"),
    }

    @pytest.mark.parametrize(("script", "name"), [(script, name) for script in modern for name in names_of(script)])
    def test_torch_2(script, name):
        modern[script].expect(name)
