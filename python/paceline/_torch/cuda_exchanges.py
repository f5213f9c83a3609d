"""All-to-all, sends and receives of CUDA tensors in groups that Paceline carries: torch's own NCCL moves them.

Nothing is reduced on the way and nothing can be compressed, so the path has nothing to add to them. NCCL is made when
the first of them is called, and unlike the way of the collectives nobody is asked: ranks that exchange nothing never
come here.

  all-to-all        one ProcessGroupNCCL over the group's ranks
  send, receive     one of two ranks for each pair that talks, so a batch needs no rank but those it names. A batch's
                    operations between two ranks are one launch, and pairs come in one order on all ranks: nothing waits
                    for what is queued behind it, be there a single hardware queue.
"""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline._torch import aborts
from paceline.errors import InvalidArgumentError, PacelineError
from paceline.errors import TimeoutError as PacelineTimeoutError

_Work = dist.Work if hasattr(dist, "Work") else dist._Work
MESSAGES = ("send", "recv")
NAMES = (*MESSAGES, "alltoall", "all_to_all_single", "alltoall_base", "recv_anysource")
_LOOK_SECONDS = 0.005  # into the store
_NAP_SECONDS = 0.0001
_HEARD_SECONDS = 2.0  # in which every rank has heard of a lost one


class Exchanges:
    """Of one group. make(purpose, ranks): a ProcessGroupNCCL over these ranks of the group, which waits for them;
    check(): raises what ended the job.
    """

    def __init__(self, rank, size, make, check):
        self._rank, self._size = rank, size
        self._make, self._check = make, check
        self._made = {}
        self._making = threading.Lock()  # forward and backward passes come from two threads
        self._waited_for = {}  # stream: event behind the last exchange that it waits for

    def all_to_all(self, call, outputs):
        """call(backend) is an all-to-all of all ranks by the ProcessGroupNCCL that carries them."""
        with self._making:
            if "all" not in self._made:
                self._made["all"] = self._make("all", range(self._size))
        with self._named():
            work = call(self._made["all"])
        whole = WorkOfMany([work], outputs, self)
        if work is None:
            whole.wait()  # its stream is the caller's
        return whole

    @property
    def under_way(self):
        """Whether a stream waits, or has waited since arrive(), for something that has been exchanged."""
        return bool(self._waited_for)

    def arrive(self, check):
        """Blocks the host until streams have what they wait for. check(): raises what ended the job, and NCCL."""
        waited_for = dict(self._waited_for)
        for event in waited_for.values():
            while not event.query():
                check()
                time.sleep(_NAP_SECONDS)
        check()
        for stream, event in waited_for.items():
            if self._waited_for.get(stream) is event:
                del self._waited_for[stream]

    @contextlib.contextmanager
    def _named(self):
        """What NCCL says of a lost rank names none: the error that does comes soon, and takes its place."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + _HEARD_SECONDS
            while not isinstance(error, PacelineError) and time.monotonic() < until:
                self._check()
                time.sleep(_LOOK_SECONDS)
            raise

    def wait(self, works, timeout, tensors):
        """The caller's stream waits for works that move `tensors`."""
        with self._named():
            for work in works:
                work.wait(*timeout)
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            stream = torch.cuda.current_stream(device)
            self._waited_for[device, stream.cuda_stream] = stream.record_event()

    def batch(self, operations):
        """One Work for several sends and receives, each (name, (tensors, rank of the group, tag)).

        As with NCCL tags say nothing: messages between two ranks come in their order.
        """
        by_peer = {}
        for name, (tensors, peer, *_) in operations:
            by_peer.setdefault(self._checked(peer), []).append((name, tensors))
        peers = sorted(by_peer, key=lambda peer: (min(peer, self._rank), max(peer, self._rank)))
        device = operations[0][1][0][0].device
        with self._named():
            pairs = [(self._pair(peer, device), peer) for peer in peers]  # all of them, before anything is on its way
            works = [work for pair, peer in pairs for work in self._with_one(pair, peer, by_peer[peer])]
        return WorkOfMany(works, [tensor for _, (tensors, *_) in operations for tensor in tensors], self)

    def abort(self):
        for backend in list(self._made.values()):
            aborts.abort(backend)

    def close(self, failed=False):
        """An orderly end, in the same order on all ranks; failed: abort() was called, and nobody is waited for."""
        made, self._made = self._made, {}
        self._waited_for.clear()
        for _, backend in sorted(made.items()):
            if hasattr(backend, "shutdown") and not failed:
                backend.shutdown()

    def _checked(self, peer):
        if not 0 <= peer < self._size:
            raise InvalidArgumentError(f"there is no rank {peer} in a group of {self._size}")
        if peer == self._rank:
            raise InvalidArgumentError(f"rank {peer} of the group can't send CUDA tensors to itself; copy them")
        return peer

    def _pair(self, peer, device):
        """Made with a message both ways in one launch: NCCL connects what a launch uses, and takes for granted that the
        other rank's launch mirrors it. What comes later need not.
        """
        low, high = sorted((peer, self._rank))
        name = f"{low:06}-{high:06}"
        with self._making:
            if name not in self._made:
                pair = self._make(name, (low, high))
                other = int(self._rank == low)
                first = torch.zeros(2, 1, device=device)
                works = _launch(pair, other, [("send", [first[0]]), ("recv", [first[1]])])
                for work in works:
                    work.wait()
                self._made[name] = pair
            return self._made[name]

    def _with_one(self, pair, peer, operations):
        other = int(self._rank < peer)
        # Where there are no batches, who has the lower rank sends first.
        return _launch(pair, other, sorted(operations, key=lambda one: (one[0] == "send") == (other == 0)))


