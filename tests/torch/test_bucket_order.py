"""The order in which buckets are sent, worked out without a network."""

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._torch import schedule
from paceline._torch.bucket_order import BucketOrder


def lists(count, least, most):
    return st.lists(st.floats(least, most), min_size=count, max_size=count)


def steps(most=12):
    """Buckets that get ready one after the other; what is ready last has the longest tail, more or less."""

    def of(count):
        return st.builds(
            schedule.Step,
            lists(count, 0, 10).map(sorted),
            lists(count, 0.01, 5),
            lists(count, 0, 10),
            lists(count, 0, 0.5),
            lists(count, 0, 0.5),
        )

    return st.integers(1, most).flatmap(of)


@given(steps())
def test_jackson_never_idles_and_serves_the_longest_tail_first(step):
    order = schedule.by_jackson(step.ready, step.length, step.tail)
    assert sorted(order) == list(range(len(step.ready)))
    now, left = 0.0, set(order)
    for chosen in order:
        now = max(now, min(step.ready[i] for i in left))
        assert step.ready[chosen] <= now, "it idles"
        assert all(step.tail[chosen] >= step.tail[i] for i in left if step.ready[i] <= now)
        left.remove(chosen)
        now += step.length[chosen]


def test_jackson_by_hand():
    """Ready a second apart, three seconds each, wanted the other way round."""
    assert schedule.by_jackson(range(7), [3.0] * 7, range(7)) == [0, 3, 6, 5, 4, 2, 1]
    assert schedule.by_jackson(range(4), [0.5] * 4, range(4)) == [0, 1, 2, 3]


def seconds_by_hand(step, order):
    """A link and what comes before and behind it, an event at a time."""
    sent, free = {}, 0.0
    for place, i in enumerate(order):
        handed_over = max(step.ready[j] for j in order[: place + 1])
        begins = max(free, handed_over + step.ahead[i])
        sent[i] = free = begins + step.length[i]
    return max(sent[i] + step.behind[i] + step.tail[i] for i in order)


@given(steps(), st.randoms())
def test_a_step_in_any_order(step, source):
    order = list(range(len(step.ready)))
    source.shuffle(order)
    assert step.seconds(order) == pytest.approx(seconds_by_hand(step, order))


@settings(max_examples=30, deadline=None)
@given(steps(5))
def test_the_best_order_against_all_of_them(step):
    count, conditions = len(step.ready), list(step.under_conditions())
    order = schedule.best_order(step)
    assert sorted(order) == list(range(count))
    came = schedule.cost(sorted(range(count), key=lambda i: step.ready[i]), conditions)
    best = min(schedule.cost(other, conditions) for other in itertools.permutations(range(count)))
    assert best <= schedule.cost(order, conditions) <= came
    assert schedule.least_seconds(step) <= step.seconds(order) + 1e-9
    # Jackson's rule alone is within one bucket of the best.
    most = 2 * max(step.length) + max(map(sum, zip(step.ahead, step.behind)))
    assert schedule.cost(order, conditions) <= best + len(conditions) * most


def test_a_long_bucket_does_not_stand_in_the_way_of_the_one_that_is_wanted_first():
    """It is ready just before; the link rather waits."""
    step = schedule.Step([0.0, 1.0], [5.0, 1.0], [0.0, 10.0], [0.0] * 2, [0.0] * 2)
    assert schedule.by_jackson(step.ready, step.length, step.tail) == [0, 1]
    assert schedule.best_order(step) == [1, 0] and step.seconds([1, 0]) == 12.0


def test_a_link_that_is_short_of_time_does_not_wait():
    """What is left behind the last bucket is small, so that an idle moment would be lost."""
    step = schedule.Step([0.0, 1.0], [5.0, 5.0], [0.0, 0.5], [0.0] * 2, [0.0] * 2)
    assert schedule.best_order(step) == [0, 1]


def idle(step, order):
    """For how long the link stands still after its first byte."""
    busy = sum(step.length)
    ends = list(dataclasses.replace(step, tail=[0.0] * len(order), behind=[0.0] * len(order)).ends(order))
    return ends[-1] - busy - step.ready[order[0]] - step.ahead[order[0]]


