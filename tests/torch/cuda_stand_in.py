"""A stand-in for GPUs: CPU tensors take the CUDA half of the process group, over a path that the CPU's engine carries.

What is real: torch's calls, the choice per device, every method of CudaCollectives, its memory and names. What is not:
streams, and the path, which works at once instead of in stream order. The path itself is tested in src/gpu.
"""

import contextlib
import ctypes
import datetime
import itertools
import weakref

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline import _cuda
from paceline import communicator as core
from paceline._torch import cuda_group, guard
from paceline._torch.cuda_collectives import CudaCollectives
from paceline._torch.cuda_exchanges import WorkOfMany
from paceline._torch.endpoints import make_communicator
from paceline.errors import InvalidArgumentError

_ITEM = {0: 4, 2: 2, 3: 2, core.DTYPES["uint8"]: 1}
_TORCH = {0: torch.float32, 2: torch.float16, 3: torch.bfloat16}
_serial = itertools.count()


class Moment:
    def query(self):
        return True


class NoStreams:
    device = torch.device("cpu")

    def __init__(self):
        self.outlived = 0

    def handle(self):
        return 0

    side_handle = handle

    def on_side(self):
        return contextlib.nullcontext()

    def record_side(self):
        return Moment()

    def wait(self, event):
        assert isinstance(event, Moment)

    def outlive(self, _tensor):
        self.outlived += 1

    def future(self):
        return Future()


class PointerPath:
    """What CudaCommunicator offers, at once and on host memory."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.calls = []
        self.codecs = set()
        self.joined = set()
        self.error = None

    @property
    def closed(self):
        return self.communicator.closed

    def close(self):
        self.communicator.close()

    def all_reduce(self, pointer, count, dtype, stream, reduce_op, codec, name, factor, prompt):
        assert prompt, "a script that calls it may wait for it"
        assert pointer % 16 == 0 and isinstance(name, bytes) and stream == 0
        self.calls.append(("all_reduce", count, factor, codec))
        if factor != 1:
            _view(pointer, count, dtype).mul_(factor)
        self._run(core.ALL_REDUCE, dtype, pointer, pointer, count, reduce_op=reduce_op)
        return len(self.calls)

    def scratch(self, arguments):
        return 512 if arguments.collective == core.REDUCE_SCATTER else 0

    def collective(self, a):
        assert a.name and (a.scratch_bytes == self.scratch(a))
        self.calls.append((a.collective, a.count, a.factor, a.codec))
        if a.collective == core.BROADCAST:
            self._run(core.BROADCAST, a.dtype, a.output, a.output, a.count, root=a.root)
        elif a.collective == core.ALL_GATHER:
            self._run(core.ALL_GATHER, a.dtype, a.input, a.output, a.count)
        else:
            source = _view(a.input, a.count * self.size, a.dtype).clone()
            if a.factor not in (0, 1):
                source.mul_(a.factor)
            self._run(
                core.REDUCE_SCATTER,
                a.dtype,
                source.data_ptr(),
                a.output,
                a.count * self.size,
                counts=[a.count] * self.size,
                reduce_op=a.reduce_op,
            )
        return len(self.calls)

    def join(self, op, _stream):
        if op not in range(1, len(self.calls) + 1):
            raise InvalidArgumentError(f"there is no operation {op}")
        self.joined.add(op)

    def wait_arrival(self, _seconds=0.0):
        if self.error is not None:
            raise self.error
        return True

    def abort(self, reason):
        self.communicator.abort(reason)

    def _run(self, collective, dtype, source, target, count, **arguments):
        self.communicator.run(
            collective, dtype=dtype, input=source, output=target, count=count, name="stand-in", **arguments
        )


def _view(pointer, count, dtype):
    if not count:
        return torch.empty(0, dtype=_TORCH[dtype])
    raw = (ctypes.c_uint8 * (count * _ITEM[dtype])).from_address(pointer)
    return torch.frombuffer(raw, dtype=_TORCH[dtype])


class GlooAsNccl:
    """Torch's Gloo with what torch's NCCL has besides: batches, whose sends and receives have no Works of their own."""

    def __init__(self, store, rank, size, timeout, prefix="paceline-nccl/"):
        seconds = datetime.timedelta(seconds=timeout or 60)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, seconds)
        self._batch = None
        self.size, self.launches = size, []

    def _start_coalescing(self):
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self):
        works, self._batch = self._batch, None
        self.launches.append(len(works))
        return WorkOfMany(works)

    def _message(self, method, tensors, other, tag):
        assert tag == 0, "NCCL has none"
        work = getattr(self._gloo, method)(tensors, other, tag)
        if self._batch is None:
            return work
        self._batch.append(work)
        return None

    def send(self, tensors, other, tag):
        return self._message("send", tensors, other, tag)

    def recv(self, tensors, other, tag):
        return self._message("recv", tensors, other, tag)

    def alltoall_base(self, *arguments):
        method = getattr(self._gloo, "all_to_all_single", None) or self._gloo.alltoall_base
        return method(*arguments)

    def alltoall(self, outputs, inputs, _opts=None):
        """Gloo has none of lists."""
        rank = self._gloo.rank()
        outputs[rank].copy_(inputs[rank])
        others = [r for r in range(self.size) if r != rank]
        works = [self._gloo.send([inputs[r]], r, 1) for r in others]
        return WorkOfMany(works + [self._gloo.recv([outputs[r]], r, 1) for r in others])

    def shutdown(self):
        self._gloo = None


class StandInGroup(cuda_group.CudaGroup):
    """Opens a PointerPath where a GPU would open its path."""

    def _on_one_node(self):
        return False

    def _open(self, device):
        communicator = make_communicator(
            self.rank, self.size, self._store, self._prefix("stand-in"), self._timeout, announce=False
        )
        self.communicator = PointerPath(communicator)
        way = CudaCollectives(self.communicator, NoStreams())
        way.device = device
        way.compress(self._codec)
        cuda_group._groups.add(self)
        cuda_group._opened.append(weakref.ref(self))
        cuda_group.watch_steps(self)
        guard.watch(self)
        return way


def install():
    """From now on CPU tensors count as CUDA tensors in new process groups."""
    from paceline._torch import process_group

    def first_device(arguments):
        for argument in arguments:
            tensor = cuda_group._first_tensor(argument)
            if tensor is not None:
                return tensor.device
        return None

    cuda_group.first_cuda_device = first_device
    cuda_group.nccl_backend = GlooAsNccl
    process_group.CudaGroup = StandInGroup


def path_of(group):
    """The PointerPath of a process group that has carried something."""
    return group._get_backend(torch.device("cpu")).paceline_cuda.communicator


assert _cuda.CODEC_NONE == 0
