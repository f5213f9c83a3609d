"""A report that can't be written ends a benchmark with a sentence: which file, why, and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "demo"), str(ROOT / "tests" / "lab")]

import output  # noqa: E402
from lab_tools import on_a_disk_of_its_own, on_a_small_disk  # noqa: E402


def said_by(function, *arguments):
    """What it ends the program with."""
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    return end.value.code


def test_what_can_be_written_is(tmp_path):
    path = tmp_path / "figures.json"
    output.check(None, "links")
    output.check(path, "links")
    assert not path.exists(), "a run that is cut leaves no empty report"
    output.write(path, "[1]\n", "links", "--json")
    output.check(path, "links")
    assert path.read_text() == "[1]\n", "an earlier report stays until there is a new one"
    output.write(path, b"\x89PNG")
    assert path.read_bytes() == b"\x89PNG"
    output.prepare(tmp_path / "a" / "b", "bench")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("missing/figures.json", "No such file or directory; make its directory or give --json"),
        (".", "Is a directory; give another --json"),
        ("file/figures.json", "Not a directory; give another --json"),
        ("/dev/full", "No space left on device; free some space or give --json"),
    ],
)
def test_a_file_that_can_t_be_written_is_named_with_what_to_do(tmp_path, place, why):
    (tmp_path / "file").touch()
    path = tmp_path / place
    wanted = f"links: can't write {path}: {why}"
    assert said_by(output.write, path, "[1]\n", "links", "--json") == wanted
    if place != "/dev/full":  # it opens like any other
        assert said_by(output.check, path, "links") == wanted


def test_a_folder_that_can_t_be_made_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    assert (
        said_by(output.prepare, folder, "bench") == f"bench: can't write {folder}: Not a directory; give another --out"
    )


def run(script, *words, prefix=()):
    command = [*prefix, sys.executable, str(ROOT / "bench" / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr and done.returncode == 1, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", ["links", "memory", "accuracy", "overlap", "hook_cost"])
def test_a_report_in_a_folder_that_is_missing_is_told_before_measuring(name, tmp_path):
    path = tmp_path / "missing" / "figures.json"
    done = run(f"{name}.py", "--json", path)
    wanted = f"{name}: can't write {path}: No such file or directory; make its directory or give --json\n"
    assert (done.stdout, done.stderr) == ("", wanted)


@on_a_disk_of_its_own
@pytest.mark.parametrize("name", ["train", "sharded", "convergence", "all_reduce"])
def test_a_disk_that_can_t_hold_the_gpus_figures_is_told_before_measuring(name, tmp_path):
    out = tmp_path / "all.json" if name == "all_reduce" else tmp_path
    done = run(f"gpu/{name}.py", "--out", out, prefix=on_a_small_disk(tmp_path, full=True))
    program = {"train": "bench", "sharded": "bench"}.get(name, name)
    assert done.stderr == (
        f"{program}: can't write {tmp_path}: No space left on device; free some space or give --out\n"
    )
    assert done.stdout == ""


def test_a_disk_that_is_full_after_measuring_is_told():
    done = run("memory.py", "--mib", 1, "--json", "/dev/full")
    assert done.stderr.endswith(
        "memory: can't write /dev/full: No space left on device; free some space or give --json\n"
    )
    assert "4 × 1  exact" in done.stdout, "what was measured is not lost with it"
