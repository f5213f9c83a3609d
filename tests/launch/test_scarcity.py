"""Ranks of a node where shared memory is scarce or refused: the job goes on, and each rank says once what it lacks."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT, SUMS, WORKER, expect_ranks, run


def expect_said_once(result, *parts):
    """By each of two ranks, and nothing else."""
    expect_ranks(result, 2)
    lines = result.stderr.splitlines()
    for rank in range(2):
        said = [line for line in lines if line.startswith(f"[paceline {rank}]")]
        assert len(said) == 1 and all(part in said[0] for part in parts), result.stderr
    assert len(lines) == 2, result.stderr


def test_without_shared_memory_ranks_talk_over_tcp(paceline, python):
    """A limit on the size of files holds for shared memory too."""
    result = run([paceline, "run", "-np", 2, "--", "sh", "-c", f"ulimit -f 8; exec {python} {WORKER}"])
    expect_said_once(result, "the ranks of this node talk over TCP: no ", "raise the limit of file sizes (ulimit -f)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount another /dev/shm")
def test_more_than_dev_shm_holds_is_private_memory(paceline, python):
    """A container's default of 64 MB, and a system call filter that leaves nothing else."""
    rank = WORKER.with_name("without_memfd.py")
    script = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {paceline} run -np 2 -- {python} {rank}"
    result = run(["unshare", "-m", "sh", "-c", script])
    expect_said_once(result, "are private memory instead: /dev/shm has no 262144 KiB")


@pytest.fixture
def for_everybody():
    """A folder that every user may read, with what a job needs: a checkout's own folders need not be open to all."""
    with tempfile.TemporaryDirectory(prefix="paceline-job-") as name:
        folder = pathlib.Path(name)
        for part in ("build/bin/paceline", "build/lib/libpaceline.so"):
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, folder / part)
        shutil.copytree(ROOT / "python" / "paceline", folder / "python" / "paceline")
        shutil.copy(SUMS, folder / "sums.py")
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        (folder / "found").mkdir()
        (folder / "found").chmod(0o777)
        yield folder


@pytest.mark.parametrize("pull", ["auto", "process_vm_readv"])
def test_a_job_of_an_ordinary_user_lacks_nothing(for_everybody, pull):
    here, found = for_everybody, for_everybody / "found"
    user, uid = [], os.geteuid()
    if uid == 0:
        user, uid = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--bounding-set=-all"], 54321
    python = pathlib.Path(sys.executable).resolve()  # the system's, by which an environment's goes
    job = [here / "build/bin/paceline", "run", "-np", 3, "--", python, here / "sums.py", found, 1, 3]
    environment = {"PYTHONPATH": here / "python", "PACELINE_SHM_PULL": pull, "PYTHONDONTWRITEBYTECODE": 1}
    result = run(["env", "-C", here, *user, *job], **environment)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    for rank in range(3):
        file = found / f"{rank}.json"
        assert file.stat().st_uid == uid
        assert " · shared memory" in json.loads(file.read_text())["describe"], file.read_text()
