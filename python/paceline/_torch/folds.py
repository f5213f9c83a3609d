"""Reductions that the engine does not carry out itself: gathered from all ranks and folded here.

Bitwise and, or, xor, and sums of sparse tensors; every rank folds in rank order, so all get the same bits.
"""

import functools

import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError


def gathered_fold(group, tensor, op, opts, root=None):
    """In place; with root, only there. A Work: what this rank does next may be what another waits for."""
    fold = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    function = next((f for name, f in fold.items() if op == getattr(dist.ReduceOp, name)), None)
    if function is None:
        raise UnsupportedError(f"the reduction {op} is not known to the process group 'paceline'")
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedError(f"bitwise reductions take integers and bool, got {tensor.dtype}")
    parts = tensor.new_empty((group._size, tensor.numel()))

    def finish():
        if root is None or group._rank == root:
            tensor.detach().copy_(functools.reduce(function, parts).view(tensor.shape))

    return group._all_gather(parts, None, tensor, opts, [tensor], finish)


def sparse_all_reduce(group, tensor, op):
    """The sum (or mean) of sparse COO tensors of one shape, in place."""
    mean = op == dist.ReduceOp.AVG
    if tensor.layout != torch.sparse_coo or not (mean or op == dist.ReduceOp.SUM):
        raise UnsupportedError("sparse tensors: SUM and AVG of the COO layout")
    own = tensor.detach().coalesce()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group._size)]
    group.allgather([lengths], [torch.tensor([own._nnz()])]).wait()
    counts = [int(length) for length in lengths]
    values = own.values()
    index_parts = [own.indices().new_empty(own.sparse_dim(), n) for n in counts]
    value_parts = [values.new_empty(n, *values.shape[1:]) for n in counts]
    group.allgather([index_parts], [own.indices()]).wait()
    group.allgather([value_parts], [values]).wait()
    total = torch.sparse_coo_tensor(torch.cat(index_parts, 1), torch.cat(value_parts), tensor.shape).coalesce()
    if mean:
        total = total / group._size
    with torch.no_grad():
        tensor.copy_(total)  # a detached sparse tensor would take the new entries for itself
