"""The tests' side of zygote.py: launches that need not import torch once more."""

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import zygote

_PROGRAM = Path(__file__).with_name("zygote.py")
_READ = 1 << 16
#: What of its environment a process reads only once it runs a script: everything else must be the zygote's own.
_LATER = ("PACELINE_", "LIGHT_", "PERSEUS_", "TIACC_TRAINING_", "HOROVOD_", "CHECKS_", "SCRIPT_")
#: It says which test runs.
_OURS = "PYTEST_CURRENT_TEST"


class Forked:
    """As much of subprocess.Popen as a launch needs: it is over when its output is."""

    def __init__(self, pid, output):
        self.pid = pid
        self._output = output
        self._read = b""

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self._read, None

    def wait(self, timeout=None):
        until = None if timeout is None else time.monotonic() + timeout
        while self._output is not None:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"launch {self.pid}", timeout)
            more = os.read(self._output, _READ)
            self._read += more
            if not more:
                os.close(self._output)
                self._output = None


class Zygote:
    """A process that has imported torch in this environment, for as long as this one lives."""

    def __init__(self, environment):
        self.early = early(environment)
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, str(_PROGRAM), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def launch(self, arguments, environment):
        output, theirs = os.pipe()
        asked = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
        zygote.send(self._ours, asked, [theirs])
        os.close(theirs)
        answer = zygote.receive(self._ours)
        if answer is None:
            raise RuntimeError(f"the process that launches ranks ended with {self._process.wait()}")
        return Forked(answer[0], output)

    def close(self):
        self._ours.close()
        self._process.wait()


def early(environment):
    """What of an environment counts as a process starts: launches that differ in it need a process of their own."""
    return {name: value for name, value in environment.items() if name != _OURS and not name.startswith(_LATER)}


#: The environment of the last launch that found no zygote, and the newest zygotes, the newest last: what a test imports
#: may change this process's environment.
_missed = {}
_kept = []
_MOST = 2


def _zygote(environment):
    """One for this environment; None where it is new and may be one test's alone."""
    for kept in _kept:
        if kept.early == early(environment):
            return kept
    if _kept and _missed != early(environment):
        _missed.clear()
        _missed.update(early(environment))
        return None
    _kept.append(Zygote(environment))
    if len(_kept) > _MOST:
        _kept.pop(0).close()
    return _kept[-1]


def launch(arguments, environment):
    """A launch of ranks.py: by a zygote of this environment, or by itself."""
    found = _zygote(environment)
    if found is not None:
        return found.launch(arguments, environment)
    command = [sys.executable, str(_PROGRAM.with_name("ranks.py")), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
