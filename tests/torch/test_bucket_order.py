"""The order in which buckets are sent, worked out without a network."""

from hypothesis import given
from hypothesis import strategies as st

from paceline._torch.bucket_order import best_order


def seconds_and_places(count):
    return st.tuples(
        st.lists(st.floats(0, 10), min_size=count, max_size=count).map(sorted),
        st.lists(st.floats(0.01, 5), min_size=count, max_size=count),
        st.permutations(range(count)),
    )


@given(st.integers(1, 12).flatmap(seconds_and_places))
def test_the_link_never_idles_and_serves_what_is_wanted_first(drawn):
    ready, seconds, wanted = drawn
    order = best_order(ready, seconds, wanted)
    assert sorted(order) == list(range(len(ready)))
    now, left = 0.0, set(order)
    for chosen in order:
        now = max(now, min(ready[i] for i in left))
        assert ready[chosen] <= now, "it idles"
        assert all(wanted[chosen] <= wanted[i] for i in left if ready[i] <= now)
        left.remove(chosen)
        now += seconds[chosen]


def test_buckets_of_a_slow_link_are_held_back():
    """Ready a second apart, three seconds each, wanted the other way round: what was worked out by hand."""
    assert best_order(range(7), [3.0] * 7, range(7, 0, -1)) == [0, 3, 6, 5, 4, 2, 1]
    assert best_order(range(4), [0.5] * 4, range(4, 0, -1)) == [0, 1, 2, 3]
