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


class ZygoteLostError(RuntimeError):
    """No launch was made, for the process that makes them is gone."""


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
        try:
            zygote.send(self._ours, asked, [theirs])
            answer = zygote.receive(self._ours)
        except OSError:  # its end of the connection is gone
            answer = None
        os.close(theirs)
        if answer is None:
            os.close(output)
            raise ZygoteLostError(f"the process that launches ranks ended with {self._process.wait()}")
        return Forked(answer[0], output)

    def close(self):
        self._ours.close()
        self._process.wait()


def early(environment):
    """What of an environment counts as a process starts: launches that differ in it need a process of their own."""
    return {name: value for name, value in environment.items() if name != _OURS and not name.startswith(_LATER)}


class Launcher:
    """Launches of ranks.py: by a zygote of their environment, or by themselves.

    An environment that is new may be one test's alone, so it has a zygote from its second launch in a row on; the very
    first has one at once.
    """

    MOST = 2  #: zygotes at a time, each of which holds torch's memory; the newest stay

    def __init__(self):
        self._missed = None
        self._kept = []

    def _zygote(self, environment):
        """One for this environment, or None."""
        asked = early(environment)
        for kept in self._kept:
            if kept.early == asked:
                return kept
        if self._kept and self._missed != asked:
            self._missed = asked
            return None
        self._kept.append(Zygote(environment))
        if len(self._kept) > self.MOST:
            self._kept.pop(0).close()
        return self._kept[-1]

    def launch(self, arguments, environment):
        found = self._zygote(environment)
        if found is None:
            command = [sys.executable, str(_PROGRAM.with_name("ranks.py")), *arguments]
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            return found.launch(arguments, environment)
        except ZygoteLostError:
            self._kept.remove(found)  # a test shall know that it died, the next one shall not suffer for it
            raise

    def close(self):
        while self._kept:
            self._kept.pop().close()


launch = Launcher().launch
