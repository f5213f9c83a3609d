"""torch dtypes and memory layouts as the engine sees them."""

import torch

from paceline.communicator import AVERAGE, DTYPES, SUM
from paceline.errors import UnsupportedError

NATIVE = {getattr(torch, name): code for name, code in DTYPES.items()}
UINT8 = DTYPES["uint8"]


def require_cpu(tensors):
    """The process group carries memory of the host."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"the process group 'paceline' carries CPU tensors, got one on '{tensor.device}'; use a backend for "
                f"each device: init_process_group('cpu:paceline,{tensor.device.type}:nccl')"
            )


def flat_view(tensor, reduce_op=SUM):
    """(dtype code, 1-dimensional view) of a contiguous tensor for a reduction.

    Complex numbers are pairs of real ones, which sums and averages allow. Raises UnsupportedError for others.
    """
    if tensor.is_complex():
        if reduce_op not in (SUM, AVERAGE):
            raise UnsupportedError(f"tensors of dtype {tensor.dtype} take SUM, AVG and PREMUL_SUM only")
        tensor = torch.view_as_real(tensor)
    code = NATIVE.get(tensor.dtype)
    if code is None:
        raise UnsupportedError(
            f"tensors of dtype {tensor.dtype} can't be reduced; convert to one of {', '.join(DTYPES)} first"
        )
    return code, tensor.view(-1)


def moved_as(tensor):
    """(dtype code, engine elements per tensor element) for operations that only move data: any dtype works."""
    code = NATIVE.get(tensor.dtype)
    return (code, 1) if code is not None else (UINT8, tensor.element_size())


def dense(tensor):
    """The tensor as contiguous memory (itself where it is), detached from autograd."""
    return _as_it_reads(tensor.detach()).contiguous()


def _as_it_reads(tensor):
    """conj() and its views only mark a tensor: its memory holds other numbers until they are resolved."""
    return tensor.resolve_conj().resolve_neg()


def _is_marked(tensor):
    return tensor.is_conj() or tensor.is_neg()


def describe(tensor):
    """ "float32 [3, 4]" for messages."""
    return f"{str(tensor.dtype).replace('torch.', '')} {list(tensor.shape)}"


class Packed:
    """Several tensors as one run of memory: themselves where they lie side by side, else a copy.

    pack() copies the tensors in, unpack() the results out; both do nothing without a copy. Without one, `memory` is the
    first tensor alone, and counts for its address; apart=True: always a copy.
    """

    def __init__(self, tensors, apart=False):
        self.tensors = [t.detach() for t in tensors]
        self.counts = [t.numel() for t in self.tensors]
        self._copied = apart or not _adjacent(self.tensors)
        if self._copied:
            self.memory = self.tensors[0].new_empty(sum(self.counts))
        else:
            self.memory = self.tensors[0]

    def pointer(self):
        return self.memory.data_ptr()

    def pack(self):
        if self._copied:
            for part, tensor in zip(self.memory.split(self.counts), self.tensors):
                part.copy_(tensor.reshape(-1))
        return self

    def unpack(self):
        if self._copied:
            for part, tensor in zip(self.memory.split(self.counts), self.tensors):
                tensor.copy_(part.view(tensor.shape))


def _adjacent(tensors):
    end = None
    for tensor in tensors:
        if not tensor.is_contiguous() or _is_marked(tensor) or tensor.dtype != tensors[0].dtype:
            return False
        if tensor.numel() == 0:
            continue
        if end is not None and tensor.data_ptr() != end:
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return end is not None and tensors[0].numel() > 0
