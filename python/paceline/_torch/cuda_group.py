"""Which way the CUDA tensors of a process group take: Paceline's path between nodes, or torch's own NCCL.

Decided by all ranks of the group together, at its first collective on a CUDA tensor. A group inside one node is NCCL's:
torch's ProcessGroupNCCL takes its place in the process group, so that from the second collective on nothing of Paceline
is called. It is torch's own class and not our calls of NCCL, for it brings what such a group needs besides: every
operation, sends and receives, coalescing, a watchdog.
"""

import importlib
import threading
import weakref

import torch
import torch.distributed as dist

from paceline import _cuda, _state
from paceline import communicator as core
from paceline._torch import aborts, amp, cuda_exchanges, cuda_steps, endpoints, everybody, guard
from paceline._torch.arguments import one_for_each
from paceline._torch.cuda_collectives import CudaCollectives, check_codec
from paceline._torch.cuda_exchanges import Exchanges, WorkOfMany
from paceline._torch.cuda_work import Streams, together
from paceline._torch.nccl import errors_are_ours, nccl_backend, take_place
from paceline._torch.older import MODERN
from paceline._torch.start_lines import say_once
from paceline._torch.work import as_torch_error
from paceline.errors import RANK_IS_MISSING, AbortedError, InvalidArgumentError, PacelineError, UnsupportedError

# Of host memory for what is under way: a sharded step has an all-gather and a reduce-scatter on their way at a time.
_PINNED = 128 << 20
_groups = weakref.WeakSet()
_opened = []  # weak references, in the order in which groups were opened
_exchanging = weakref.WeakSet()
_worlds = 0  # that have ended: torch gives its groups the same names again


