"""Ranks of a node where shared memory is scarce or refused: the job goes on, and each rank says once what it lacks."""

import os

import pytest
from conftest import WORKER, expect_ranks, run


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
