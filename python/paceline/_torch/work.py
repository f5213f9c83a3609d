"""What a collective of the process group hands back: torch's Work over operations of the engine."""

import contextlib
import threading

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline.errors import PacelineError, TimeoutError

_Work = dist.Work if hasattr(dist, "Work") else dist._Work
_named = {}


def as_torch_error(error, base=None):
    """The same error, caught by `except torch.distributed.DistBackendError` as well, where torch has that; `base`:
    another one of torch's types instead."""
    base = base or getattr(dist, "DistBackendError", None)
    if base is None or not isinstance(error, PacelineError) or isinstance(error, base):
        return error
    kind = type(error)
    if (kind, base) not in _named:
        members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": _by_kind}
        _named[kind, base] = type(kind.__name__, (kind, base), members)
    return _named[kind, base](str(error))


def _by_kind(error):
    """How pickle makes such an error again: its class is found under its bases' names."""
    kind, base = type(error).__bases__
    return _as_kind, (kind, base, str(error))


def _as_kind(kind, base, text):
    return as_torch_error(kind(text), base)


class PacelineWork(_Work):
    """One or more operations and what is to be done once they have ended (results copied out).

    wait() waits on the calling thread; only get_future() hands the operations to the completion thread. Dropped
    without either, the operations still finish, and their memory lives until then.
    """

    def __init__(self, communicator, operations, finish=None, keep=None, result=(), forget=None):
        super().__init__()
        self._communicator = communicator
        self._operations = list(operations)
        self._finish = finish
        self._keep = keep
        self._result = list(result)
        self._forget = forget
        self._lock = threading.RLock()  # held for moments only: another thread may ask while one waits
        self._ended = threading.Event()
        self._future = None
        self._raising_future = None
        self._watching = 0
        self._is_waited_for = self._others_wait = False
        self._error = self._failure = None
        self._in_vain = ""  # whom the last wait() waited for when its time was over
        self._inference = torch.is_inference_mode_enabled()
        self._whole = None
        if not self._operations:
            self._end(None)

    def wait(self, timeout=None):
        if self._whole is not None:
            return self._wait_for_whole(timeout)
        seconds = timeout.total_seconds() if timeout is not None else -1.0
        seconds = min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else -1.0
        with self._lock:
            mine = not (self._watching or self._is_waited_for or self._ended.is_set())
            self._is_waited_for = self._is_waited_for or mine
            self._others_wait = self._others_wait or not mine
        if mine:
            self._wait_for_all(seconds)
        elif not self._ended.wait(None if seconds < 0 else seconds):
            raise as_torch_error(dist_timeout(seconds))
        if self._raising_future is not None:  # is_completed() may ask the future; its error is raised below
            with contextlib.suppress(Exception):
                self._raising_future.wait()
        self._release()
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_all(self, seconds):
        try:
            if self._wait_here(seconds):
                self._end(self._failure)
        finally:  # out of time, or a signal's handler raised
            if not self._ended.is_set():
                with self._lock:
                    self._is_waited_for = False
                    if self._future is not None or self._others_wait:
                        self._watch()  # they relied on this wait
        if not self._ended.is_set():
            raise as_torch_error(dist_timeout(seconds, self._in_vain))  # it goes on, and may be waited for again

    def get_future(self):
        if self._whole is not None:
            self._release()
            return self._whole.get_future().then(self._own_result)
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._ended.is_set():
                    self._settle()
                elif not (self._watching or self._is_waited_for):
                    self._watch()
            if self._raising_future is None:
                self._raising_future = _raising(self._future)
        self._release()
        return self._raising_future

    getFuture = get_future

    def is_completed(self):
        ended = self._has_ended()
        if ended:
            self._release()
        return ended

    def _has_ended(self):
        if self._ended.is_set():
            return True
        if self._whole is not None:
            return self._whole.is_completed()
        with self._lock:
            waited_for = self._watching or self._is_waited_for or self._ended.is_set()
            if not waited_for and all(self._communicator.test(op) for op in self._operations):
                self._wait_here(-1.0)
                self._end(self._failure)
        return self._ended.is_set()

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        return self._error if self._whole is None else self._whole.exception()

    def result(self):
        return self._result

    def hand_over(self):
        """The engine's operations, for a Work over several, which waits for them from now on; then follow(it)."""
        if self._watching:
            self.wait()  # the completion thread has them already
        operations, self._operations = ([], []) if self._ended.is_set() else (self._operations, [])
        return operations

    def follow(self, whole):
        """Waiting for this one waits for `whole`, which took its operations."""
        if not self._ended.is_set():
            self._whole = whole

    def finish(self):
        """What is to be done once the operations have ended."""
        self._end(None)
        self._release()

    def synchronize(self):
        self.wait()

    def _source_rank(self):
        return -1

    def _wait_for_whole(self, timeout):
        self._release()
        return self._whole.wait(timeout)

    def _own_result(self, whole_future):
        whole_future.value()  # raises what the whole raised
        return self._result

    def _wait_here(self, seconds):
        """False where an operation has not ended within `seconds`; those that have are no longer in _operations."""
        while self._operations:
            op = self._operations[0]
            try:
                self._communicator.wait(op, seconds)
            except TimeoutError as failure:
                # Its own deadline, or the caller's? One that lives was not released.
                if seconds > 0 and not self._communicator.test(op):
                    self._in_vain = f": {failure}"
                    return False
                self._failure = self._failure or self._late(op, seconds, failure)
            except PacelineError as failure:
                self._failure = self._failure or failure
            del self._operations[0]
        return True

    def _late(self, op, seconds, failure):
        """What an operation ended with that timed out, or ended in that moment: None, or its failure."""
        if seconds < 0:
            return failure
        try:
            self._communicator.wait(op)
        except PacelineError:
            return failure
        return None

    def _watch(self):
        self._watching = left = len(self._operations)  # which it stays: who waits, waits for _ended from now on
        failures = []

        def ended(error, _finite):
            nonlocal left
            if error is not None:
                failures.append(error)
            left -= 1
            if left == 0:
                self._end(failures[0] if failures else None)

        if not left:  # whoever waited was interrupted after the last one
            self._end(self._failure)
        for op in self._operations:
            try:
                self._communicator.watch(op, ended, keep=self)
            except PacelineError as failure:
                ended(failure, True)

    def _end(self, error):
        try:
            if error is None and self._finish is not None:
                with torch.inference_mode() if self._inference else contextlib.nullcontext():
                    self._finish()
        except Exception as failure:
            error = failure
        self._error = as_torch_error(error) if error is not None else None
        self._finish = self._keep = None
        with self._lock:
            self._ended.set()
            future = self._future  # one that comes later finds it ended
        if future is not None:
            self._settle()

    def _settle(self):
        if self._error is not None:
            self._future.set_result(self._error)
        else:
            self._future.set_result(self._result)

    def _release(self):
        forget, self._forget = self._forget, None
        if forget is not None:
            forget(self)

    def __del__(self):
        if not self._ended.is_set() and self._watching == 0 and not self._communicator.closed:
            keep = (self._keep, self._finish, self._result)
            for op in self._operations:
                with contextlib.suppress(RuntimeError):  # no threads any more: the process ends
                    self._communicator.watch(op, _drop, keep=keep)