class CudaGroup:
    """The CUDA half of a process group's backend; opens its way when it is first asked for."""

    def __init__(self, rank, size, store, name, timeout, world):
        self.rank, self.size = rank, size
        self._store, self._name, self._timeout = store, name, timeout
        self._world = world  # the communicator of the CPU half: it hears of every rank
        self._lock = threading.Lock()
        self._way = None
        self._nccl = None
        self._unplaced = None
        self._codec = "none"
        self._exchanges = Exchanges(rank, size, self._make_exchange, self._raise_lost)
        self.failure = None
        self.communicator = None

    def way(self, device):
        """What carries tensors of `device`: CudaCollectives or torch's ProcessGroupNCCL. Collective at first."""
        with self._lock:
            if self.failure is not None:
                raise as_torch_error(self.failure)
            if self._way is None:
                self._way = self._open(device)
            if self._nccl is None and self._way.device != device:
                raise UnsupportedError(
                    f"this process group carries tensors of {self._way.device}, got one on {device}; use one device a "
                    "rank (torch.cuda.set_device())"
                )
            return self._way

    def exchanges(self):
        """What carries all-to-alls, sends and receives beside the path; None where NCCL carries the group anyway.

        Unlike way() not a collective: two ranks that talk ask nobody else.
        """
        self._raise_failure()
        return None if self._nccl is not None or self._on_one_node() else self._exchanges

    def set_timeout(self, seconds):
        """For what is made from now on: operations on CUDA tensors have the time-out of what carries them."""
        self._timeout = seconds

    def compress(self, codec):
        check_codec(codec)
        self._codec = codec
        if self._way is not None and self._nccl is None:
            self._way.compress(codec)

    @property
    def under_way(self):
        return self._submitted or self._exchanges.under_way

    @property
    def _submitted(self):
        return self.communicator is not None and self._way is not None and self._way.under_way > 0

    def arrive(self):
        """Everything submitted to the path has come over the network, or what failed is raised."""
        self._raise_failure()
        if self._submitted:
            try:
                self._way.arrive()
            except PacelineError as error:
                fail_all(error)
                raise as_torch_error(error) from None

    def before_step(self, _optimizer):
        """No parameter changes by what a fault left half received."""
        self.arrive()
        if self._exchanges.under_way:
            self._exchanges.arrive(self._raise_failure)

    def fail(self, error):
        """A rank is gone: no stream may wait for it, NCCL's kernels neither."""
        if self.failure is not None:
            return
        self.failure = error
        if self.communicator is not None and not self.communicator.closed:
            self.communicator.abort(str(error))
        if self._nccl is not None:
            aborts.abort(self._nccl)
        self._exchanges.abort()

    def check(self):
        """Raises what ended the job, as far as this process knows."""
        for communicator in (self._world, self.communicator and self.communicator.communicator):
            if communicator is not None and not communicator.closed:
                communicator.check_health()

    def look(self):
        """The guard's: NCCL inside a node knows no deadline."""
        if self.failure is not None:
            guard.unwatch(self)
            return
        self.hear()

    def hear(self):
        """What ended the job, asked now; NCCL ends with it, and the other groups."""
        if self.failure is None:
            try:
                self.check()
            except PacelineError as error:
                fail_all(error)
        return self.failure

    def close(self):
        """Orderly end; all ranks of the group call it."""
        guard.unwatch(self)
        _groups.discard(self)
        _exchanging.discard(self)
        cuda_steps.unwatch(self)
        self._exchanges.close(failed=self.failure is not None)
        way, self._way = self._way, None
        if self.communicator is not None:
            self.communicator.close()
        elif way is not None and self._unplaced is not None:
            way.shutdown()  # else torch does it, with the process group that has it

    def _prefix(self, purpose):
        """Of keys in the store; the same on all ranks, whatever other groups they were in."""
        return f"paceline/{purpose}/{_worlds}/{self._name}"

    # --- the choice -------------------------------------------------------------------------------------------------

    def _make_exchange(self, purpose, ranks):
        """ProcessGroupNCCL over ranks of the group, once all of them have come."""
        for group in list(_groups):
            group.arrive()  # NCCL takes memory, which may wait for streams that wait for the network
        prefix = f"{self._prefix('exchange')}/{purpose}/"
        _groups.add(self)
        _exchanging.add(self)
        watch_steps(self)
        guard.watch(self)
        here = {f"rank {rank} of the group": f"{prefix}here/{rank}" for rank in ranks}
        try:
            cuda_exchanges.meet(self._store, f"{prefix}here/{self.rank}", here, self._timeout, self._raise_failure)
        except PacelineError as error:
            raise as_torch_error(error) from None
        with errors_are_ours():
            return nccl_backend(self._store, list(ranks).index(self.rank), len(ranks), self._timeout, prefix)

    def _raise_lost(self):
        """As _raise_failure(), without waiting for the guard to look."""
        self.hear()
        self._raise_failure()

    def _raise_failure(self):
        if self.failure is not None:
            raise as_torch_error(self.failure)

    def _open(self, device):
        for group in list(_groups):
            group.arrive()  # memory is taken below, which may wait for streams that wait for the network
        if torch.cuda.is_available():
            torch.cuda.synchronize(device)
        _groups.add(self)
        _opened.append(weakref.ref(self))
        reason, communicator = self._reason()
        way = None
        if reason is None:
            way, reason = self._take_path(communicator, device)
        if way is None:
            if communicator is not None:
                communicator.close()
            way = self._take_nccl(device, reason)
        guard.watch(self)
        return way

    def _on_one_node(self):
        """Whether the whole job is, which every rank knows without asking."""
        return self._world is not None and self._world.identity.node_count == 1

    def _reason(self):
        """(why the group is left to NCCL, communicator), alike on all ranks; None: the path may carry it."""
        wish = core.setting("cuda_path", _state.face)
        if self.size == 1 or wish == "torch":
            return ("" if self.size == 1 else "PACELINE_CUDA_PATH=torch asks for it"), None
        if self._on_one_node():
            return "", None
        communicator = endpoints.make_communicator(
            self.rank, self.size, self._store, self._prefix("cuda-group"), self._timeout, announce=False
        )
        try:
            reason = _first_reason(communicator, "" if communicator.identity.node_count == 1 else _cuda.missing())
            _refuse_if_asked_for(reason)
        except BaseException:
            communicator.close()
            raise
        return reason, communicator

    def _take_path(self, communicator, device):
        """(CudaCollectives, "") or (None, why not), alike on all ranks: a creation that fails on one fails on all.

        Raises what names a rank that is missing: NCCL would wait for it.
        """
        try:
            made = _cuda.CudaCommunicator(communicator, device.index, pinned=_PINNED, only_prompt=True)
        except RANK_IS_MISSING:
            communicator.close()
            raise
        except PacelineError as error:
            try:
                _refuse_if_asked_for(str(error))
            except UnsupportedError:
                communicator.close()
                raise
            return None, str(error)
        self.communicator = made
        way = CudaCollectives(made, Streams(device))
        way.device = device
        way.compress(self._codec)
        say_once(f"CUDA tensors of {self._name}: {made.describe().removeprefix('paceline: ')}")
        watch_steps(self)
        return way, ""

    def _take_nccl(self, device, reason):
        if reason:
            say_once(f"CUDA tensors of {self._name} travel by NCCL alone: {reason}")
        made = nccl_backend(self._store, self.rank, self.size, self._timeout)
        self._nccl, self._unplaced = made, device
        watch_steps(self)
        return made

    def settle(self, backend):
        """Puts NCCL in the backend's place, where it has just been made."""
        device, self._unplaced = self._unplaced, None
        if device is not None:
            take_place(backend, device, self._nccl)


