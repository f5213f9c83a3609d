"""The GPU suite's files side by side: which run where, and that none is lost. Processes are real, the driver's programs
are scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tools" / "dev" / "gpu_suites.py"
PASSES = """
import os, pathlib
PIPE = os.environ["CUDA_MPS_PIPE_DIRECTORY"]

def test_one():
    assert os.environ["REQUIRE"] == "cuda" and os.path.isdir(PIPE)
"""
WHERE = """
def test_where():
    pathlib.Path(__file__).with_suffix(".where").write_text(PIPE)
"""

HANGS = """
import pathlib, time

def test_one():
    try:
        time.sleep(600)
    finally:
        pathlib.Path("{}", "interrupted").touch()
"""


MEETS = """
import pathlib, time
HERE = pathlib.Path(__file__)

def test_one():
    assert (HERE.parent / "killed").exists(), "beside a rank that is being killed"
    HERE.with_suffix(".here").touch()
    until = time.monotonic() + 60
    while len(list(HERE.parent.glob("*.here"))) < 2:
        assert time.monotonic() < until, "alone"
        time.sleep(0.05)
"""
KILLS = """
import pathlib, time

def test_one():
    time.sleep(1)
    pathlib.Path(__file__).with_name("killed").touch()
"""


@pytest.fixture
def machine(tmp_path):
    """GPUs as nvidia-smi lists them; MPS servers that write down what they are told."""

    def make(count):
        tools = tmp_path / "tools"
        tools.mkdir()
        listed = "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(count))
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{listed}")
        (tools / "nvidia-cuda-mps-control").write_text(
            f'#!/bin/sh\n[ "$1" = -d ] && echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" >>{tmp_path}/servers\n'
            f"[ $# = 0 ] && cat >>{tmp_path}/ended\nexit 0\n"
        )
        for tool in tools.iterdir():
            tool.chmod(0o755)
        return {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "REQUIRE": "nvcc"}  # as under .ci/run

    return make


def run(env, *arguments):
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    command = ["/bin/bash", "-c", 'trap "" INT; exec "$0" "$@"', *command]  # as a shell's background job
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def suite(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return [folder / f"{name}.py" for name in files]


def test_each_file_runs_once_and_what_kills_has_a_pair_of_its_own(machine, tmp_path):
    files = suite(
        tmp_path,
        test_faults=PASSES + WHERE,
        test_overlap=PASSES + WHERE,
        test_extra=PASSES + WHERE + "def test_bad():\n    assert False\n",
    )
    done = run(machine(5), *files, "--out", tmp_path / "out")
    assert done.stdout.splitlines()[-1] == "6 passed, 1 failed" and done.returncode == 1, done.stdout + done.stderr
    pairs = dict(line.split() for line in (tmp_path / "servers").read_text().splitlines())
    assert sorted(pairs) == ["0,1", "2,3"], "the fifth GPU stays free"
    assert (tmp_path / "ended").read_text() == "quit\nquit\n"
    where = {file.stem: file.with_suffix(".where").read_text() for file in files}
    assert where["test_faults"] == pairs["0,1"]
    assert "test_bad" in (tmp_path / "out" / "test_extra.log").read_text()


def test_two_files_share_a_pair_once_nothing_is_killed_on_it(machine, tmp_path):
    files = suite(tmp_path, test_a=MEETS, test_b=MEETS, test_faults=KILLS)
    done = run(machine(2), *files, "--out", tmp_path / "out", "--at-once", 2)
    assert done.stdout.splitlines()[-1] == "3 passed, 0 failed", done.stdout + done.stderr


def test_a_file_that_does_not_end_is_a_failure(machine, tmp_path):
    files = suite(tmp_path, test_hangs=HANGS.format(tmp_path), test_fine=PASSES)
    done = run(machine(4), *files, "--out", tmp_path / "out", "--limit", 10)
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed" and done.returncode == 1, done.stdout + done.stderr
    assert (tmp_path / "interrupted").exists(), "what the tests have to end they end"
    assert "test_hangs.py on GPUs" in done.stdout and "cut off by the limit" in done.stdout


def test_a_file_without_a_test_is_a_failure(machine, tmp_path):
    done = run(machine(2), *suite(tmp_path, test_none=""), "--out", os.path.relpath(tmp_path / "out", ROOT))
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed" and done.returncode == 1, done.stdout + done.stderr
    assert "its end was 5" in done.stdout


def test_what_is_missing_is_named(machine, tmp_path):
    assert "1 GPU here; a pair is needed" in run(machine(1)).stderr
    assert "no file" in run({**os.environ}, tmp_path / "test_none.py").stderr
    bare = {**os.environ, "PATH": str(tmp_path)}
    assert "no nvidia-smi here" in run(bare).stderr
