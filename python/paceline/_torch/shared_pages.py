"""DDP's buckets on the CPU where the node's other ranks reach them in place: a copy less of each gradient in a node.

The buckets are torch's allocations. Their pages are exchanged for shared ones under them (paceline_share), and back
before torch can give the memory away.
"""

from paceline.errors import PacelineError, ResourceExhaustedError

#: What is smaller is copied at once.
_LEAST = 2**20


class SharedPages:
    """A tensor's pages, shared as long as this object lives; it keeps the memory."""

    __slots__ = ("_communicator", "_pointer", "_tensor")

    def __init__(self, communicator, tensor):
        communicator.share(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        self._communicator, self._tensor, self._pointer = communicator, tensor, tensor.data_ptr()

    def __del__(self):
        # Another pointer: somebody has given the storage other memory, and this is not ours any more.
        if hasattr(self, "_pointer") and self._tensor.data_ptr() == self._pointer:
            try:
                self._communicator.unshare(self._pointer)
            except PacelineError:
                _kept.append(self._tensor)  # its pages are shared still


_kept = []


def of_bucket(communicator, buffer):
    """SharedPages of a bucket's buffer, which nobody touches now; False where it stays as it is."""
    if communicator.identity.local_size < 2 or buffer.numel() * buffer.element_size() < _LEAST:
        return False
    try:
        return SharedPages(communicator, buffer)
    except ResourceExhaustedError:  # slower, not wrong
        return False
