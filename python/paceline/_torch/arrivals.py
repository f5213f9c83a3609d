"""Who has come to init_process_group(): torch says that a time is over, and this whom it was spent on.

Every rank leaves a key in the store by which the ranks meet. Where torch's own rendezvous, or a backend's first
meeting, ran out of time, the ranks without one are those that never came.
"""

import contextlib
import datetime
import functools
import itertools
import os
import sys
import time

import torch.distributed as dist

from paceline._torch.stores import TorchStore
from paceline._torch.work import as_torch_error
from paceline.errors import PacelineError, TimeoutError

#: To ask the store once more; it has been there, or it is not there at all.
_ASK_SECONDS = 5.0
#: Of torch's stores', Gloo's and NCCL's errors.
_WORDS = ("timeout", "timed out")
#: What torch's TCPStore takes by position.
_STORE = ("host_name", "port", "world_size", "is_master", "timeout")
_count = itertools.count()
_meeting = None


class Meeting:
    """One call of init_process_group(). The count of those in a process, and torchrun's of its restarts, keep the keys
    of one apart from those of another in a store that lives on."""

    def __init__(self):
        self._prefix = f"paceline/came/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_count)}"
        self._began = time.monotonic()
        self._make = None  # torch's TCPStore, and where it is served
        self._where = {}
        self._store = self._held = self._size = None

    def opens(self, make, *args, **named):
        """torch makes its TCPStore. Rank 0's waits for the others within the call and is gone where they don't come: a
        second one on the same server, which waits for nobody, can still be asked then."""
        given = {**dict(zip(_STORE, args)), **named}
        self._make, self._size = make, given.get("world_size")
        self._where = {name: given[name] for name in ("host_name", "port", "world_size")}
        if not given.get("is_master") or not given.get("multi_tenant") or given["port"] == 0:
            return
        with contextlib.suppress(Exception):  # as torch's own will say
            self._held = make(**{**given, "wait_for_workers": False})
            self._come(self._held, 0)

    def has(self, store, rank, size):
        """The ranks meet in `store`."""
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._store, self._size = store, size
        with contextlib.suppress(Exception):  # the backend meets by the same store, and has a say of its own
            self._come(store, rank)

    def ends(self):
        self._store = self._held = None

    def _come(self, store, rank):
        TorchStore(store).put(f"{self._prefix}/{rank}", b"1")

    def absent(self):
        """The ranks that have not come."""
        asked = self._store
        if self._make is not None:  # a connection of its own: what came too late in the other is no answer to this
            limit = datetime.timedelta(seconds=_ASK_SECONDS)
            asked = self._make(**self._where, is_master=False, timeout=limit, wait_for_workers=False)
        store = TorchStore(asked)
        return [rank for rank in range(self._size) if store.get(f"{self._prefix}/{rank}") is None]

    def named(self, error):
        """The error that names who is missing; None where that is not what `error` is about, or nobody knows."""
        text = str(error).lower()
        if isinstance(error, PacelineError) or not any(word in text for word in _WORDS):
            return None
        waited = f"for which the others waited {time.monotonic() - self._began:.0f} s"
        if "trying to connect" in text:
            if self._make is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return None
            where = "{host_name}:{port}".format(**self._where)
            text = f"rank 0 never came to init_process_group(), {waited}, or it is not at {where}, where MASTER_ADDR "
            return as_torch_error(TimeoutError(text + "and MASTER_PORT say: see what it has said"))
        try:
            missing = self.absent()
        except Exception:
            return None
        if not missing or len(missing) == self._size:
            return None
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._size}"
        text = f"{who} never came to init_process_group(), {waited}: see what "
        if len(missing) == 1:
            return as_torch_error(TimeoutError(text + "it has said, or give a longer timeout= where it needs that"))
        return as_torch_error(TimeoutError(text + "they have said, or give a longer timeout= where they need that"))


def named(error):
    """What an error within init_process_group() is about, where ranks did not come; else None."""
    return _meeting.named(error) if _meeting is not None else None


def patch():
    """Wraps torch's rendezvous: the function that init_process_group() calls, and the store that this makes."""
    module = sys.modules["torch.distributed.rendezvous"]
    original = dist.distributed_c10d.rendezvous
    if getattr(original, "_paceline_patched", False):
        return
    make = module.TCPStore

    @functools.wraps(original)
    def rendezvous(*args, **kwargs):
        global _meeting
        meeting = _meeting = Meeting()
        try:
            for store, rank, size in original(*args, **kwargs):
                meeting.has(store, rank, size)
                yield store, rank, size
        except (RuntimeError, OSError) as error:
            better = meeting.named(error)
            if better is None:
                raise
            raise better from error
        finally:  # with the call of init_process_group()
            meeting.ends()
            if _meeting is meeting:
                _meeting = None

    def opened(*args, **kwargs):
        if _meeting is not None:
            _meeting.opens(make, *args, **kwargs)
        return make(*args, **kwargs)

    rendezvous._paceline_patched = True
    dist.distributed_c10d.rendezvous = rendezvous
    module.TCPStore = opened
