"""The numbers of buckets in a static graph's first pass."""

from types import SimpleNamespace

import torch

from paceline._torch.delayed import DelayedBuckets


class Bucket:
    def __init__(self, elements, index=0, last=False):
        self._elements, self._index, self._last = elements, index, last

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def buffer(self):
        return torch.empty(self._elements)


def places(delayed, buckets):
    return [(b.index(), b.is_last()) for b in map(delayed.numbered, buckets)]


def test_the_first_pass_of_a_static_graph_is_counted():
    delayed = DelayedBuckets(SimpleNamespace(static_graph=True), 12)
    assert places(delayed, [Bucket(5), Bucket(4), Bucket(3)]) == [(0, False), (1, False), (2, True)]
    later = [Bucket(6), Bucket(6, 1, True)]
    assert [delayed.numbered(b) for b in later] == later, "DDP numbers the later ones itself"


def test_one_bucket_is_the_last():
    delayed = DelayedBuckets(SimpleNamespace(static_graph=True), 12)
    only = Bucket(12, 0, True)
    assert places(delayed, [only]) == [(0, True)]
    assert delayed.numbered(only) is only


def test_other_graphs_are_left_alone():
    for ddp in (SimpleNamespace(static_graph=False), SimpleNamespace()):
        bucket = Bucket(5)
        assert DelayedBuckets(ddp, 12).numbered(bucket) is bucket


def test_a_numbered_bucket_is_the_bucket_otherwise():
    bucket = DelayedBuckets(SimpleNamespace(static_graph=True), 12).numbered(Bucket(5))
    assert bucket.buffer().numel() == 5