def dist_timeout(seconds, why=""):
    return TimeoutError(f"the operation has not ended within the {seconds:g} s given to wait(){why}")


def ask_python_works():
    """Newer torch wraps a Python Work into one of its own that passes on wait() and get_future() only: without this,
    is_completed() would be False for ever and a script that polls it would hang.
    """
    if getattr(_Work, "_paceline_asks", False):
        return
    _Work._paceline_asks = True
    is_completed, success = _Work.is_completed, _Work.is_success

    def future_of(work):
        try:
            return work.get_future()
        except RuntimeError:  # other backends' messages have none, and answer for themselves
            return None

    def is_completed_or_future_done(self):
        if is_completed(self):
            return True
        future = future_of(self)
        return future is not None and future.done()

    def is_success(self):
        future = future_of(self)
        if future is None:
            return success(self)
        if not future.done():
            return False
        try:
            future.value()
        except RuntimeError:
            return False
        return True

    _Work.is_completed = is_completed_or_future_done
    _Work.is_success = is_success


def _raising(future):
    """A future that raises what the operation raised, for waiters in Python and in C++ alike."""

    def value_or_raise(done):
        value = done.value()
        if isinstance(value, BaseException):
            raise value
        return value

    return future.then(value_or_raise)


def _drop(_error, _finite):
    """Completion of an operation that nobody waits for."""