def _launch(pair, other, operations):
    """Works of sends and receives between two ranks: one, as they are one launch; before torch 2 each is its own."""
    works = []
    if not hasattr(pair, "_start_coalescing"):
        return [getattr(pair, name)(tensors, other, 0) for name, tensors in operations]
    pair._start_coalescing()
    try:
        for name, tensors in operations:
            works.append(getattr(pair, name)(tensors, other, 0))
    except BaseException:
        with contextlib.suppress(RuntimeError):
            pair._end_coalescing()  # left open, it would swallow all that this thread hands to NCCL from now on
        raise
    return [pair._end_coalescing()]


def meet(store, mine, all_here, seconds, check):
    """Waits in the store for those who make something together, as NCCL would, but not for ever.

    mine, all_here: keys, the latter by name of their ranks; check(): raises what ended the job. Raises
    paceline.TimeoutError that names who has not come.
    """
    store.set(mine, "1")
    until = time.monotonic() + seconds if seconds > 0 else float("inf")
    missing = dict(all_here)
    while missing:
        missing = {name: key for name, key in missing.items() if not store.check([key])}
        check()
        if missing and time.monotonic() > until:
            raise PacelineTimeoutError(
                f"send(), recv() or all-to-all of CUDA tensors: {', '.join(missing)} did not come within {seconds:g} s"
            )
        if missing:
            time.sleep(_LOOK_SECONDS)


class WorkOfMany(_Work):
    """Done when all of `works` are. tensors: what they send and receive; exchanges: whose they are, if one's."""

    def __init__(self, works, tensors=(), exchanges=None):
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._tensors = list(tensors)
        self._exchanges = exchanges

    def wait(self, *timeout):
        if self._exchanges is not None:
            self._exchanges.wait(self._works, timeout, self._tensors)
        else:
            for work in self._works:
                work.wait(*timeout)
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def is_success(self):
        return all(work.is_success() for work in self._works)

    def exception(self):
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def result(self):
        return self._tensors

    def get_future(self):
        """Of the tensors; the caller's stream waits for them already. NCCL's own for a batch holds none."""
        self.wait()
        devices = {tensor.device for tensor in self._tensors if tensor.device.type == "cuda"}
        future = Future(devices=list(devices)) if devices else Future()
        future.set_result(self._tensors)
        return future

    getFuture = get_future

    def _source_rank(self):
        return -1
