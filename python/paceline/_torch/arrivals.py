"""Who has come to init_process_group(): torch says that a time is over, and this whom it was spent on.

Every rank leaves a key in the TCPStore that torch makes for the ranks to meet by. Where that, or a backend's first
meeting, ran out of time, the ranks without a key are those that never came. Stores that a script hands over, and
those of other kinds, are not looked at.
"""

import contextlib
import contextvars
import datetime
import functools
import inspect
import os
import re
import sys
import time

import torch.distributed as dist

from paceline._torch.stores import TorchStore
from paceline._torch.work import as_torch_error
from paceline.errors import PacelineError, TimeoutError

#: To ask the store once more; it has been there, or it is not there at all.
_ASK = datetime.timedelta(seconds=5)
#: Of torch's stores', Gloo's and NCCL's errors.
_WORDS = ("timeout", "timed out")
_meeting = contextvars.ContextVar("paceline_meeting", default=None)


class _Meeting:
    """One call of init_process_group().

    torchrun's store outlives its workers, so its count of their restarts is in the keys. Of several calls in one
    process it knows the first alone, and of several starts under more than one agent all of them: who came to one is
    never taken for missing.
    """

    def __init__(self):
        self._count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._began = time.monotonic()
        self._host = self._port = self._rank = self._size = None
        self._has_store = False
        self._held = None

    def begins(self, hostname, port, rank, world_size, timeout, **kind):
        """torch is about to make its store. Rank 0's waits for the others within the call and is gone where they don't
        come: another one on the same server, which waits for nobody, can still be asked then."""
        self._host, self._port, self._rank, self._size = hostname, port, rank, world_size
        if rank == 0 and port and not _is_torchruns():
            kind.update(wait_for_workers=False, multi_tenant=True)
            self._held = dist.TCPStore("127.0.0.1", port, world_size, True, min(timeout, _ASK), **kind)
            self._come(self._held)

    def has(self, store):
        """torch has made it."""
        self._has_store = True
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._come(store)

    def ends(self):
        self._held = None

    def _come(self, store):
        TorchStore(store).put(self._key(self._count, self._rank), b"1")

    @staticmethod
    def _key(count, rank):
        return f"paceline/came/{count}/{rank}"

    def _absent(self):
        """The ranks that have not come, by a connection of its own: what comes late in torch's is no answer to this."""
        store = TorchStore(dist.TCPStore(self._host, self._port, self._size, False, _ASK, wait_for_workers=False))
        counts = [self._count]
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            # Every agent counts the failures of its own workers: who has come may have come under another count.
            counts = range(int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", self._count)) + 1)
        return [
            rank for rank in range(self._size) if all(store.get(self._key(count, rank)) is None for count in counts)
        ]

    def named(self, error):
        """The error that names who is missing; None where that is not what `error` is about, or nobody knows."""
        text = str(error).lower()
        if isinstance(error, PacelineError) or self._host is None or not any(word in text for word in _WORDS):
            return None
        waited = f"for which the others waited {time.monotonic() - self._began:.0f} s"
        if not self._has_store and "trying to connect" in text:
            if self._rank == 0 or _is_torchruns():
                return None  # torch's error has the address
            text = f"rank 0 never came to init_process_group(), {waited}, or it is not at {self._host}:{self._port}, "
            return _like(error, text + "where MASTER_ADDR and MASTER_PORT say: see what it has said")
        try:
            missing = self._absent()
        except Exception:
            return None
        joined = re.search(r"(\d+)/\d+ clients joined", text)
        if not missing or len(missing) >= self._size or (joined and self._size - int(joined[1]) != len(missing)):
            return None
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._size}"
        text = f"{who} never came to init_process_group(), {waited}: see what was said there, or give a longer timeout="
        return _like(error, text)


def _is_torchruns():
    """torchrun serves the store, to all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _like(error, text):
    """A TimeoutError that whoever catches torch's catches too."""
    kind = getattr(dist, "DistError", ())
    return as_torch_error(TimeoutError(text), type(error) if isinstance(error, kind) else None)


def patch():
    """Wraps init_process_group(), under both of its names, and the function by which it makes a TCPStore."""
    module = sys.modules["torch.distributed.rendezvous"]
    original, create = dist.distributed_c10d.init_process_group, module._create_c10d_store
    if getattr(create, "_paceline_patched", False):
        return

    @functools.wraps(create)
    def create_store(*args, **kwargs):  # versions of torch differ in what they take beside the first five
        meeting = _meeting.get()
        if meeting is None:  # for something else, as torch's RPC
            return create(*args, **kwargs)
        with contextlib.suppress(Exception):  # as torch's own will say
            meeting.begins(**inspect.signature(create).bind(*args, **kwargs).arguments)
        store = create(*args, **kwargs)
        with contextlib.suppress(Exception):  # the backend meets by the same store, and has a say of its own
            meeting.has(store)
        return store

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        meeting = _Meeting()
        token = _meeting.set(meeting)
        try:
            return original(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            better = meeting.named(error)
            if better is None:
                raise
            try:
                raise better from error
            finally:
                better = None  # its traceback has this frame
        finally:
            _meeting.reset(token)
            meeting.ends()

    create_store._paceline_patched = True
    module._create_c10d_store = create_store
    for place in (dist.distributed_c10d, dist):
        if place.init_process_group is original:
            place.init_process_group = init_process_group
