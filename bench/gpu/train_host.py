"""Where the host's time of a step goes: in Paceline's hook, and of that in the library (the driver, NCCL)."""

from __future__ import annotations

import contextlib
import resource
import time

import train_paths


class HostParts:
    """Seconds spent inside the hook (`hook`) and inside the library's calls (`library`), of the thread that calls.

    sleeps: how often it slept there, by part: in a wait, or where another thread held a lock of the driver's.
    """

    def __init__(self):
        self.hook = self.library = 0.0
        self.sleeps = {"hook": 0, "library": 0}

    def _timed(self, call, part):
        def timed(*arguments, **keywords):
            slept = _sleeps_so_far()
            started = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                setattr(self, part, getattr(self, part) + time.perf_counter() - started)
                self.sleeps[part] += _sleeps_so_far() - slept

        return timed

    @contextlib.contextmanager
    def watch(self, variant):
        """Counts while one of Paceline's paths steps; others have nothing to count."""
        attachment = train_paths.attachment_of(variant.model)
        if attachment is None:
            yield
            return
        communicator = attachment.endpoint.communicator
        calls = [name for name in ("join", "submit", "submit_prepared") if hasattr(communicator, name)]
        hook = (attachment, "all_reduce") if attachment.overlap is None else (attachment.overlap, "take")
        watched = [(*hook, "hook"), *((communicator, name, "library") for name in calls)]
        for owner, name, part in watched:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, _ in watched:
                delattr(owner, name)


def _sleeps_so_far():
    """Of the thread that asks."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
