"""The buckets of a static graph's first backward pass.

DDP hands them over when that pass has ended, all of them as number 0 and, where there are several, none as the last one
(Reducer::delay_all_reduce). There are several where they were given sizes of their own (bucket_cap_mb_list).
"""


class DelayedBuckets:
    """Numbers them. ddp: the model; elements: of all gradients that it reduces."""

    def __init__(self, ddp, elements):
        self._expected = getattr(ddp, "static_graph", False)
        self._left = elements
        self._count = 0

    def numbered(self, bucket):
        """A bucket of this pass with its own number; any other one as it is."""
        if not self._expected:
            return bucket
        self._left -= bucket.buffer().numel()
        last = bucket.is_last() or self._left <= 0
        self._expected = not last
        self._count += 1
        return _Numbered(bucket, self._count - 1, last)


class _Numbered:
    """A torch.distributed.GradBucket, but for its number."""

    def __init__(self, bucket, index, last):
        self._bucket = bucket
        self._index = index
        self._last = last

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def __getattr__(self, name):
        return getattr(self._bucket, name)
