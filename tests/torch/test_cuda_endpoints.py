"""The beginning and the end of the ways that CUDA models take, where there is no GPU."""

import subprocess
import sys

import pytest
from support import ROOT, environment

from paceline import _cuda
from paceline._torch import cuda, endpoints


def test_a_path_that_can_not_be_is_an_error():
    """On one node there is none, and without a driver nothing of it is called."""
    if not (ROOT / "build" / "lib" / _cuda.NAME).exists():
        pytest.skip(f"{_cuda.NAME} is not built")
    code = (
        "import paceline\n"
        "from paceline import _cuda\n"
        "c = paceline.Communicator(rank=0, size=1)\n"
        "try:\n"
        "    _cuda.CudaCommunicator(c, 0)\n"
        "except paceline.UnsupportedError as error:\n"
        "    print(error)\n"
        "c.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "share one node" in done.stdout, (done.returncode, done.stderr)


class Group:
    """Sets have these in the order of their numbers."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number


class Endpoint:
    def __init__(self, name, closed):
        self.steps = self.communicator = self
        self.close = lambda: closed.append(name)

    def forget(self):
        pass


def test_groups_that_are_gone_are_closed_in_the_order_of_all_ranks(monkeypatch):
    """Each close waits for the group's other ranks."""
    closed = []
    names = ["first", "second", "third"]
    chosen = {(Group(9 - i), "cuda"): Endpoint(name, closed) for i, name in enumerate(names)}
    monkeypatch.setattr(cuda, "_chosen", chosen)
    monkeypatch.setattr(endpoints, "known", lambda _group: False)
    cuda.prune()
    assert closed == names and not chosen
