"""How the buckets of an overlapped CPU model travel: one all-reduce each, in place."""

import contextlib

import torch
from torch.futures import Future

from paceline._torch.attachment import average_by_process_group
from paceline.errors import UnsupportedError


class CpuCarrier:
    def __init__(self, attachment):
        self._attachment = attachment
        self._communicator = attachment.endpoint.communicator
        self.steps = attachment.endpoint.steps

    def completed(self, buffer):
        future = Future()
        future.set_result(buffer)
        return future

    def layout(self, bucket):
        return self._attachment.layout(bucket)

    def average_as_torch_does(self, buffer):
        """What the engine does not carry; a future."""
        return average_by_process_group(self._attachment.process_group(), buffer, self._attachment.endpoint.size)

    def submit(self, flight):
        """Returns what wait() and there() take. The buffer is the network's until then."""
        return self._attachment.submit(flight.buffer, *flight.layout)

    def there(self, operation):
        return self._communicator.test(operation)

    def wait(self, operation):
        return self._communicator.wait(operation)

    def use_gradients(self):
        """Gradients that have arrived may be read on the host at once."""

    @contextlib.contextmanager
    def updating(self, _flight):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield


def of(attachment):
    """The carrier of a model's attachment."""
    if not hasattr(attachment, "submit"):
        raise UnsupportedError('overlap="forward" is for models on the CPU in this build; leave it out for CUDA')
    return CpuCarrier(attachment)
