"""In which order a model's buckets are sent, so that the next forward pass finds first what it needs first.

Buckets get ready from the last layer to the first; the next forward pass needs them the other way round. Sent as they
get ready, the first layer's comes last, and the forward pass waits for all. So once the link has more than it can
carry during the backward pass, later layers' buckets are held back until the first layers' have left.

All ranks must submit in the same order, so it is fixed: rank 0 works it out (schedule.py) from when its buckets got
ready, how fast all-reduces go, alone and several at once, and when the forward pass asked for them; the others take it
over. Until then, and when DDP has made other buckets, they go as they come.
"""

import dataclasses

import torch
import torch.distributed as dist

from paceline._torch import schedule

#: Passes over the same buckets after which the order is worked out: soon, once more when all is warm, ...
_LEARN_AFTER = (3, 24)
#: ... and whenever so many more are over: links and their other users change. It takes some tenths of a second.
_LEARN_EVERY = 1000


class BucketOrder:
    """One model's. carrier: sends, tells the time, and reaches the other ranks.

    step: the schedule.Step that the order was worked out from, whose entries are the buckets; None before. learns: may
    be set to False, on all ranks, before the first pass; buckets then go as they come.
    """

    def __init__(self, carrier):
        self._carrier = carrier
        self.order = None
        self.step = None
        self.learns = not carrier.has_residuals  # what has few bytes is not worth an order
        self._sizes = {}
        self._passes = 0
        self._begin_pass()

    def begin(self):
        """A backward pass begins; what came before has settled. Collective now and then."""
        if self._seen != self._sizes:
            self._sizes, self._passes, self.order = self._seen, 0, None
        elif self._like is not None:
            if self._watches() and len(self._seen) > 1:
                self.order = self._carrier.of_first_rank(self._work_out(self._carrier.mark()))
            self._passes += 1
        self._begin_pass()

    def _begin_pass(self):
        self._held, self._seen = {}, {}
        self._sent = 0
        self._marks = {}
        self._asked, self._reads = None, []
        self._like = None

    def _watches(self):
        """Whether the order is worked out from this pass."""
        if not self.learns:
            return False
        return self._passes in _LEARN_AFTER or self._passes % _LEARN_EVERY == _LEARN_EVERY - 1

    def ready(self, flight):
        """A bucket is ready to be sent."""
        self._seen[flight.index] = flight.buffer.numel()
        self._held[flight.index] = flight
        self._like = flight.buffer
        if self.order is not None and self._sizes.get(flight.index) != flight.buffer.numel():
            self.order = None  # DDP has made other buckets: the same on all ranks
        if self._watches():
            self._marks[flight.index] = self._carrier.mark()

    def to_send(self, last):
        """The buckets whose turn it is, in their order."""
        turn = []
        if self.order is not None:
            while self._sent < len(self.order) and self.order[self._sent] in self._held:
                turn.append(self._held.pop(self.order[self._sent]))
                self._sent += 1
        if self.order is None or last:
            turn += [self._held.pop(index) for index in sorted(self._held)]
        return turn

    def wanted(self):
        """The forward pass asks for a parameter of a bucket, and waits from now on."""
        if self._watches():
            self._asked = self._carrier.mark()

    def usable(self, flight):
        """The forward pass may go on with it."""
        if self._asked is not None:
            self._reads.append((flight.index, self._asked, self._carrier.mark()))
            self._asked = None

    def report(self):
        """The order in force and the times behind it, in seconds, for benchmarks: plain lists."""
        figures = {} if self.step is None else dataclasses.asdict(self.step)
        return {"order": self.order, **figures}

    def _work_out(self, now):
        """now: a mark at the first gradients after the pass that was watched."""
        indices = sorted(self._seen)
        start = self._marks[indices[0]]
        ready = [self._carrier.seconds(start, self._marks[i]) for i in indices]
        tails = self._tails(now)
        self.step = schedule.measured(
            ready,
            [self._seen[i] for i in indices],
            [tails.get(i, 0.0) for i in indices],
            lambda elements, count: self._carrier.seconds_of(self._like, elements, count),
        )
        return [indices[i] for i in schedule.best_order(self.step)]

    def _tails(self, now):
        """{bucket: seconds of computation from its first use until `now`}, waits left out."""
        tails, left, until = {}, 0.0, now
        for index, asked, usable in reversed(self._reads):
            left += max(self._carrier.seconds(usable, until), 0.0)
            tails[index] = left
            until = asked
        return tails


def of_first_rank(numbers, process_group, device):
    """Rank 0's list of numbers, on all ranks of the group; all lists have one length."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    first = dist.get_global_rank(process_group, 0) if hasattr(dist, "get_global_rank") else 0
    dist.broadcast(mine, first, group=process_group)
    return mine.tolist()
