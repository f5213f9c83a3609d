"""Ctrl-C while the main thread waits in TensorFlow, where Python can't run a signal's handler.

What TensorFlow waits for can't be taken back, so the job is ended: the wait ends with it, and KeyboardInterrupt is
raised. Handlers of the script's own, and waits that end within a second anyway, are left alone.
"""

import os
import signal
import threading

_PATIENCE = 1.0


class Interrupts:
    """`with interrupts:` around what may wait. end(): called from another thread, makes the wait end."""

    def __init__(self, end):
        self._end = end
        self._over = threading.Event()
        self._before = None  # where signals were reported until now; None: nothing is waited for
        self._has_ended = False
        self._read = self._write = -1

    def __enter__(self):
        # Only the main thread runs handlers of signals, or may ask for reports of them.
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        if self._write < 0:
            self._open()
        self._over = threading.Event()
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = -1 if before == self._write else before  # an interrupt in this very place has left ours

    def __exit__(self, _kind, error, _trace):
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._before)
        self._before = None
        self._over.set()
        if self._has_ended and error is not None:
            # The handler ran while TensorFlow made its own error, which says neither of the two then.
            raise KeyboardInterrupt from error

    def close(self):
        """From inside, on another thread, it does nothing: signals are reported there."""
        if self._write >= 0 and self._before is None:
            os.close(self._write)
            self._write = -1

    def _open(self):
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._listen, args=(self._read,), name="paceline-interrupts", daemon=True).start()

    def _listen(self, source):
        while reports := os.read(source, 64):
            over, before = self._over, self._before
            if before is not None and before >= 0:
                os.write(before, reports)  # an event loop's, around all this
            if signal.SIGINT in reports and not over.wait(_PATIENCE):
                self._has_ended = True
                self._end()
        os.close(source)
