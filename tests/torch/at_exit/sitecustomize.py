"""For scripts that run on torch alone (PACELINE_DISABLE=1): a process ends once torch's Gloo has come to rest.

A thread of Gloo's that has completed an operation drops its tensors, for which it wants the interpreter's lock. Where
the interpreter ends first, Python up to 3.13 ends that thread inside a destructor, and so the process: "terminate
called without an active exception". Newer torch keeps these threads past destroy_process_group() where there was a DDP
model. Nothing of Paceline's is in such a process; any other abort still fails the test. Python imports this file from
$PYTHONPATH.
"""

import atexit
import contextlib
import os
import time

_TASKS = "/proc/self/task"
_LOOKS = 3


def _is_busy(task):
    """Whether it is one of Gloo's threads and neither asleep nor gone."""
    with contextlib.suppress(OSError), open(f"{_TASKS}/{task}/stat", encoding="utf-8") as stat:
        name, _, rest = stat.read().partition("(")[2].rpartition(")")
        return name.startswith("pt_gloo") and rest.split()[0] != "S"
    return False


def _come_to_rest():
    """One that waits for the interpreter's lock is asleep as well: it gets the lock while this thread sleeps."""
    quiet, until = 0, time.monotonic() + 60
    while quiet < _LOOKS and time.monotonic() < until:
        time.sleep(0.005)
        quiet = 0 if any(map(_is_busy, os.listdir(_TASKS))) else quiet + 1


atexit.register(_come_to_rest)
