"""Launches that fork their ranks off a process with torch imported: to the tests the same as launches by themselves."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import launches
import pytest

_TORCH = """
import os
with open(os.environ["IMPORTED"], "a") as imported:
    imported.write(f"{os.getpid()}\\n")
def set_num_threads(count):
    pass
"""
_SCRIPT = """
import os, sys
print(os.environ["SCRIPT_WORD"], os.environ["RANK"], os.getcwd(), *sys.argv[1:], flush=True)
sys.exit(int(os.environ["RANK"]))
"""


class World:
    """A torch that says in which processes it was imported: what is launched does not need more of it."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(_TORCH)
        (folder / "torch" / "distributed.py").write_text("")
        self.script = folder / "script.py"
        self.script.write_text(_SCRIPT)
        self.launcher = launches.Launcher()

    def environment(self, name, **extra):
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.folder),
            "IMPORTED": str(self.folder / "imported"),
            "NAME": name,
            "SCRIPT_WORD": "none",
            **extra,
        }

    def launch(self, name, *arguments, ranks=1, **extra):
        command = [str(ranks), str(self.folder), str(self.script), *arguments]
        return self.launcher.launch(command, self.environment(name, **extra))

    def run(self, *arguments, **more):
        output, _ = self.launch(*arguments, **more).communicate(timeout=60)
        assert output == b"", output
        return (self.folder / "0.log").read_text().split()

    def importers(self):
        """The processes that have imported torch so far, in order."""
        return [int(line) for line in (self.folder / "imported").read_text().split()]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.launcher.close()


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_import_serves_launches_of_different_settings_and_folders(world, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    assert world.run("a", "x", SCRIPT_WORD="one")[:2] == ["one", "0"]
    monkeypatch.chdir(other)
    assert world.run("a", "y", "z", SCRIPT_WORD="two") == ["two", "0", str(other), "y", "z"]
    assert len(world.importers()) == 1


def test_every_rank_has_its_log_and_its_status(world):
    launched = world.launch("a", ranks=3, SCRIPT_WORD="word")
    launched.wait(60)
    for rank in range(3):
        assert (world.folder / f"{rank}.log").read_text().split()[:2] == ["word", str(rank)]
        assert (world.folder / f"{rank}.status").read_text() == str(rank)


def test_a_launch_that_does_not_end_is_a_timeout_and_can_be_killed(world):
    up = world.folder / "up"
    os.mkfifo(up)
    world.script.write_text(f"open({str(up)!r}, 'w').close(); import time; time.sleep(600)")
    launched = world.launch("a")
    up.read_text()  # a rank is under way
    with pytest.raises(subprocess.TimeoutExpired):
        launched.wait(0.2)
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait(60)  # its output ends with the last of its processes
    world.script.write_text(_SCRIPT)
    assert world.run("a")[0] == "none"


def test_an_environment_has_a_zygote_from_its_second_launch_on_and_two_are_kept(world):
    for _ in range(2):
        world.run("a")
    first = world.importers()
    assert len(first) == 1
    for _ in range(3):
        world.run("b")  # by itself, then twice by a zygote
    second = world.importers()
    assert len(second) == 3
    world.run("a")
    assert world.importers() == second
    for _ in range(2):
        world.run("c")
    assert len(world.importers()) == 5
    assert not _running(first[0])
    assert _running(second[2])
    assert _running(world.importers()[4])
    world.launcher.close()
    assert not any(_running(pid) for pid in world.importers())


def test_a_zygote_that_dies_is_told_and_the_next_launch_has_another(world):
    world.run("a")
    (lost,) = world.importers()
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(launches.ZygoteLostError, match=f"ended with -{int(signal.SIGKILL)}"):
        world.launch("a")
    assert world.run("a", SCRIPT_WORD="again")[0] == "again"
    assert len(world.importers()) == 2


def test_no_zygote_outlives_the_tests_that_it_served(world):
    code = (
        "import launches, sys, os, json;"
        f"launches.launch({['1', str(world.folder), str(world.script)]!r},"
        f" {world.environment('a')!r}).wait(60)"
    )
    path = {**os.environ, "PYTHONPATH": str(Path(launches.__file__).parent)}
    subprocess.run([sys.executable, "-c", code], env=path, check=True, timeout=60)
    (pid,) = world.importers()
    # It sees the end of its connection as soon as the process that held it is gone; the kernel says when it is through.
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 60)[0], "the zygote still runs"
    os.close(handle)
