"""Starts ranks on the nodes of `paceline lab`, all on the GPUs of this machine, and reads what they found."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = ROOT / "build" / "bin" / "paceline"
#: Where several suites share the GPUs: all their limits are so many times longer.
PATIENCE = float(os.environ.get("CHECKS_PATIENCE", "1"))
#: What checks have measured in the launches so far, a sentence each: conftest.py prints them at the end.
figures = []
_NAMED = ("PACELINE_LANES", "CUDA_DEVICE_MAX_CONNECTIONS")
_FAMILIES = ("PACELINE_", "LIGHT_", "PERSEUS_", "TIACC_TRAINING_", "HOROVOD_")


def environment(**extra):
    """This process's environment without anybody's settings, and the tree's package on the path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_FAMILIES)}
    paths = [str(ROOT / "python"), str(ROOT / "tests" / "torch"), clean.get("PYTHONPATH", "")]
    clean["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    # What is tested is Paceline's way, whatever a trial on a busy machine would choose.
    clean.update(OMP_NUM_THREADS="1", PACELINE_TIMEOUT="30", TORCH_CPP_LOG_LEVEL="ERROR", PACELINE_CUDA_PATH="paceline")
    clean.update(extra)
    return clean


def keep_figures(what, output):
    """Checks say "figure: …" on one of their ranks."""
    figures.extend(f"{what}: {figure.strip()}" for figure in re.findall(r"figure: (.*)", output))


class LabRun:
    """One finished launch: exit code, everything printed, each rank's report (a dict)."""

    def __init__(self, script, nodes, arguments=(), timeout=90, grace="5s", slots=1, **extra):
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as folder:
            report = str(Path(folder) / "report")
            command = [str(PROGRAM), "lab", "--nodes", str(nodes), "--slots", str(slots), "--rate", "25gbit"]
            command += ["--no-calibration", "--quiet", "--json", f"{folder}/lab.json", "--grace", grace, "--"]
            command += [sys.executable, str(HERE / script), *arguments]
            env = environment(CHECKS_REPORT=report, **extra)
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=timeout * PATIENCE)
                self.hung = False
            except subprocess.TimeoutExpired:
                self.hung = True
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    output, _ = process.communicate(timeout=15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    output, _ = process.communicate()
            self.code = process.returncode
            self.output = output.decode(errors="replace")
            chosen = [f"{name}={value}" for name, value in extra.items() if name in _NAMED]
            keep_figures(" ".join([script, f"{nodes} × {slots}", *chosen]), self.output)
            lab = self._read(f"{folder}/lab.json")
            #: How each rank ended: its exit code, 128 + the signal.
            self.exits = [rank["exit_code"] for rank in lab.get("ranks", [])]
            self.reports = [self._read(f"{report}.{rank}") for rank in range(nodes * slots)]

    @staticmethod
    def _read(path):
        return json.loads(Path(path).read_text()) if os.path.exists(path) else {}

    def everything(self):
        return f"exit {self.code}{' (ran out of time)' if self.hung else ''}\n{self.output[-8000:]}"


class LabSuite:
    """One launch of a file of checks (tests/torch/checks.py), shared by the tests that look at its results.

    only, without: names of its checks, where not all of them claim something here. names: those that run; where pytest
    itself has CHECKS_ONLY=NAME,NAME, of those alone.
    """

    def __init__(self, script, nodes, only=(), without=(), **extra):
        everything = names_of(script)
        assert {*only, *without} <= set(everything), {*only, *without} - set(everything)
        chosen = os.environ.get("CHECKS_ONLY", ",".join(everything)).split(",")
        kept = [name for name in only or everything if name not in without]
        self.names = [name for name in kept if name in chosen]
        self._make = lambda: LabRun(script, nodes, CHECKS_ONLY=",".join(self.names), **extra)
        self._done = None

    def result(self):
        if self._done is None:
            self._done = self._make()
        return self._done

    def expect(self, name):
        done = self.result()
        for rank, report in enumerate(done.reports):
            assert report.get(name) == "ok", f"rank {rank}: {report.get(name)}\n{done.everything()}"


def names_of(script):
    """The checks in a file, in their order."""
    return re.findall(r"^@check\ndef (\w+)", (HERE / script).read_text(), re.MULTILINE)