def test_a_bucket_that_is_only_just_ready_is_not_relied_on():
    """Eleven buckets on a link that takes five times as long as they need to get ready."""
    count = 11
    ready, tail = [6.6 * i for i in range(count)], [5 + 4.0 * i for i in range(count)]
    nothing = [0.0] * count
    step = schedule.Step(ready, [35.0] * (count - 1) + [2.0], tail, nothing, nothing)
    fresh, order = schedule.by_jackson(ready, step.length, tail), schedule.best_order(step)
    slow = dataclasses.replace(step, ready=[1.4 * one for one in ready])
    assert idle(step, order) == pytest.approx(0) and idle(slow, order) == pytest.approx(0)
    assert idle(slow, fresh) > 10
    assert order[0] == 0 and order[order.index(count - 1) :] == sorted(order[order.index(count - 1) :], reverse=True)


@given(st.floats(1e-9, 1e-6), st.floats(0, 1e-2), st.floats(0, 1e-8), st.lists(st.integers(1, 10**7), min_size=2))
def test_measurements_of_a_path_give_its_figures(each, fixed, growing, elements):
    """A path whose buckets are on the link for each × elements and on their way for fixed + growing × elements."""

    def seconds_of(size, count):
        return count * each * size + fixed + growing * size

    step = schedule.measured([0.0] * len(elements), elements, [0.0] * len(elements), seconds_of)
    assert step.length == pytest.approx([each * n for n in elements], rel=1e-6, abs=1e-12)
    if max(elements) > sum(elements) // len(elements):
        beside = [fixed + growing * n for n in elements]
        assert [a + b for a, b in zip(step.ahead, step.behind)] == pytest.approx(beside, rel=1e-3, abs=1e-7)


@given(st.lists(st.floats(1e-6, 1), min_size=6, max_size=6))
def test_measurements_that_contradict_each_other_give_no_negative_times(noise):
    values = iter(noise)
    step = schedule.measured([0.0, 1.0, 2.0], [10, 1000, 5], [3.0, 2.0, 1.0], lambda elements, count: next(values))
    assert min(step.length) > 0 and min(step.ahead) >= 0 and min(step.behind) >= 0
    assert sorted(schedule.best_order(step)) == [0, 1, 2]


class Carrier:
    """Marks are seconds of a clock that the test sets; a link of 100 elements a second."""

    few_bytes = False

    def __init__(self):
        self.now = 0.0
        self.measured = 0

    def mark(self):
        return SimpleNamespace(at=self.now)  # as a device's event: only seconds() tells what it means

    def seconds(self, start, end):
        return end.at - start.at

    def seconds_of(self, _like, elements, count):
        self.measured += 1
        return elements * count / 100

    def of_first_rank(self, order):
        return order


def whole(order):
    """Of buckets that are sent whole."""
    return [(bucket, 0) for bucket in order]


def one_pass(order, carrier, sizes=(300, 300, 300), waits=5.0, slowed=lambda order: 0.0, part=10**9):
    """Ready a second apart; the forward pass takes two seconds a bucket beside its waits. What was sent, and when.

    slowed: seconds more under an order. part: the most elements that are sent at once.
    """
    order.begin()
    carrier.now += slowed(order.order)
    sent = []
    for i, size in enumerate(sizes):
        carrier.now += 1.0
        parts = [(first, min(part, size - first)) for first in range(0, size, part)]
        order.ready(SimpleNamespace(index=i, buffer=torch.empty(size), parts=parts))
        sent += [(carrier.now, (one.index, part_)) for one, part_ in order.to_send(i == len(sizes) - 1)]
    for i in reversed(range(len(sizes))):
        order.wanted()
        carrier.now += waits
        order.usable(SimpleNamespace(index=i))
        carrier.now += 2.0
    return sent


