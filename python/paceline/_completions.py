"""Calls back when operations have ended: the completion threads of a communicator.

One thread serves: it blocks in paceline_wait_any and calls back, one operation after the other. A callback may wait
for an operation itself (PowerSGD's hook does, in a then() of a future), and nobody would serve that one meanwhile. So
another thread takes its place when a callback has an operation watched, or lasts; it then ends with its callback.
"""

import collections
import ctypes
import threading
import weakref

from paceline import _library

_BATCH = 64
_SECONDS = 0.5


class Completions:
    """Of one communicator, which may be collected while its threads run."""

    def __init__(self, communicator):
        self._communicator = weakref.ref(communicator)
        self._lock = threading.RLock()  # a garbage collection within may drop a Work, which is watched then
        self._watched = {}
        self._arrived = collections.deque()  # (operation, callback, keep, error, finite), still to be called
        self._calls = {}  # by thread: the operation whose callback it is in
        self._threads = []
        self._server = self._relief = None
        self._closer = None
        self._ended = threading.Event()

    def expect(self, op, callback, keep):
        """callback(error or None, finite) once `op`, which is watched next, has ended; `keep` lives until then."""
        with self._lock:
            self._watched[op] = (callback, keep)
            if self._relief is None:
                self._relief = threading.Thread(target=self._relieve, daemon=True, name="paceline-relief")
                self._relief.start()
            if self._server is None or self._server is threading.current_thread():
                self._take_over()

    def forget(self, op):
        """No callback for `op` any more; returns (callback, keep)."""
        with self._lock:
            return self._watched.pop(op, (None, None))

    def close(self, wake):
        """Waits until no other thread serves or calls back any more; wake() ends their wait. Some may be left()."""
        self._closer = threading.current_thread()
        if self._others():
            wake()
        while others := self._others():
            others[0].join()
        self._ended.set()
        if self._relief is not None:
            self._relief.join()

    def left(self):
        """Takes the callbacks of what has not ended."""
        with self._lock:
            left, self._watched = [callback for callback, _ in self._watched.values()], {}
        return left

    def _others(self):
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return [thread for thread in self._threads if thread is not threading.current_thread()]

    def _take_over(self):
        before = self._server
        self._server = threading.Thread(target=self._serve, daemon=True, name="paceline-completions")
        try:
            self._server.start()
        except RuntimeError:  # no threads any more
            self._server = before
            raise
        self._threads.append(self._server)

    def _serve(self):
        results = (_library.Result * _BATCH)()
        for result in results:
            result.struct_size = ctypes.sizeof(_library.Result)
        me = threading.current_thread()
        while self._server is me:
            if self._arrived:
                self._call_next(me)
            elif not self._wait(results):
                return

    def _wait(self, results):
        """False once there is nothing more to wait for."""
        communicator = self._communicator()
        if communicator is None or (self._closer is not None and set(self._calls) <= {self._closer}):
            return False
        library, handle = communicator._library, communicator._handle
        count = library.paceline_wait_any(handle, _SECONDS, results, _BATCH)
        for result in results[: max(count, 0)]:
            callback, keep = self.forget(result.op)
            if callback is not None:
                error = None
                if result.code:
                    error = communicator._failure(result.code, communicator._sentence(handle, result.op))
                self._arrived.append((result.op, callback, keep, error, bool(result.finite)))
        return count >= 0

    def _call_next(self, me):
        try:
            op, callback, _keep, error, finite = self._arrived.popleft()
        except IndexError:  # the thread that was replaced meanwhile took it
            return
        self._calls[me] = op
        try:
            callback(error, finite)
        finally:
            del self._calls[me]

    def _relieve(self):
        """A thread of its own: looks for callbacks that last."""
        seen = None
        while not self._ended.wait(_SECONDS) and self._communicator() is not None:
            with self._lock:
                under_way = self._calls.get(self._server)
                if under_way is not None and under_way == seen:
                    self._take_over()
            seen = under_way
