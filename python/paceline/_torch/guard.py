"""A thread that hears of lost ranks for what would wait for them: NCCL's kernels know no deadline, nor does a host that
waits for them and calls nothing of ours.
"""

import os
import threading
import time
import weakref

LOOK_SECONDS = 0.5

_watched = weakref.WeakSet()
_lock = threading.Lock()
_thread = None


def watch(thing):
    """thing.look() is called twice a second, on another thread, until unwatch() or its end; thing.hear() by hear()."""
    global _thread
    with _lock:
        _watched.add(thing)
        if _thread is None or not _thread.is_alive():  # a look that raises has ended it
            _thread = threading.Thread(target=_run, daemon=True, name="paceline-guard")
            _thread.start()


def unwatch(thing):
    with _lock:
        _watched.discard(thing)


def hear():
    """The error that ended what is watched, asked now, on this thread; None as long as all goes on."""
    with _lock:
        things = list(_watched)
    errors = [thing.hear() for thing in things]  # all of them: each ends what would wait
    return next((error for error in errors if error is not None), None)


def _run():
    global _thread
    while True:
        time.sleep(LOOK_SECONDS)
        with _lock:
            things = list(_watched)
            if not things:
                _thread = None
                return
        while things:
            things.pop().look()


def _forget():
    """A forked child has no threads, and nothing to look after."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _watched.clear()


os.register_at_fork(after_in_child=_forget)
