"""Ranks that don't come together, as real processes: each says who is missing, gone or odd, and what to do."""

import subprocess

import pytest
from conftest import clean_environment

#: Prints one line a rank: what came of the join.
JOIN = """
import sys
from paceline.communicator import Communicator
try:
    Communicator(timeout=float(sys.argv[1])).close()
except Exception as e:
    print(type(e).__name__, e)
else:
    print("joined")
"""


def start(python, environments, timeout=30):
    """A process for each of `environments`."""
    return [
        subprocess.Popen(
            [python, "-c", JOIN, str(timeout)], stdout=subprocess.PIPE, text=True, env=clean_environment(**environment)
        )
        for environment in environments
    ]


def end(processes, timeout=60):
    """What each has printed."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_sizes_that_differ_are_named_on_every_rank(python, free_port, sizes):
    place = {"MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    ranks = start(python, [{"RANK": r, "WORLD_SIZE": sizes[r], **place} for r in (0, 1)])
    for text in end(ranks):
        assert text.startswith("MismatchError"), text
        for rank in (0, 1):
            assert f"rank {rank} (host " in text and f"with {sizes[rank]}" in text, text
        assert "Start all ranks with the same size (WORLD_SIZE" in text, text