def _refuse_if_asked_for(reason):
    if reason and core.setting("cuda_path", _state.face) == "paceline":
        raise UnsupportedError(f"PACELINE_CUDA_PATH=paceline, but this group can't travel through it: {reason}")


def watch_steps(group):
    """group.before_step() is called before every optimizer's step."""
    amp.watch_optimizers(importlib.import_module("torch.optim.optimizer"))  # torch.optim hides the module's name
    cuda_steps.watch(group)


def _first_reason(communicator, missing):
    """None: the path carries the group. "": one node. Else what stands in the way, the same on all ranks."""
    me = communicator.identity
    rows = everybody.texts(communicator, f"{me.node} {me.local_rank} {me.local_size} {missing}", "way of CUDA tensors")
    if me.node_count == 1:
        return ""
    for rank, row in enumerate(rows):
        node, local_rank, local_size, text = row.split(" ", 3)
        if text:
            return f"rank {rank} of the group: {text}"
        if int(local_size) != me.local_size:
            return f"its nodes differ in size: {local_size} and {me.local_size} of its ranks"
        if rank != int(node) * int(local_size) + int(local_rank):
            return "its ranks are not in the order of their nodes"
    return None


def compress(process_group=None, codec="bf16"):
    """Sums and means of float32 CUDA tensors in this process group travel between nodes as 16 bits from now on.

    codec: "bf16", "fp16" or "none" (as before the first call). Every rank of the group calls it. It is for gradients:
    the all-reduce or reduce-scatter of a sharded model. Inside a node, and where NCCL carries the group, nothing
    changes; parameters (all-gather, broadcast) always travel as they are. Raises InvalidArgumentError for groups of
    other backends.
    """
    group = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    for device in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            continue
        if getattr(backend, "paceline_cuda", None) is not None:
            backend.paceline_cuda.compress(codec)
            return
    raise InvalidArgumentError("compress() is for process groups of backend 'cpu:paceline,cuda:paceline'")


def close_all():
    """The world ends: closes every group, the latest first, as all ranks do; each close waits for the group's ranks."""
    global _worlds
    _worlds += 1
    while _opened:
        group = _opened.pop()()
        if group is not None:
            group.close()
    for group in sorted(_exchanging, key=lambda group: group._name):
        group.close()


def fail_all(error):
    """Ends every CUDA group of this process."""
    for group in list(_groups):
        group.fail(error)


# --- the backend's half -----------------------------------------------------------------------------------------------


def first_cuda_device(arguments):
    """The device of the first tensor among a method's arguments if that is a CUDA device, else None."""
    for argument in arguments:
        tensor = _first_tensor(argument)
        if tensor is not None:
            return tensor.device if tensor.device.type == "cuda" else None
    return None


def _first_tensor(argument):
    while isinstance(argument, (list, tuple)):
        argument = next((entry for entry in argument if isinstance(entry, torch.Tensor) or entry), None)
    return argument if isinstance(argument, torch.Tensor) else None


_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
#: What torch's NCCL calls some of them in versions before 2.15.
_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
#: Of many tensors, which those versions give to C++ only: what does one of them.
_ONE_OF_MANY = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


