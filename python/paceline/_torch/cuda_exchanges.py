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

import torch
import torch.distributed as dist

from paceline._torch import aborts
from paceline.errors import InvalidArgumentError

_Work = dist.Work if hasattr(dist, "Work") else dist._Work
MESSAGES = ("send", "recv")
NAMES = (*MESSAGES, "alltoall", "all_to_all_single", "alltoall_base", "recv_anysource")


class Exchanges:
    """Of one group. make(purpose, rank, size): a ProcessGroupNCCL over some of the group's ranks."""

    def __init__(self, rank, size, make):
        self._rank, self._size = rank, size
        self._make = make
        self._made = {}

    def of_all(self):
        """The ProcessGroupNCCL over all ranks, which carries all-to-alls."""
        return self._backend("all", self._rank, self._size)

    def batch(self, operations):
        """One Work for several sends and receives, each (name, (tensors, rank of the group, tag)).

        As with NCCL tags say nothing: messages between two ranks come in their order.
        """
        by_peer = {}
        for name, (tensors, peer, *_) in operations:
            by_peer.setdefault(self._checked(peer), []).append((name, tensors))
        works = []
        for peer in sorted(by_peer, key=lambda peer: (min(peer, self._rank), max(peer, self._rank))):
            works.append(self._with_one(peer, by_peer[peer]))
        return works[0] if len(works) == 1 else WorkOfMany(works)

    def abort(self):
        for backend in self._made.values():
            aborts.abort(backend)

    def close(self):
        made, self._made = self._made, {}
        for backend in made.values():
            if hasattr(backend, "shutdown"):
                backend.shutdown()

    def _checked(self, peer):
        if not 0 <= peer < self._size:
            raise InvalidArgumentError(f"there is no rank {peer} in a group of {self._size}")
        if peer == self._rank:
            raise InvalidArgumentError(f"rank {peer} of the group can't send CUDA tensors to itself; copy them")
        return peer

    def _with_one(self, peer, operations):
        low, high = sorted((peer, self._rank))
        pair = self._backend(f"{low}-{high}", int(self._rank == high), 2)
        other = int(self._rank == low)
        # Where there are no batches, who has the lower rank sends first.
        operations = sorted(operations, key=lambda one: (one[0] == "send") == (other == 0))
        works, whole = [], []
        with _one_launch(pair, whole):
            for name, tensors in operations:
                works.append(getattr(pair, name)(tensors, other, 0))
        works = whole or works
        return works[0] if len(works) == 1 else WorkOfMany(works)

    def _backend(self, purpose, rank, size):
        if purpose not in self._made:
            self._made[purpose] = self._make(purpose, rank, size)
        return self._made[purpose]


@contextlib.contextmanager
def _one_launch(backend, whole):
    """What is called meanwhile is one launch, whose Work is added to `whole`; before torch 2 each is its own."""
    batches = hasattr(backend, "_start_coalescing")
    if batches:
        backend._start_coalescing()
    yield
    if batches:
        work = backend._end_coalescing()
        if work is not None:
            whole.append(work)


class WorkOfMany(_Work):
    """Done when all of `works` are."""

    def __init__(self, works):
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, *timeout):
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
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self):
        return torch.futures.collect_all([work.get_future() for work in self._works])

    getFuture = get_future

    def _source_rank(self):
        return -1
