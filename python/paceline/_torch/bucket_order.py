"""In which order a model's buckets are sent, so that the next forward pass finds first what it needs first.

Buckets get ready from the last layer to the first; the next forward pass needs them the other way round. Sent as they
get ready, the first layer's comes last, and the forward pass waits for all. So once the link has more than it can
carry during the backward pass, later layers' buckets are held back until the first layers' have left.

All ranks must submit in the same order, so it is fixed: rank 0 works it out from when its buckets got ready, how long
an all-reduce takes, and in which order the forward pass asked for them; the others take it over. Until then, and when
DDP has made other buckets, they go as they come.
"""

import torch
import torch.distributed as dist

#: Passes over the same buckets after which the order is worked out: soon, and once more when all is warm.
_LEARN_AFTER = (3, 24)


def best_order(ready, seconds, wanted):
    """The order in which a link that carries one bucket at a time, and never idles, sends them.

    ready: when each bucket gets ready; seconds: how long it occupies the link; wanted: its place in the forward pass.
    Of those that are ready the one that is wanted first goes. Returns the buckets' indices.
    """
    left = set(range(len(ready)))
    order, now = [], 0.0
    while left:
        there = [i for i in left if ready[i] <= now]
        if not there:
            now = min(ready[i] for i in left)
            continue
        chosen = min(there, key=lambda i: (wanted[i], i))
        order.append(chosen)
        left.remove(chosen)
        now += seconds[chosen]
    return order


class BucketOrder:
    """One model's. carrier: sends, tells the time, and reaches the other ranks."""

    def __init__(self, carrier):
        self._carrier = carrier
        self.order = None
        self._sizes = {}
        self._passes = 0
        self._begin_pass()

    def begin(self):
        """A backward pass begins; what came before has settled. Collective now and then."""
        if self._seen != self._sizes:
            self._sizes, self._passes, self.order = self._seen, 0, None
        elif self._largest is not None:
            if self._passes in _LEARN_AFTER and len(self._seen) > 1 and not self._carrier.has_residuals:
                self.order = self._carrier.of_first_rank(self._work_out(self._largest))
            self._passes += 1
        self._begin_pass()

    def _begin_pass(self):
        self._held, self._seen = {}, {}
        self._sent = 0
        self._marks = {}
        self._wanted = {}
        self._largest = None

    def ready(self, flight):
        """A bucket is ready to be sent."""
        self._seen[flight.index] = flight.buffer.numel()
        self._held[flight.index] = flight
        if self._largest is None or flight.buffer.numel() > self._largest.numel():
            self._largest = flight.buffer
        if self.order is not None and self._sizes.get(flight.index) != flight.buffer.numel():
            self.order = None  # DDP has made other buckets: the same on all ranks
        if self._passes in _LEARN_AFTER:
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

    def wanted(self, flight):
        """The forward pass has asked for a parameter of the bucket."""
        self._wanted.setdefault(flight.index, len(self._wanted))

    def _work_out(self, largest):
        indices = sorted(self._seen)
        rate = self._carrier.elements_per_second(largest)
        start = self._marks[indices[0]]
        ready = [self._carrier.seconds(start, self._marks[i]) for i in indices]
        seconds = [self._seen[i] / rate for i in indices]
        wanted = [self._wanted.get(i, len(indices)) for i in indices]
        return [indices[i] for i in best_order(ready, seconds, wanted)]


def of_first_rank(numbers, process_group, device):
    """Rank 0's list of numbers, on all ranks of the group; all lists have one length."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    first = dist.get_global_rank(process_group, 0) if hasattr(dist, "get_global_rank") else 0
    dist.broadcast(mine, first, group=process_group)
    return mine.tolist()
