"""Processes with another secret come to a job's doors: refused, mentioned once, and the job goes on without them."""

import re
import secrets
import shutil
import subprocess

import pytest
from conftest import OVER_FILES, WORKER, clean_environment, wait_until

RIGHT, OTHER = secrets.token_hex(16), secrets.token_hex(16)


class Processes:
    """Started one by one; killed at the end where they still run."""

    def __init__(self, python):
        self._python, self._all = python, []

    def start(self, *words, **environment):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = clean_environment(PACELINE_INTERFACE="lo", **environment)
        self._all.append(subprocess.Popen([self._python, *map(str, words)], text=True, env=env, **pipes))
        return self._all[-1]

    def end(self):
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(python):
    made = Processes(python)
    yield made
    made.end()


def ended(process):
    """Standard output, standard error."""
    return process.communicate(timeout=60)


def in_a_file(folder, secret):
    file = folder / f"{secret[:4]}.secret"
    file.touch(mode=0o600)
    file.write_text(secret)
    return file


@pytest.mark.parametrize("secret_is_in_a_file", [False, True])
@pytest.mark.parametrize("port", ["PACELINE_PORT", "PERSEUS_MASTER_PORT"])
def test_another_job_at_the_same_rendezvous(processes, free_port, tmp_path, port, secret_is_in_a_file):
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", port: free_port}

    def having(secret):
        where = {"PACELINE_SECRET_FILE": in_a_file(tmp_path, secret)} if secret_is_in_a_file else {}
        return where or {"PACELINE_SECRET": secret}

    first = processes.start(WORKER, RANK=0, **having(RIGHT), **place)
    for _ in range(3):
        _, said = ended(processes.start(WORKER, RANK=1, **having(OTHER), **place))
        assert "UnauthenticatedError" in said and "another secret than this job's" in said, said
        assert RIGHT not in said and OTHER not in said
    second = processes.start(WORKER, RANK=1, **having(RIGHT), **place)
    for rank, process in enumerate((first, second)):
        found, said = ended(process)
        assert found == f"rank {rank} size 2 nodes 1 ok\n", found + said
        mentioned = re.findall(r"refused a connection from 127\.0\.0\.1:\d+: .*; the job goes on", said)
        assert len(mentioned) == (rank == 0), said


def test_strangers_at_a_rank_s_own_door(processes, tmp_path):
    """They know where rank 0 listens and speak as a rank does, and go as soon as it does not prove itself to them."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    first = processes.start(OVER_FILES, ours, 0, 2, PACELINE_SECRET=RIGHT)
    assert wait_until(lambda: [path for path in ours.iterdir() if path.name.endswith("r0")])
    for _ in range(3):
        shutil.copytree(ours, theirs)
        found, _ = ended(processes.start(OVER_FILES, theirs, 1, 2, PACELINE_SECRET=OTHER))
        assert found.startswith("UnauthenticatedError") and "rank 0" in found, found
        shutil.rmtree(theirs)
    second = processes.start(OVER_FILES, ours, 1, 2, PACELINE_SECRET=RIGHT)
    for rank, process in enumerate((first, second)):
        found, said = ended(process)
        assert found == f"rank {rank} size 2 ok\n", found + said
        assert said == "[paceline 0] warning: a connection ended during its handshake\n" * (rank == 0)
