"""DDP models on CPU tensors through the CUDA path: the driver is a simulated GPU's (src/gpu/simulated_driver.cc).

What is real: DDP, the hook, CudaAttachment, CudaSteps, libpaceline_cuda.so with its threads, the wire between
processes. What is not: the GPU, whose memory is the host's and whose kernels are the reference's, and torch's streams;
a join is followed by a wait for the simulated stream, as CPU tensors are read at once. Every rank is a node of its own.
"""

import contextlib
import ctypes
import os

os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"

import torch
import torch.distributed as dist
from support import ROOT
from torch.nn.parallel import DistributedDataParallel

import paceline.torch  # noqa: F401
from paceline import _cuda, _state
from paceline import communicator as core
from paceline._torch import carriers, cuda, cuda_ddp, cuda_overlap, cuda_steps, ddp, endpoints, optimizer

_LIBRARIES = ROOT / "build" / "lib" / "simulated"
_driver = ctypes.CDLL(str(_LIBRARIES / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
_cuda.path = lambda: str(_LIBRARIES / "libpaceline_cuda.so")  # whose device code is that GPU's
_context = ctypes.c_void_p()
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def _must(code):
    assert code == 0, f"the simulated driver returned {code}"


def _synchronize():
    if not _context:
        _must(_driver.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 0))
    _must(_driver.cuCtxSetCurrent(_context))
    _must(_driver.cuStreamSynchronize(None))


class Communicator(_cuda.CudaCommunicator):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = []  # (elements, elements of a row) of every all-reduce
        self._finite = True

    def submit(self, prepared, stream):
        self.asked.append((prepared.arguments.count, prepared.arguments.row_elements))
        return super().submit(prepared, stream)

    def join(self, op, stream):
        super().join(op, stream)
        self._finite = self.wait_operation(op) and self._finite
        _synchronize()

    def wait_arrival(self, timeout=0.0):
        finite, self._finite = self._finite, True
        return super().wait_arrival(timeout) and finite


class _Endpoint(cuda.CudaEndpoint):
    """A CudaEndpoint without streams."""

    device = torch.device("cpu")
    side = None

    def __init__(self, group):
        self.process_group = group
        self.communicator = Communicator(endpoints.connect(group, "test/simulated", announce=False), 0)
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.codec = core.setting("codec", _state.face)
        self.momentum = float(core.setting("topk_momentum", _state.face)) if self.codec == "topk" else 0.0
        self.steps = cuda_steps.CudaSteps(self, self.codec in ("topk", "int8"))

        self._sizes = {}

    def _come_to_rest(self):
        self.steps.arrive()


class _Attachment(cuda_ddp.CudaAttachment):
    def _complete_aside(self, future, buffer, op, last):
        self.endpoint.join(op, 0)
        self._apply_join_factor(buffer, last)
        future.set_result(buffer)


_endpoints = {}


def _attachment_for(model, group):
    if group not in _endpoints:
        _endpoints[group] = _Endpoint(group)
    return _Attachment(model, _endpoints[group])


class _Carrier(carriers.CpuCarrier):
    """A CudaCarrier without streams, for overlap="forward"."""

    in_order = True
    parts = cuda_overlap.CudaCarrier.parts
    submit = cuda_overlap.CudaCarrier.submit
    _calls = cuda_overlap.CudaCarrier._calls
    _probe = cuda_overlap.CudaCarrier._probe
    probe_elements = cuda_overlap.CudaCarrier.probe_elements

    def __init__(self, attachment):
        super().__init__(attachment)
        self._usual = attachment.usual_elements()
        self.few_bytes = attachment.endpoint.codec == "topk"

    def layout(self, bucket):
        return self._attachment.encoded_layout(bucket)

    def carries(self, buffer):
        return self._attachment.carries(buffer)

    def there(self, operation):
        return self._communicator.arrived(operation)

    def wait(self, operation):
        finite = self._communicator.wait_operation(operation)
        self._communicator.join(operation, 0)
        return self.model not in self.steps.not_finite(finite)

    def reduce_now(self, buffers):
        for operation in [self._attachment.submit(self._probe(buffer)) for buffer in buffers]:
            self.wait(operation)

    gate = cuda_overlap.CudaCarrier.gate

    def before_update(self, flight):
        self.use_gradients(flight)

    def use_gradients(self, flight):
        if flight.operation is not None:
            self._communicator.join(flight.operation, 0)


optimizer._carrier_of = _Carrier
ddp._attachment_for = _attachment_for
cuda_ddp.Future = lambda devices: torch.futures.Future()
cuda_ddp.stream_handle = lambda device: 0


class _Moment:
    """Behind all that torch has done with CPU tensors."""

    def query(self):
        return True


cuda_steps._behind = lambda device: _Moment()


@contextlib.contextmanager
def settings(**values):
    """PACELINE_* settings for what is made inside."""
    names = {f"PACELINE_{name.upper()}": str(value) for name, value in values.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@contextlib.contextmanager
def wrapped(model, **arguments):
    """(DDP model, its Communicator) over a process group of its own, closed at the end."""
    group = dist.new_group()
    try:
        made = DistributedDataParallel(model, process_group=group, **arguments)
        communicator = _endpoints[group].communicator
        yield made, communicator
        _endpoints[group].steps.arrive()
    finally:
        endpoint = _endpoints.pop(group)
        endpoint.steps.forget()
        endpoint.communicator.close()


def plain(model, **arguments):
    os.environ["PACELINE_DISABLE"] = "1"
    try:
        return DistributedDataParallel(model, **arguments)
    finally:
        del os.environ["PACELINE_DISABLE"]


def assert_same_on_all_ranks(model):
    for name, parameter in model.named_parameters():
        mine = parameter.detach().reshape(-1)
        all_of_them = [torch.empty_like(mine) for _ in range(SIZE)]
        dist.all_gather(all_of_them, mine)
        assert all(torch.equal(one, mine) for one in all_of_them), f"{name} differs among the ranks"
