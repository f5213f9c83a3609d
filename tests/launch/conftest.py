"""Helpers of the launcher tests: a clean environment, bounded processes, free ports."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "lab"))

import ports  # noqa: E402

WORKER = ROOT / "tests" / "launch" / "worker.py"
SUMS = WORKER.with_name("sums.py")
OVER_FILES = WORKER.with_name("file_store.py")
#: What would make a process think that some launcher started it.
FOREIGN = ("PACELINE_", "PERSEUS_", "SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "HYDRA_")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# What started the tests may ignore signals (a shell does, of what it puts in the background); launchers inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def clean_environment(**more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in TORCH}
    env["PYTHONPATH"] = str(ROOT / "python")
    env["OMP_NUM_THREADS"] = "1"
    env.update({k: str(v) for k, v in more.items()})
    return env


def run(command, timeout=120, **environment):
    """Runs to the end; its whole session is gone after the time-out."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**environment),
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"{command} did not end within {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def expect_ranks(result, size):
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(size):
        assert f"rank {rank} size {size} nodes 1 ok" in result.stdout, result.stdout + result.stderr


@pytest.fixture
def free_port():
    return ports.free_port()


@pytest.fixture
def rendezvous_port():
    """Another one."""
    return ports.free_port()


@pytest.fixture
def paceline():
    return ROOT / "build" / "bin" / "paceline"


@pytest.fixture
def python():
    return sys.executable
