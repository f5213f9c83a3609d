"""Was the machine there while something was timed? A virtual machine whose host gives its processors to others stands
still for tens of milliseconds at a time, and its links with it: what was measured then says nothing of the program."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


def stolen_seconds() -> float:
    """Processor seconds that the host took from this machine since it started (the eighth number of /proc/stat)."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")


class Presence:
    """Watches, from enter to exit: `absent` says that the machine stood still for a part of it that can be felt."""

    LONGEST_PAUSE = 0.02  # a thread that asks for 1 ms and gets more than this, not once but in a fiftieth of its time
    SHARE = 0.02

    def __enter__(self) -> Presence:
        self.absent = False
        self._paused = 0.0
        self._stolen, self._began = stolen_seconds(), time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._end.wait(0.001):
            now = time.monotonic()
            if now - before > self.LONGEST_PAUSE:
                self._paused += now - before
            before = now

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()
        seconds = time.monotonic() - self._began
        stolen = (stolen_seconds() - self._stolen) / (os.cpu_count() or 1)
        self.absent = max(stolen, self._paused) > self.SHARE * seconds


def measured(measure, holds, *, attempts: int = 1, patience: float = 240):
    """What `measure()` gives, as soon as `holds(it)`; else what it gave in the last of `attempts` tries. A try during
    which the machine stood still does not count, for `patience` seconds at most. `holds` decides only when to stop:
    the caller asserts on what comes back."""
    until = time.monotonic() + patience
    while True:
        with Presence() as machine:
            result = measure()
        if not machine.absent:
            attempts -= 1
        if holds(result) or attempts == 0 or time.monotonic() > until:
            return result
