"""Starts ranks for the tests and reads what they found."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import launches
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODERN = hasattr(torch, "compile")  # torch 2 and later
_FAMILIES = ("PACELINE_", "LIGHT_", "PERSEUS_", "TIACC_TRAINING_", "HOROVOD_")

#: What triton's bindings say at the end of a process that keeps what it was forked with (zygote.py).
_NANOBIND = re.compile(r"^(nanobind: .*| - (leaked|\.\.\. skipped) .*|See https://nanobind.*)\n?", re.MULTILINE)


def environment(**extra):
    """This process's environment without anybody's settings, and the tree's package on the path. None: without it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_FAMILIES)}
    if "PACELINE_LIBRARY" in os.environ:
        clean["PACELINE_LIBRARY"] = os.environ["PACELINE_LIBRARY"]
    paths = [str(ROOT / "python"), clean.get("PYTHONPATH", "")]
    clean["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    clean.update(
        OMP_NUM_THREADS="1", PACELINE_TIMEOUT="60", TOKENIZERS_PARALLELISM="false", TORCH_CPP_LOG_LEVEL="ERROR"
    )
    clean.update(extra)
    return {name: value for name, value in clean.items() if value is not None}


def as_in_a_wheel(folder):
    """What a wheel's installation would put into this folder for torch, which then registers the backend by itself."""
    wheel = folder / "paceline_in_a_wheel-0.1.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-in-a-wheel\nVersion: 0.1.0\n")
    project = (ROOT / "python" / "pyproject.toml").read_text()
    points = re.findall(r'\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"', project)
    assert len(points) == 2
    lines = [f"[{group}]\n{name} = {function}\n" for group, name, function in points]
    (wheel / "entry_points.txt").write_text("".join(lines))


class Launch:
    """N ranks of a script under way; end() waits for them (bounded) and kills what is left."""

    def __init__(self, script, ranks, arguments=(), timeout=240, **extra):
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-torch-")
        self.folder = Path(self._folder.name)
        self.ranks = ranks
        self._timeout = timeout
        command = [str(ranks), str(self.folder), str(HERE / script), *arguments]
        self._process = launches.launch(command, environment(CHECKS_REPORT=str(self.folder / "report"), **extra))

    def end(self):
        try:
            output, _ = self._process.communicate(timeout=self._timeout)
            self.hung = False
        except subprocess.TimeoutExpired:
            self.hung = True
            for rank in range(self.ranks):
                with contextlib.suppress(ProcessLookupError):  # where is it stuck? (faulthandler, see ranks.py)
                    os.kill(self.pid(rank) or self._process.pid, signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            os.killpg(self._process.pid, signal.SIGKILL)
            output, _ = self._process.communicate()
        self.output = output.decode(errors="replace")
        self.logs = [self.log(r) for r in range(self.ranks)]
        self.statuses = [self._read(f"{r}.status") for r in range(self.ranks)]
        self.reports = [json.loads(self._read(f"report.{r}") or "{}") for r in range(self.ranks)]
        self._folder.cleanup()
        return self

    def pid(self, rank):
        return int(self._read(f"{rank}.pid") or 0)

    def log(self, rank):
        return _NANOBIND.sub("", self._read(f"{rank}.log"))

    def everything(self):
        parts = [f"launcher{' (ran out of time)' if self.hung else ''}: {self.output}"]
        parts += [f"--- rank {r} (exit {s}):\n{log}" for r, (s, log) in enumerate(zip(self.statuses, self.logs))]
        return "\n".join(parts)

    def _read(self, name):
        try:
            return (self.folder / name).read_text(errors="replace")
        except FileNotFoundError:
            return ""


def names_of(script):
    """The checks in a file, in their order."""
    return re.findall(r"^@check\ndef (\w+)", (HERE / script).read_text(), re.MULTILINE)


#: The CUDA path over a simulated GPU, which simulated_gpu.py loads.
SIMULATED = ROOT / "build" / "lib" / "simulated" / "libpaceline_cuda.so"


class Suite:
    """One launch of a file of checks, shared by the tests that look at its results.

    needs: a file that the build makes.
    """

    def __init__(self, script, ranks, needs=None, **extra):
        self._needs = needs
        self._make = lambda: Launch(script, ranks, **extra)
        self._done = None

    def result(self):
        assert self._needs is None or self._needs.exists(), f"{self._needs} is not built: ./dev build"
        if self._done is None:
            self._done = self._make().end()
        return self._done

    def expect(self, name):
        done = self.result()
        for rank, report in enumerate(done.reports):
            assert report.get(name) == "ok", f"rank {rank}: {report.get(name)}\n{done.everything()[-6000:]}"
