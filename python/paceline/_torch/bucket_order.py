"""In which order a model's buckets are sent, so that the next forward pass finds first what it needs first.

Buckets get ready from the last layer to the first; the next forward pass needs them the other way round. Sent as they
get ready, the first layer's comes last, and the forward pass waits for all. So once the link has more than it can
carry during the backward pass, later layers' buckets are held back until the first layers' have left.

What is ordered are buckets or, of the large ones, parts (carriers.py): what is sent can't be overtaken, and a layer
with most of a model's parameters would keep the others' from the link.

All ranks must submit in the same order, so it is fixed: rank 0 works it out (schedule.py) from when its buckets got
ready, how fast all-reduces go, alone and several at once, and when the forward pass asked for them; the others take it
over. What was worked out is then tried against others, for no model knows what else uses links and processors. Until
then, and when DDP has made other buckets, they go as they come.
"""

import dataclasses
import statistics

import torch
import torch.distributed as dist

from paceline._torch import schedule

#: Passes over the same buckets after which the order is worked out: soon, once more when all is warm, ...
_LEARN_AFTER = (3, 8, 100)
#: ... and whenever so many more are over: links and their other users change. It takes some tenths of a second.
_LEARN_EVERY = 1000
#: Passes that each order is tried for, in turn, after all but the first time.
_TRIED = 5
#: What another order must save, of a step, to take the place of the one worked out.
_WORTH = 0.01


class BucketOrder:
    """One model's. carrier: sends, tells times, and reaches the other ranks.

    order: [(bucket, part)], or None: as they come. step: the schedule.Step that it was worked out from, whose entries
    are all (bucket, part), sorted; None before. learns: may be set to False, on all ranks, before the first pass;
    buckets then go as they come.
    """

    def __init__(self, carrier):
        self._carrier = carrier
        self.order = None
        self.step = None
        self.learns = not carrier.few_bytes
        self._sizes = {}
        self._passes = 0
        self._trial = None
        self._tried = []
        self._begin_pass()

    def begin(self):
        """A backward pass begins; what came before has settled. Collective now and then."""
        if self._seen != self._sizes:
            self._sizes, self._passes, self.order, self._trial = self._seen, 0, None, None
        elif self._like is not None:
            if self._trial is not None:
                self._try_on()
            if self._watches() and len(self._seen) > 1:
                self._learn()
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
        for part, (_, elements) in enumerate(flight.parts):
            key = flight.index, part
            self._seen[key] = elements
            self._held[key] = flight
            if self._sizes.get(key) != elements:
                self.order = None  # DDP has made other buckets: the same on all ranks
        self._like = flight.buffer
        if self._watches():
            self._marks[flight.index] = self._carrier.mark()

    def to_send(self, last):
        """[(flight, part)] whose turn it is, in their order. last: no bucket of this pass comes any more."""
        turn = []
        if self.order is not None:
            while self._sent < len(self.order) and self.order[self._sent] in self._held:
                turn.append(self.order[self._sent])
                self._sent += 1
        if self.order is None or last:
            turn += sorted(self._held.keys() - set(turn))
        return [(self._held.pop(key), key[1]) for key in turn]

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
        """The order in force, those tried, and the times behind them, in seconds, for benchmarks: plain lists."""
        figures = {} if self.step is None else dataclasses.asdict(self.step)
        return {"order": self.order, "tried": self._tried, **figures}

    def _learn(self):
        first = self._passes == _LEARN_AFTER[0]
        orders = self._work_out(self._carrier.mark())
        said = self._carrier.of_first_rank([place for order in orders for place in order])
        keys = sorted(self._seen)
        orders = [[keys[place] for place in said[at : at + len(keys)]] for at in range(0, len(said), len(keys))]
        self.order = orders[0]
        if not first:
            different = [order for at, order in enumerate(orders) if order not in orders[:at]]
            self._trial = _Trial(different, self._carrier)

    def _try_on(self):
        self.order = self._trial.next()
        if self.order is None:
            self._tried = self._trial.results()
            (chosen,) = self._carrier.of_first_rank([_fastest(self._tried)])
            self.order, self._trial = self._trial.orders[chosen], None

    def _work_out(self, now):
        """The order that should be best, and others that may be, of places among all (bucket, part), sorted.

        now: a mark at the next pass's first gradients.
        """
        keys = sorted(self._seen)
        start = self._marks[keys[0][0]]
        ready = {bucket: self._carrier.seconds(start, mark) for bucket, mark in self._marks.items()}
        tails = self._tails(now)
        self.step = schedule.measured(
            [ready[bucket] for bucket, _ in keys],
            [self._seen[key] for key in keys],
            [tails.get(bucket, 0.0) for bucket, _ in keys],
            lambda elements, count: self._carrier.seconds_of(self._like, elements, count),
        )
        return schedule.orders_to_try(self.step)

    def _tails(self, now):
        """{bucket: seconds of computation from its first use until `now`}, waits left out."""
        tails, left, until = {}, 0.0, now
        for index, asked, usable in reversed(self._reads):
            left += max(self._carrier.seconds(usable, until), 0.0)
            tails[index] = left
            until = asked
        return tails


class _Trial:
    """Orders in turn, so that what else goes on meets all of them. Made, and asked for the next, as a pass begins.

    From mark to mark, not by the host's clock: a host that runs ahead of its device begins a pass when the last
    gradients have arrived, and what the forward pass still has to do then (all of it where the first layer's came last)
    would be counted with the order that comes next.
    """

    def __init__(self, orders, carrier):
        self.orders = orders
        self._carrier = carrier
        self._marks = [carrier.mark()]

    def next(self):
        """The order of the pass that begins; None: all have been tried."""
        passes = len(self._marks)
        self._marks.append(self._carrier.mark())
        return None if passes == _TRIED * len(self.orders) else self.orders[passes % len(self.orders)]

    def results(self):
        """[(order, median seconds)], once all have been tried."""
        seconds = list(map(self._carrier.seconds, self._marks, self._marks[1:]))
        return [(order, statistics.median(seconds[at :: len(self.orders)])) for at, order in enumerate(self.orders)]


def _fastest(tried):
    """Its place: the first, the one worked out, unless another saves something worth mentioning."""
    medians = [seconds for _, seconds in tried]
    fastest = min(range(len(medians)), key=medians.__getitem__)
    return fastest if medians[fastest] < (1 - _WORTH) * medians[0] else 0


def of_first_rank(numbers, process_group, device):
    """Rank 0's list of numbers, on all ranks of the group; all lists have one length."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    first = dist.get_global_rank(process_group, 0) if hasattr(dist, "get_global_rank") else 0
    dist.broadcast(mine, first, group=process_group)
    return mine.tolist()
