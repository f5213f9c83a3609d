"""How the buckets of an overlapped CUDA model travel: in stream order, with a gate before each update.

The kernels of an update are enqueued on a stream of their own, behind the stream's wait for the bucket. What a fault
leaves half received must meet no optimizer: fused ones read on the device whether all has arrived (gates.py), so that
step() enqueues all updates and the host goes on; those of others are enqueued once the host knows that the bucket has
come over the network. The stream that computes the forward pass waits, on the device, for the updates of the layer that
it comes to.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline._torch import gates
from paceline._torch.carriers import Carrier, beside_modes
from paceline.errors import PacelineError

#: Of the usual bucket: what has more elements is cut, ...
_CUT_ABOVE = 1.5
#: ... at multiples of so many, as the path cuts.
_GRANULE = 4096


class CudaCarrier(Carrier):
    in_order = True

    def __init__(self, attachment):
        super().__init__(attachment)
        self.few_bytes = attachment.endpoint.codec == "topk"
        self.device = attachment.endpoint.device
        self._updates = torch.cuda.Stream(self.device)
        self._usual = attachment.usual_elements()
        self._asked = None
        self._home = None  # the stream on which the optimizer stepped

    def carries(self, buffer):
        return self._attachment.carries(buffer)

    def layout(self, bucket):
        return self._attachment.encoded_layout(bucket)

    def parts(self, flight):
        """What is much larger than the usual bucket is cut: the link can carry others in between. See Carrier."""
        elements = flight.buffer.numel()
        _, _, by_rows = flight.layout
        if self.has_residuals or by_rows or elements <= _CUT_ABOVE * self._usual:
            return [(0, elements)]
        size = -(-elements // -(-elements // self._usual))
        size = -(-size // _GRANULE) * _GRANULE
        return [(first, min(size, elements - first)) for first in range(0, elements, size)]

    def submit(self, flight, part):
        """See Carrier."""
        calls = flight.calls.get(part)
        if calls is None:
            calls = flight.calls[part] = self._calls(flight, part)
        return self._attachment.submit(calls)

    def _calls(self, flight, part):
        if len(flight.parts) == 1:
            return self._attachment.prepare(flight.buffer, *flight.layout)
        return self._attachment.prepare_span(flight.buffer, *flight.parts[part], flight.layout[1])

    def average_in_place(self, buffer):
        """Types that the path does not take: torch's all-reduce, in stream order."""
        self.steps.torch_carries()
        dist.all_reduce(buffer, group=self.process_group)
        buffer.div_(self._attachment.endpoint.size)

    def average_as_torch_does(self, buffer):
        """See Carrier."""
        self.steps.torch_carries()
        return super().average_as_torch_does(buffer)

    def before_step(self, optimizer):
        """See Carrier."""
        super().before_step(optimizer)
        self.steps.await_torch()

    def completed(self, buffer):
        future = Future(devices=[self.device])
        future.set_result(buffer)
        return future

    def there(self, operation):
        return self._communicator.arrived(operation)

    def wait(self, operation):
        """Blocks the host until the bucket has come over the network; see Carrier."""
        try:
            finite = self._communicator.wait_operation(operation)
        except PacelineError as error:
            self.steps.failed(error)
            raise
        return self.model not in self.steps.not_finite(finite)

    def probe_elements(self, like, elements):
        """See Carrier. int8 takes a byte an element."""
        return -(-elements // like.element_size()) if self.has_residuals else elements

    def _probe(self, buffer):
        """What has residuals is probed by exact numbers of as many bytes: a probe must leave none behind."""
        name = b"probe of the order of buckets"
        if self.has_residuals:
            return self._attachment.prepare_exactly(buffer, name)
        return self._attachment.prepare(buffer, None, name)

    def reduce_now(self, buffers):
        stream = torch.cuda.current_stream(self.device)
        for buffer in buffers:
            operation = self._attachment.submit(self._probe(buffer))
        self._communicator.wait_operation(operation)  # they arrive in order
        self._communicator.join(operation, stream.cuda_stream)
        stream.synchronize()

    def requested(self):
        """Updates come after all that the current stream holds by now: it may still read the parameters."""
        self._home = torch.cuda.current_stream(self.device)
        self._asked = self._home.record_event()

    def reads_later(self, tensors):
        """See Carrier."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._updates)

    def gate(self, optimizer, kind):
        """See Carrier, gates.py."""
        return self.steps.gate() if gates.fits(optimizer, kind) else None

    def read_gate(self, gate):
        """See Carrier. It stands for more buckets than the one that is updated next: see CudaSteps.read_gate()."""
        return self.steps.read_gate(gate)

    @contextlib.contextmanager
    def updating(self):
        """What is enqueued inside changes parameters."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast("cuda", enabled=False))
            stack.enter_context(beside_modes())
            stack.enter_context(torch.cuda.stream(self._updates))
            self._updates.wait_event(self._asked)
            yield

    def before_update(self, flight):
        """See Carrier."""
        if flight.operation is not None:
            self._attachment.endpoint.join(flight.operation, self._updates.cuda_stream)

    def after_update(self, flights):
        """See Carrier."""
        updated = self._updates.record_event()
        for flight in flights:
            flight.updated = updated

    def use_gradients(self, flight):
        """The current stream may read the bucket from here on."""
        if flight.operation is not None:
            stream = torch.cuda.current_stream(self.device)
            self._attachment.endpoint.join(flight.operation, stream.cuda_stream)

    def use_updates(self, flight):
        """The current stream may read the parameters from here on, and so may the one that stepped.

        A copy on a stream of its own (a checkpoint, an EMA) is often the first to read; nobody asks again after it.
        """
        if flight.updated is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(flight.updated)
        if self._home is not None and self._home != stream:
            self._home.wait_event(flight.updated)

    def at_home(self):
        """Where gradients are made that the script finds in .grad after an update."""
        return contextlib.nullcontext() if self._home is None else torch.cuda.stream(self._home)

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start, end):
        end.synchronize()
        return start.elapsed_time(end) / 1e3
