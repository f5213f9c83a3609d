"""The list of faults keeps up with the code: each one's text stands once in its file, and its tests exist. What the
program says of a fault: caught, survived, or no fault that could be put in."""

import os
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "dev"), str(ROOT / "tests" / "lab")]

import mutants  # noqa: E402
from lab_tools import processes_with, wait_until  # noqa: E402

MUTANTS = tomllib.loads((ROOT / "tools/dev/mutants.toml").read_text())["mutant"]


def test_there_are_at_least_25():
    assert len({mutant["name"] for mutant in MUTANTS}) >= 25


#: Their code runs in tests and benchmarks alone; the last one only hands on names.
NOT_MUTATED = {
    *("src/drivers/cuda/mock", "src/drivers/nccl/mock", "src/drivers/nccl/stand_in", "src/drivers/pmix/mock"),
    *("src/simulation", "src/wire/shm/bench", "python/paceline/torch"),
}


def test_every_module_has_one():
    files = [f.relative_to(ROOT) for top in ("src", "python", "adapters") for f in (ROOT / top).rglob("*")]
    code = [f for f in files if f.suffix in (".cc", ".cu", ".py") and not f.stem.endswith(("_test", "_fuzz"))]
    modules = {str(f.parent) for f in code}
    mutated = {str(Path(mutant["file"]).parent) for mutant in MUTANTS}
    assert len(modules) > 20
    assert not modules - mutated - NOT_MUTATED


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_fault_can_be_put_in(mutant):
    assert (ROOT / mutant["file"]).read_text().count(mutant["find"]) == 1
    for test in mutant["tests"]:
        assert not test.startswith("tests/") or (ROOT / test.partition("::")[0]).exists(), test


@pytest.mark.parametrize(
    ("replace", "verdict"),
    [
        ("return a * b", "caught"),
        ("return b + a", "SURVIVED"),
        ("return a +", "does not compile:\nsums.py:2: invalid syntax"),
        ("return a\n return b", "does not compile:\nsums.py:3: unindent does not match"),
    ],
)
def test_verdicts_on_python(tmp_path, monkeypatch, replace, verdict):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "targets_of", lambda mutant: set())
    (tmp_path / "sums.py").write_text("def sum_of(a, b):\n    return a + b\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import sys; sys.path.insert(0, '.')\nimport sums\ndef test_sum(): assert sums.sum_of(3, 4) == 7\n"
    )
    said = mutants.try_one(mutants.Mutant("sums", "sums.py", "return a + b", replace, ["tests/test_sums.py"]))
    assert said.startswith(verdict)
    assert "return a + b" in (tmp_path / "sums.py").read_text()  # as it was


def test_a_second_run_in_the_same_copy_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TREE", tmp_path / "tree")
    said = r"another run is under way in .*/tree: wait for it, or .*--shard K/N"
    with mutants.alone_in_the_copy(), pytest.raises(SystemExit, match=said), mutants.alone_in_the_copy():
        raise AssertionError("two runs have one copy")
    with mutants.alone_in_the_copy():
        pass


def test_what_a_test_that_hangs_has_started_ends_with_it(tmp_path, monkeypatch):
    """A rank of its job, say, in a session of its own."""
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_jobs.py").write_text(
        "import subprocess\ndef test_job():\n"
        f"    subprocess.run(['setsid', '--wait', 'sh', '-c', 'sleep 600; : {tmp_path.name}-{os.getpid()}'])\n"
    )
    monkeypatch.setattr(mutants, "limit_of", lambda mutant, test: 4)
    said = mutants.red(mutants.Mutant("hangs", "", "", "", ["tests/test_jobs.py"]))
    assert said == "tests/test_jobs.py: not done after 4 s"
    assert wait_until(lambda: not processes_with(f"sleep 600; : {tmp_path.name}-{os.getpid()}"))