def call_way(way, name, in_batch, *arguments, **named):
    """A method of CudaCollectives or of torch's NCCL, under whichever name this torch has it."""
    for known in (name, _OLDER_NAMES.get(name, name)):
        if hasattr(way, known):
            return getattr(way, known)(*arguments, **named)
    return _one_by_one(way, getattr(way, _ONE_OF_MANY[name]), in_batch, *arguments, **named)


def _one_by_one(way, method, in_batch, outputs, inputs, opts=None):
    """As one launch; inside a batch of the caller's, as part of that."""
    one_for_each(method.__name__, outputs, inputs)
    options = () if opts is None else (opts,)
    if in_batch:
        return [method(output, source, *options) for output, source in zip(outputs, inputs)][-1]
    way._start_coalescing()
    for output, source in zip(outputs, inputs):
        method(output, source, *options)
    return way._end_coalescing()


def _by_device(name):
    def method(self, *arguments, **named):
        try:
            return carry(self, arguments, named)
        except PacelineError as error:
            raise as_torch_error(error) from None

    def carry(self, arguments, named):
        device = first_cuda_device((*arguments, *named.values()))
        if device is None:
            return getattr(super(ByDevice, self), name)(*arguments, **named)
        if name in cuda_exchanges.NAMES:
            exchanges = self.paceline_cuda.exchanges()
            if exchanges is not None:
                return self._exchange(exchanges, name, arguments, named)
        way = self.paceline_cuda.way(device)
        if self._batch is None:
            self.paceline_cuda.settle(self)
        else:
            self._join_batch(way)
        work = call_way(way, name, self._batch is not None, *arguments, **named)
        if self._batch is not None:
            self._cuda_batch.append(work)
        return work

    method.__name__ = name
    return method


class ByDevice:
    """In front of the CPU's methods: CUDA tensors go to the CUDA half.

    A barrier is the CPU's: the ranks' hosts meet, within a deadline that names who has not come. No GPU is waited for.
    """

    paceline_cuda = None
    _cuda_batch = ()
    _nccl_batch = None
    _messages = ()
    _exchanged = ()

    def start_coalescing(self, *arguments):
        self._cuda_batch, self._messages, self._exchanged = [], [], []
        return super().start_coalescing(*arguments)

    _start_coalescing = start_coalescing

    def end_coalescing(self, *arguments):
        batch, self._cuda_batch = list(self._cuda_batch), ()
        nccl, self._nccl_batch = self._nccl_batch, None
        messages, self._messages = self._messages, ()
        parts, self._exchanged = list(self._exchanged), ()
        cpu_too = bool(self._batch)
        whole = super().end_coalescing(*arguments)
        if nccl is not None:
            parts.append(nccl._end_coalescing())
        elif batch:
            parts.append(together(batch))
        if messages:
            parts.append(self.paceline_cuda.exchanges().batch(messages))
        if cpu_too or not parts:
            parts.append(whole)
        else:
            self._claim(whole)  # it stands for nothing
        return parts[0] if len(parts) == 1 else WorkOfMany(parts)

    def drop_batch(self):
        """What was collected for a batch is not sent."""
        self._cuda_batch, self._messages, self._exchanged, self._batch = (), (), (), None

    def _exchange(self, exchanges, name, arguments, named):
        if name == "recv_anysource":
            raise as_torch_error(UnsupportedError("recv() of a CUDA tensor has to name its source, as with NCCL"))
        if name not in cuda_exchanges.MESSAGES:
            outputs = arguments[0] if isinstance(arguments[0], (list, tuple)) else [arguments[0]]
            work = exchanges.all_to_all(lambda nccl: call_way(nccl, name, False, *arguments, **named), outputs)
            if self._batch is not None:
                self._exchanged.append(work)
            return work
        if self._batch is None or not MODERN:
            return exchanges.batch([(name, arguments)])
        self._messages.append((name, arguments))
        return None

    def _join_batch(self, way):
        """The first operation of a batch that falls to NCCL begins a batch there."""
        if self._nccl_batch is None and not isinstance(way, CudaCollectives):
            way._start_coalescing()
            self._nccl_batch = way

    def shutdown(self):
        self.paceline_cuda.close()
        super().shutdown()

    def abort(self, *arguments):
        super().abort(*arguments)
        self.paceline_cuda.fail(AbortedError(f"rank {self._rank} called abort() on its process group"))


for _name in _METHODS:
    setattr(ByDevice, _name, _by_device(_name))
