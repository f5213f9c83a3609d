"""Arguments of torch's process group methods, checked and in the engine's terms."""

import torch
import torch.distributed as dist

from paceline import communicator as core
from paceline.errors import InvalidArgumentError, UnsupportedError


def single(tensors, lists=False):
    """torch hands a list with one entry per device of the rank; there is one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if lists and tensors and isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise InvalidArgumentError(f"expected the tensors of one device, got {len(tensors)}")
    return tensors[0]


def op_of(opts):
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def reduction(op):
    """(the engine's reduction, factor before it or None); (None, None) for the bitwise ones."""
    native = (
        (dist.ReduceOp.SUM, core.SUM),
        (dist.ReduceOp.AVG, core.AVERAGE),
        (dist.ReduceOp.MIN, core.MIN),
        (dist.ReduceOp.MAX, core.MAX),
        (dist.ReduceOp.PRODUCT, core.PRODUCT),
    )
    for candidate, code in native:
        if op == candidate:
            return code, None
    if op == getattr(dist.ReduceOp, "PREMUL_SUM", None):
        state = op.__getstate__()
        if not isinstance(state, tuple):
            raise UnsupportedError(
                f"torch {torch.__version__} does not tell the factor of PREMUL_SUM; multiply the tensor and use SUM"
            )
        return core.SUM, state[1]
    return None, None


def scaled(tensor, factor):
    """Before PREMUL_SUM, in the tensor's own dtype: its result has the same."""
    if factor is None:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedError(f"PREMUL_SUM takes floating and complex types, got {tensor.dtype}; multiply and use SUM")
    return (tensor * factor).to(tensor.dtype)


def split_counts(tensor, splits, size, what):
    """Rows per rank as elements per rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    width = tensor.numel() // rows if rows else 0
    splits = list(splits)
    if not splits:
        if rows % size:
            raise InvalidArgumentError(
                f"all_to_all_single: the {what}'s {rows} rows can't be split evenly among {size} ranks; pass "
                "split sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidArgumentError(
            f"all_to_all_single: {what} split sizes {splits} must be {size} numbers that add up to {rows} rows"
        )
    return [n * width for n in splits]


def one_per_rank(size, length, what):
    """Raises InvalidArgumentError unless a list has a tensor for each rank of the group."""
    if length != size:
        raise InvalidArgumentError(f"{what} has {length} tensors, the group {size} ranks")


def same_dtype(what, tensors):
    """Raises InvalidArgumentError unless all have one dtype: bytes are moved, not numbers."""
    kinds = sorted({str(tensor.dtype) for tensor in tensors})
    if len(kinds) > 1:
        raise InvalidArgumentError(f"{what}: inputs and outputs have different dtypes, {' and '.join(kinds)}")


def one_for_each(what, outputs, inputs):
    """Raises InvalidArgumentError unless there are as many outputs as inputs: others would stay as they are."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(f"{what} takes an output for each input, got {len(outputs)} and {len(inputs)}")


def other_names(operations):
    """A class of collectives: the names under which other versions of torch call them."""
    operations._allgather_base = operations.all_gather_single
    operations._reduce_scatter_base = operations.reduce_scatter_single
    operations.allgather_into_tensor_coalesced = operations.all_gather_single_coalesced
    operations.reduce_scatter_tensor_coalesced = operations.reduce_scatter_single_coalesced
    return operations
