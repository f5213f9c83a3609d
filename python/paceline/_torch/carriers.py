"""How the buckets of an overlapped model travel.

On the CPU each is an all-reduce in place, for which the thread that trains waits.
"""

import contextlib
import time

import torch

from paceline._torch.attachment import average_by_process_group, completed
from paceline._torch.bucket_order import of_first_rank

#: Bytes of gradients under way at a time, at least: two buckets of the usual size.
_WINDOW = 6 << 20


def _nothing():
    return None


_modes = getattr(torch._C, "_len_torch_dispatch_stack", _nothing)
_transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", _nothing)
_compiler = getattr(torch, "compiler", None)


def beside_modes():
    """Where what is done is no part of what a read comes from.

    Modes that hear of every operation (what a checkpoint keeps, fake tensors) and torch.func's transforms are off, and
    so is what compilers tell: where they trace, torch's optimizers compute some of their factors in single precision.
    """
    modes, transforms, compiling = _modes(), _transforms(), getattr(_compiler, "_is_compiling_flag", False)
    if not modes and not transforms and not compiling:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if compiling:
        _compiler._is_compiling_flag = False
        stack.callback(setattr, _compiler, "_is_compiling_flag", True)
    if modes:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
    if transforms:
        from torch._functorch import pyfunctorch

        stack.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
    return stack


class Carrier:
    """What the kinds have in common.

    Theirs is submit(flight, part): sends a part of a bucket and returns the operation; the buffer is the network's
    until it has arrived.
    """

    _window = _WINDOW
    #: Whether buckets arrive in the order in which they were submitted.
    in_order = False

    def __init__(self, attachment):
        self._attachment = attachment
        self._communicator = attachment.endpoint.communicator
        self.process_group = attachment.process_group()
        self.steps = attachment.endpoint.steps
        self.model = attachment.model
        self.has_residuals = self.steps.enabled
        #: The codec sends so little that no order helps.
        self.few_bytes = self.has_residuals

    def average_as_torch_does(self, buffer):
        """What the engine does not carry; a future."""
        return average_by_process_group(self.process_group, buffer, self._attachment.endpoint.size)

    def other_buckets(self):
        """See Attachment."""
        return self._attachment.other_buckets()

    def layout(self, bucket):
        """The bucket's segments and name, for submit()."""
        return self._attachment.layout(bucket)

    def parts(self, flight):
        """[(first element, elements)] of a bucket that are sent apart; several only where `in_order` holds."""
        return [(0, flight.buffer.numel())]

    def before_step(self, optimizer):
        """An optimizer steps. Raises where it can't go with the codec; see CudaSteps."""
        check = getattr(self.steps, "check_optimizer", None)
        if check is not None:
            check(optimizer)

    def gate(self, _optimizer, _kind):
        """A number on the device that becomes 1 where a fault comes first; None: the host waits for arrival."""
        return None

    def read_gate(self, gate):
        """What the kernels of an update that comes next are given of it: at 1 they change nothing."""
        return gate

    def seconds_of(self, like, elements, count):
        """Of `count` all-reduces of so many elements, handed over at once; the least of three. Collective."""
        elements = self.probe_elements(like, elements)
        probes = [torch.zeros(elements, dtype=like.dtype, device=like.device) for _ in range(count)]
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            self.reduce_now(probes)
            best = min(best, time.perf_counter() - started)
        return best

    def probe_elements(self, _like, elements):
        """How many of reduce_now()'s take as long as so many of a bucket's."""
        return elements

    def of_first_rank(self, numbers):
        return of_first_rank(numbers, self.process_group, self.device)


class CpuCarrier(Carrier):
    device = torch.device("cpu")

    def submit(self, flight, _part):
        """So much at a time that the link stays busy and what is wanted first arrives first. See Carrier."""
        call = flight.calls.get(0)
        if call is None:
            call = flight.calls[0] = self._prepare(flight.buffer, *flight.layout)
        return self._attachment.submit(call, self._window)

    def _prepare(self, buffer, segments, name):
        self._window = max(self._window, buffer.numel() * buffer.element_size() * 3 // 2)
        return self._attachment.prepare(buffer, segments, name)

    def carries(self, _buffer):
        return True

    def completed(self, buffer):
        return completed(buffer)

    def there(self, operation):
        return self._communicator.test(operation)

    def wait(self, operation):
        """Returns whether all ranks' numbers were finite; raises what failed."""
        return self._communicator.wait(operation)

    def reduce_now(self, buffers):
        calls = [self._prepare(buffer, None, "probe of the order of buckets") for buffer in buffers]
        for operation in [self._attachment.submit(call, self._window) for call in calls]:
            self._communicator.wait(operation)

    def reads_later(self, _tensors):
        """Updates that are about to be asked for read these, which nobody else holds until then."""

    def requested(self):
        """Updates are about to be asked for: they come after what the script has done so far."""

    @contextlib.contextmanager
    def updating(self):
        """Where updates are made."""
        # A read may come from anywhere: the state of an optimizer must not become an inference tensor.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), beside_modes():
            yield

    def before_update(self, _flight):
        """What comes next inside updating() reads the flight's gradients and changes its parameters."""

    def after_update(self, _flights):
        """And now has, those of these flights."""

    def use_gradients(self, _flight):
        """Gradients that have arrived may be read at once."""

    def use_updates(self, _flight):
        """Updates are made when they have been called."""

    def at_home(self):
        """See CudaCarrier."""
        return contextlib.nullcontext()

    def mark(self):
        return time.perf_counter()

    def seconds(self, start, end):
        return end - start
