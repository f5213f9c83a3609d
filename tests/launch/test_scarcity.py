"""Ranks of a node where shared memory is scarce or refused: the job goes on, and each rank says once what it lacks."""

import json
import os
import pathlib
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
def reachable():
    """A folder that every user may read, for a checkout to be mounted at: its own path may go through private ones."""
    with tempfile.TemporaryDirectory(prefix="paceline-checkout-") as folder:
        os.chmod(folder, 0o755)
        pathlib.Path(folder, "there").mkdir(mode=0o755)
        pathlib.Path(folder, "found").mkdir()
        pathlib.Path(folder, "found").chmod(0o777)
        yield pathlib.Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else and mount a checkout elsewhere")
@pytest.mark.parametrize("pull", ["auto", "process_vm_readv"])
def test_a_job_of_an_ordinary_user_lacks_nothing(reachable, python, pull):
    there, found = reachable / "there", reachable / "found"
    here = [there / pathlib.Path(path).relative_to(ROOT) for path in (ROOT / "build/bin/paceline", python, SUMS)]
    job = f"{here[0]} run -np 3 -- {here[1]} {here[2]} {found} 1 3"
    user = "setpriv --reuid 54321 --regid 54321 --clear-groups --bounding-set=-all --inh-caps=-all"
    script = f"mount --bind {ROOT} {there} && cd {there} && exec {user} {job}"
    result = run(["unshare", "-m", "sh", "-c", script], PYTHONPATH=there / "python", PACELINE_SHM_PULL=pull)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    for rank in range(3):
        file = found / f"{rank}.json"
        assert file.stat().st_uid == 54321
        assert " · shared memory" in json.loads(file.read_text())["describe"], file.read_text()
