"""The order in which a link should carry buckets, from when they get ready and what of the step is left after each.

One machine (the link), jobs with a time at which they get ready, a length, and a tail: what is left of the step once
the job is there, 1 | r_i, q_i | C_max. Its schedules by Jackson's rule (of those that are ready the one with the
longest tail goes), and what J. Carlier made of them (The one-machine sequencing problem, European Journal of
Operational Research 11, 1982): what stands in the way of a more urgent bucket that gets ready just after it goes behind
it.

All ranks send in one order that is fixed beforehand, so a bucket that comes later than thought stops all behind it.
Orders are therefore compared on links that are somewhat faster and slower than the one measured.
"""

import dataclasses
import heapq
import itertools

#: Under which an order has to do well: seconds of a bucket on the link, over those measured; how much longer the
#: backward pass takes; how much later besides buckets are on the link, in mean lengths of one (where the network's own
#: work shares processors with what computes, a bucket that is alone on its way does not fill the link).
_CONDITIONS = ((1.0, 1.0, 0.0), (0.85, 1.0, 0.5), (1.0, 1.4, 0.5), (1.2, 1.0, 0.0), (1.4, 1.0, 0.0))
#: How much the mean of the buckets counts beside the one that comes last: of orders that are alike the one with room.
_EVEN = 0.02
#: What is tried: to take the link for slower than measured and the backward pass for longer, ...
_SLOWER = ((1.0, 1.0), (1.0, 1.4), (1.2, 1.0), (1.5, 1.0))
#: ... buckets for ready so much later, in mean lengths of a bucket, ...
_LATER = (0.0, 0.3, 1.0, 2.0)
#: ... and so many times to put a bucket behind more urgent ones.
_PUT_OFF = 12


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's times in seconds, a bucket an entry, in any order of buckets.

    ready: when the gradients are there. length: on the link. tail: from when the forward pass has got the bucket until
    the next step's first gradients, without further waits. ahead, behind: on its way to the link, and from there into
    the parameters; other buckets may be on the link meanwhile.
    """

    ready: list
    length: list
    tail: list
    ahead: list
    behind: list

    def ends(self, order):
        """When the step is over, as far as each bucket decides, where they are handed over in this order."""
        handed = free = 0.0
        for i in order:
            handed = max(handed, self.ready[i])
            free = max(free, handed + self.ahead[i]) + self.length[i]
            yield free + self.behind[i] + self.tail[i]

    def seconds(self, order):
        """From 0 until the next step's first gradients."""
        return max(self.ends(order))

    def under_conditions(self):
        """The steps that may come in this one's place."""
        mean = sum(self.length) / len(self.length)
        for slower, longer, later in _CONDITIONS:
            yield dataclasses.replace(
                self,
                ready=[longer * ready for ready in self.ready],
                length=[slower * length for length in self.length],
                ahead=[later * mean + ahead for ahead in self.ahead],
            )


def best_order(step):
    """The order of a step's buckets (indices of its lists) with which it is over first."""
    count = len(step.ready)
    found = [sorted(range(count), key=lambda i: (step.ready[i], i))]
    mean = sum(step.length) / max(count, 1)
    for (slower, longer), later in itertools.product(_SLOWER, _LATER):
        thought = dataclasses.replace(step, length=[slower * length for length in step.length])
        heads = [longer * ready + ahead + later * mean for ready, ahead in zip(step.ready, step.ahead)]
        for _ in range(_PUT_OFF):
            order = by_jackson(heads, thought.length, step.tail)
            found.append(order)
            if not _put_off(order, heads, thought):
                break
    conditions = list(step.under_conditions())
    return min(found, key=lambda order: cost(order, conditions))


def orders_to_try(step):
    """The best by this model first, then one for gradients that come twice as late, and the one of readiness."""
    mean = sum(step.length) / len(step.length)
    late = [2 * ready + ahead + mean for ready, ahead in zip(step.ready, step.ahead)]
    came = sorted(range(len(step.ready)), key=lambda i: (step.ready[i], i))
    return [best_order(step), by_jackson(late, step.length, step.tail), came]


def cost(order, steps):
    """What orders are compared by: seconds of these steps."""
    total = 0.0
    for step in steps:
        ends = list(step.ends(order))
        total += max(ends) + _EVEN * sum(ends) / len(ends)
    return total


def by_jackson(heads, length, tail):
    """The link never idles while something is ready, and carries what has the longest tail first."""
    coming = sorted(range(len(heads)), key=lambda i: (heads[i], i), reverse=True)
    there, order, now = [], [], 0.0
    while coming or there:
        if not there:
            now = max(now, heads[coming[-1]])
        while coming and heads[coming[-1]] <= now:
            i = coming.pop()
            heapq.heappush(there, (-tail[i], i))
        order.append(heapq.heappop(there)[1])
        now += length[order[-1]]
    return order


def _put_off(order, heads, step):
    """Raises the head of the last bucket in the way of the one that ends last; False: none is."""
    now, begins = 0.0, 0  # of the stretch without an idle moment
    critical, latest = (0, 0), -1.0
    for at, i in enumerate(order):
        if heads[i] > now:
            now, begins = heads[i], at
        now += step.length[i]
        if now + step.behind[i] + step.tail[i] > latest:
            critical, latest = (begins, at), now + step.behind[i] + step.tail[i]
    first, last = critical
    for at in range(last - 1, first - 1, -1):
        if step.tail[order[at]] < step.tail[order[last]]:
            behind = order[at + 1 : last + 1]
            heads[order[at]] = min(heads[i] for i in behind) + sum(step.length[i] for i in behind)
            return True
    return False


def least_seconds(step):
    """What no order beats: Jackson's rule, where a bucket can be stopped for another and nothing else takes time."""
    left = list(step.length)
    now, end = 0.0, 0.0
    pending = set(range(len(left)))
    while pending:
        there = [i for i in pending if step.ready[i] <= now]
        coming = [step.ready[i] for i in pending if step.ready[i] > now]
        if not there:
            now = min(coming)
            continue
        chosen = min(there, key=lambda i: (-step.tail[i], i))
        span = min(left[chosen], min(coming) - now) if coming else left[chosen]
        now += span
        left[chosen] -= span
        if left[chosen] <= 1e-15:
            pending.remove(chosen)
            end = max(end, now + step.tail[chosen])
    return end


#: All-reduces handed over at once to see what the link carries when it does not stand still.
_BURST = 4


def measured(ready, elements, tail, seconds_of):
    """A Step from measurements.

    seconds_of(elements, count): of `count` all-reduces of so many elements, handed over at once, until the last has
    arrived. What one takes beside its share of a full link is how long it is on its way before and after; that grows
    evenly with the size.
    """
    usual = max(sum(elements) // len(elements), 1)
    large = min(max(elements), _BURST * usual)  # no more memory than for the others
    one, burst = seconds_of(usual, 1), seconds_of(usual, _BURST)
    length = min((burst - one) / (_BURST - 1), one)
    if length <= 0:  # noise
        length = burst / _BURST
    each = length / usual
    beside = max(one - length, 0.0)
    growing = 0.0
    if large > usual:
        growing = max(seconds_of(large, 1) - large * each - beside, 0.0) / (large - usual)
    fixed = max(beside - growing * usual, 0.0)
    half = [(fixed + growing * n) / 2 for n in elements]
    return Step(list(ready), [n * each for n in elements], list(tail), half, half)
