"""What every DDP model that travels through Paceline has: its endpoint, its parameters' keys, its buckets' names."""

import weakref

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline import communicator as core
from paceline._torch.delayed import DelayedBuckets
from paceline._torch.unused import UnusedParameters

_models = 0


class KnownBucket:
    """What is kept of a bucket from pass to pass.

    calls: what the attachment submits for it. future: complete, with the buffer, or None. pages: a model's on the CPU,
    where they are shared with the node's other ranks, False where they are not, None before that was tried.
    """

    __slots__ = ("calls", "elements", "future", "pages", "pointer")

    def __init__(self, buffer, calls):
        self.pointer = buffer.data_ptr()
        self.elements = buffer.numel()
        self.calls = calls
        self.future = None
        self.pages = None


class Attachment:
    """One DDP model's way. Subclasses reduce a bucket: all_reduce(bucket) returns the future that DDP waits for."""

    #: Of gradients that codecs with residuals take; others travel as they are.
    residual_dtypes = (torch.float32,)

    def __init__(self, ddp, endpoint):
        global _models
        self._ddp = weakref.ref(ddp)
        self.endpoint = endpoint
        self.delegate = None
        self.join_work = None
        self.failure = None  # of the pass under way, where it is told as that ends: nothing more of it is sent
        self.overlap = None  # optimizer.py's, where an optimizer asked for it
        self._layouts = {}
        self._keys = {}
        self._names = {}
        self.model = _models  # its number
        _models += 1
        keyed = []
        for index, (name, parameter) in enumerate(ddp.module.named_parameters()):
            self._keys[id(parameter)] = self.model << 32 | index
            self._names[id(parameter)] = name
            keyed.append((self._keys[id(parameter)], parameter))
        endpoint.steps.add(self.model, keyed)
        self._elements = sum(p.numel() for _, p, _ in self.keyed_parameters())  # those that DDP reduces from now on
        self._delayed = None
        self.unused = None  # of a model with residuals that may leave some
        self._known = {}  # buckets by number
        self._rebuilt = None

    def __del__(self):
        if "_delayed" in self.__dict__:  # else the constructor has raised
            self.endpoint.steps.dropped.append(self.model)

    def begin_pass(self):
        """A backward pass begins."""
        if self.other_buckets():
            self._known.clear()

    def known(self, index, buffer):
        """The KnownBucket of this number, or None where it has another buffer."""
        found = self._known.get(index)
        if found is None or found.pointer != buffer.data_ptr() or found.elements != buffer.numel():
            return None
        return found

    def keep(self, index, buffer, calls):
        """Makes a bucket known."""
        made = self._known[index] = KnownBucket(buffer, calls)
        return made

    def other_buckets(self):
        """Asked as a pass begins: whether DDP may have made other buckets, which may lie where the former did."""
        rebuilt = getattr(self._ddp(), "_has_rebuilt_buckets", None)
        other = rebuilt is None or rebuilt is not self._rebuilt
        self._rebuilt = rebuilt
        return other

    def numbered(self, bucket):
        """The bucket that DDP hands over, with its own number in any pass."""
        if self._delayed is None:  # not sooner: _set_static_graph() may come after DDP's constructor
            ddp = self._ddp()
            self._delayed = DelayedBuckets(ddp, self._elements)
            if self.endpoint.steps.enabled and (ddp.find_unused_parameters or getattr(ddp, "static_graph", False)):
                self.unused = UnusedParameters(ddp, self.endpoint.steps, self.model, self._keys, self.residual_dtypes)
        return self._delayed.numbered(bucket)

    def failed(self, error, buffer):
        """What the hook returns, or raises, where the job has failed before this bucket."""
        raise error

    def is_rest_of_failed_pass(self, bucket):
        """Whether the bucket is of the pass whose failure is kept; a new pass forgets that."""
        if bucket.index() == 0:
            self.failure = None
        return self.failure is not None

    def parameter_names(self):
        """{id of a parameter: its name in the wrapped module}"""
        return self._names

    def process_group(self):
        return self._ddp().process_group

    def keyed_parameters(self):
        """(name, parameter, residual key) of every parameter that DDP reduces."""
        ddp = self._ddp()
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ddp.parameters_to_ignore:
                yield name, parameter, self._keys[id(parameter)]

    def layout(self, bucket):
        """The bucket's segments (None without a codec with residuals) and its name, kept while it holds the same."""
        parameters = bucket.parameters()
        key = (bucket.index(), *map(id, parameters))
        if key not in self._layouts:
            names = [self._names.get(id(p), "?") for p in parameters]
            span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
            segments = None
            if self.endpoint.steps.enabled:
                segments = core.segment_array([(self._keys[id(p)], 0, p.numel()) for p in parameters])
            self._layouts[key] = (segments, f"bucket {bucket.index()} of model {self.model} ({span})")
        return self._layouts[key]


def completed(buffer):
    """A future that holds a buffer on the CPU."""
    future = Future()
    future.set_result(buffer)
    return future


def first_tensor(work):
    value = work.get_future().value()
    return value[0] if isinstance(value, (list, tuple)) else value


def average_by_process_group(group, buffer, size):
    """What the engine does not carry (sparse gradients …) travels as torch's own process group carries it."""
    work = dist.all_reduce(buffer, group=group, async_op=True)

    def average(future):
        value = future.value()
        return (value[0] if isinstance(value, (list, tuple)) else value).div_(size)

    return work.get_future().then(average)
