"""Ends torch's NCCL communicators over a lost rank, without ending the process under them.

An abort can take seconds, so it runs in a thread. The interpreter must not end meanwhile: it ends a thread that comes
back from C++ by pthread_exit(), which C++ answers with std::terminate(), and the job would show an abort instead of the
error that says what happened.

Nor may the process's end wait for what was aborted: torch's watchdog, where it has seen the error too, sleeps for a
minute before it ends the process by a signal, and ~ProcessGroupNCCL() waits for the watchdog: it is never called.
"""

import atexit
import ctypes
import os
import sys
import threading
import time

import torch.distributed as dist

#: For which the process's end waits; ncclCommAbort() takes tens of milliseconds where the GPU answers.
_SECONDS = 10.0
_under_way = []
_torchs_too = False  # whether one of torch's own groups was aborted


def abort(backend, made_by_torch=False):
    """Calls backend.abort() in a thread, where there is such a method. made_by_torch: for one of its own groups."""
    global _torchs_too
    if not hasattr(backend, "abort"):
        return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # for good
    _torchs_too = _torchs_too or made_by_torch
    thread = threading.Thread(target=_abort, args=(backend,), daemon=True, name="paceline-abort-nccl")
    _under_way.append(thread)
    thread.start()


def end_world(destroy):
    """Ends torch's process groups by destroy(). Where some were aborted that would wait for the watchdog: all are."""
    global _torchs_too
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", destroy)
    aborted, _torchs_too = _torchs_too, False
    (abort_all if aborted else destroy)()


def _abort(backend):
    try:
        backend.abort()
    except RuntimeError as error:  # it may have failed by itself; ours is the error that counts
        print(f"paceline: torch's NCCL could not be aborted: {error}", file=sys.stderr, flush=True)


def _wait():
    until = time.monotonic() + _SECONDS
    for thread in _under_way:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in _under_way):
        print(f"paceline: torch's NCCL did not end within {_SECONDS:g} s; the process ends without it", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_wait)