def test_times_are_those_of_the_pass_without_its_waits():
    carrier = Carrier()
    order = BucketOrder(carrier)
    for _ in range(6):
        one_pass(order, carrier, waits=random.random())
    assert order.order is not None and carrier.measured == 2
    step = order.step
    assert step.ready == pytest.approx([0.0, 1.0, 2.0])
    assert step.tail == pytest.approx([2.0, 4.0, 6.0])
    assert step.length == pytest.approx([3.0] * 3) and step.ahead == pytest.approx([0.0] * 3)


def test_other_buckets_go_as_they_come_until_they_are_known():
    carrier = Carrier()
    order = BucketOrder(carrier)
    for _ in range(6):
        one_pass(order, carrier)
    assert [i for _, i in one_pass(order, carrier)] == order.order
    assert order.order != whole([0, 1, 2])
    assert [i for _, i in one_pass(order, carrier, (100, 500))] == whole([0, 1]) and order.order is None
    for _ in range(5):
        one_pass(order, carrier, (100, 500))
    assert sorted(order.order) == whole([0, 1])


def test_parts_of_a_large_bucket_let_what_is_wanted_first_go_between():
    """The first bucket has most elements and is wanted last: whole it would keep the link from the others for long."""
    orders, seconds = {}, {}
    for part in (4000, 500):
        carrier = Carrier()
        order = BucketOrder(carrier)
        for _ in range(6):
            one_pass(order, carrier, (4000, 100, 100), part=part)
        sent = one_pass(order, carrier, (4000, 100, 100), part=part)
        assert [key for _, key in sent] == order.order
        orders[part] = order.order
        seconds[part] = order.step.seconds([sorted(order.order).index(key) for key in order.order])
    assert sorted(orders[500]) == [(0, i) for i in range(8)] + [(1, 0), (2, 0)]
    places = [orders[500].index(key) for key in ((1, 0), (2, 0))]
    assert min(places) > 0 and max(places) < 9, "after what there is to send before, ahead of the rest"
    assert seconds[500] < seconds[4000]


def test_buckets_that_are_cut_otherwise_are_others():
    carrier = Carrier()
    order = BucketOrder(carrier)
    for _ in range(6):
        one_pass(order, carrier)
    assert order.order is not None
    assert len(one_pass(order, carrier, part=200)) == 6 and order.order is None


def test_the_order_is_worked_out_anew_now_and_then():
    carrier = Carrier()
    order = BucketOrder(carrier)
    for _ in range(1100):
        one_pass(order, carrier, (30, 30))
    assert carrier.measured == 2 * 4


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_of_the_orders_tried_the_fastest_stays(fastest, monkeypatch):
    places = [[0, 2, 1], [2, 1, 0], [0, 1, 2]]
    monkeypatch.setattr(schedule, "orders_to_try", lambda step: places)
    orders = [whole(one) for one in places]
    carrier = Carrier()
    order = BucketOrder(carrier)
    source, seen = random.Random(fastest), []

    def slowed(current):
        seen.append(current)
        rest = 5.0 if source.random() < 0.15 else 0.0  # now and then the machine does something else
        return rest + (0.0 if current == orders[fastest] else 1.0)

    for _ in range(40):
        one_pass(order, carrier, slowed=slowed)
    assert seen[:5] == [None] * 5 and seen[5:10] == [orders[0]] * 5, "as they come, as worked out"
    assert seen[10:25] == orders * 5, "in turn"
    assert order.order == orders[fastest] and seen[-10:] == [orders[fastest]] * 10
    tried = order.report()["tried"]
    assert [one for one, _ in tried] == orders
    assert min(tried, key=lambda one: one[1])[0] == orders[fastest]


def test_an_order_that_saves_nothing_worth_mentioning_does_not_replace_the_one_worked_out(monkeypatch):
    monkeypatch.setattr(schedule, "orders_to_try", lambda step: [[0, 2, 1], [2, 1, 0], [0, 1, 2]])
    carrier = Carrier()
    order = BucketOrder(carrier)
    for _ in range(40):
        one_pass(order, carrier, slowed=lambda current: 0.1 if current == whole([0, 2, 1]) else 0.0)
    assert order.order == whole([0, 2, 1])
