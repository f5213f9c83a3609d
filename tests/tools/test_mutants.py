"""The list of faults keeps up with the code: each one's text stands once in its file, and its tests exist."""

from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = tomllib.loads((ROOT / "tools/dev/mutants.toml").read_text())["mutant"]


def test_there_are_at_least_25():
    assert len({mutant["name"] for mutant in MUTANTS}) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_fault_can_be_put_in(mutant):
    assert (ROOT / mutant["file"]).read_text().count(mutant["find"]) == 1
    for test in mutant["tests"]:
        assert not test.startswith("tests/") or (ROOT / test.partition("::")[0]).exists(), test
