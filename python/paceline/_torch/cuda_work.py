"""What a collective on CUDA tensors hands back: torch's Work whose wait() is a wait of streams."""

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline._torch.work import PacelineWork, as_torch_error
from paceline.errors import PacelineError

_Work = dist.Work if hasattr(dist, "Work") else dist._Work


class Streams:
    """The streams of one device as collectives use them: the caller's, and a side one that joins what was submitted."""

    def __init__(self, device):
        self.device = device
        # Of high priority: those streams are nobody's unless asked for, so nothing else gets behind our waits.
        self.side = torch.cuda.Stream(device, priority=-1)

    def handle(self):
        """Of the caller's stream, by address."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def side_handle(self):
        return self.side.cuda_stream

    def on_side(self):
        return torch.cuda.stream(self.side)

    def record_side(self):
        event = torch.cuda.Event()
        event.record(self.side)
        return event

    def wait(self, event):
        """The caller's stream waits for `event`, on the device."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def outlive(self, tensor):
        """The allocator keeps the tensor's memory until the side stream has passed this point."""
        if tensor.device == self.device:
            tensor.record_stream(self.side)

    def future(self):
        return Future(devices=[self.device])


class CudaWork(_Work):
    """An operation that the side stream has joined; `event` was recorded there.

    Its tensors are held until somebody waits, for then their streams are in order; dropped without a wait, the
    allocator is told. arrive(seconds): blocks the host until it has come over the network, raises what failed.
    """

    def __init__(self, streams, event, held, result, arrive):
        super().__init__()
        self._streams = streams
        self._event = event
        self._held = held
        self._result = list(result)
        self._arrive = arrive
        self._issued = streams.handle()
        self._future = None
        self._error = None

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds > 0:
            self._block(seconds)
        self._streams.wait(self._event)
        if self._streams.handle() != self._issued:
            self._give_up()  # memory goes back to the stream that took it, which is not the one that waits
        self._held = ()
        return True

    def _block(self, seconds):
        try:
            self._arrive(seconds)
        except PacelineError as error:
            self._error = as_torch_error(error)
            raise self._error from None

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return self._event.query()

    def is_success(self):
        return self._error is None and self.is_completed()

    def exception(self):
        return self._error

    def result(self):
        return self._result

    def get_future(self):
        """Completed already; its tensors belong to the side stream, so that a wait for it is a wait of streams."""
        if self._future is None:
            self._future = self._streams.future()
            with self._streams.on_side():
                self._future.set_result(self._result)
        return self._future

    getFuture = get_future

    def _source_rank(self):
        return -1

    def __del__(self):
        self._give_up()

    def _give_up(self):
        for tensor in self._held:
            self._streams.outlive(tensor)


def together(works, result=()):
    """One Work for several of one group, the last event is behind all others; for none, one that has ended."""
    if not works:
        return PacelineWork(None, [])
    last = works[-1]
    held = tuple(tensor for work in works for tensor in work._held)
    for work in works:
        work._held = ()
    results = list(result) or [tensor for work in works for tensor in work._result]
    return CudaWork(last._streams, last._event, held, results, last._arrive)
