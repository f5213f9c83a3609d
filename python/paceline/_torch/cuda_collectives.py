"""Collectives of a process group on CUDA tensors, by way of the path of include/paceline/cuda.h.

The methods have the names and arguments of the CPU's (process_group.py). Each enqueues on streams and returns at once;
nothing here waits for the network or for the GPU. Sums and means of float32, float16 and bfloat16 are reduced on the
way; other dtypes and operations are gathered and folded on the device, in rank order, so all ranks get the same bits.
"""

import torch
import torch.distributed as dist

from paceline import _cuda
from paceline import communicator as core
from paceline._torch.arguments import one_for_each, one_per_rank, op_of, other_names, reduction, same_dtype, single
from paceline._torch.cuda_work import CudaWork, together
from paceline._torch.dtypes import Packed, dense, describe
from paceline._torch.work import as_torch_error
from paceline.errors import InvalidArgumentError, PacelineError, UnsupportedError

_REDUCED = {getattr(torch, name): code for name, code in _cuda.DTYPES.items()}
_BYTES = core.DTYPES["uint8"]
_ALIGNMENT = 16
_CODECS = {"none": _cuda.CODEC_NONE, "fp16": _cuda.CODEC_FP16, "bf16": _cuda.CODEC_BF16}


def check_codec(name):
    """The path's number of a codec that keeps nothing from step to step."""
    if name not in _CODECS:
        raise InvalidArgumentError(f"codec {name!r}: a group's sums travel as one of {', '.join(_CODECS)}")
    return _CODECS[name]


@other_names
class CudaCollectives:
    """path: a CudaCommunicator over the group's ranks; streams: cuda_work.Streams of the tensors' device."""

    def __init__(self, path, streams):
        self.path = path
        self.under_way = 0
        self._streams = streams
        self._rank, self._size = path.rank, path.size
        self._codec = _cuda.CODEC_NONE

    def compress(self, codec):
        """How sums and means of float32 travel between nodes: "none", "fp16" or "bf16"."""
        self._codec = check_codec(codec)

    def arrive(self, seconds=0.0):
        """Blocks the host until everything submitted has come over the network; raises what failed."""
        count = self.under_way
        self.path.wait_arrival(seconds)
        self.under_way -= count  # not where the wait was in vain: a step still depends on them

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None, *_):
        tensor = single(tensors)
        _require_strided(tensor)
        op = op_of(opts)
        reduce_op, factor = self._native(tensor, op)
        if reduce_op is None:
            return self._folded(tensor, tensor, op)
        memory, factor = _multiplied(tensor, factor)
        if memory is tensor and (not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT):
            memory = tensor.detach().clone(memory_format=torch.contiguous_format)

        def call():
            return self.path.all_reduce(
                memory.data_ptr(),
                memory.numel(),
                _REDUCED[memory.dtype],
                self._streams.handle(),
                reduce_op=reduce_op,
                codec=self._codec_of(memory),
                name=f"all_reduce {describe(tensor)}".encode(),
                factor=factor,
                prompt=True,
            )

        return self._submit(call, (tensor, memory), [tensor], lambda: _copy(tensor, memory))

    def allreduce_coalesced(self, tensors, opts=None):
        return together([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors, opts=None, *_):
        """The sum goes to all; only the root's tensor takes it."""
        tensor = single(tensors)
        _require_strided(tensor)
        mine = tensor if self._rank == opts.rootRank else tensor.detach().clone()
        work = self.allreduce([mine], opts)
        return self._also_holding(work, (tensor,), [tensor])

    def reduce_scatter_single(self, output, input, opts=None, *_):
        _require_strided(input)
        if input.numel() != output.numel() * self._size:
            raise InvalidArgumentError(
                f"reduce_scatter_tensor: the input has {input.numel()} elements, expected the output's "
                f"{output.numel()} × {self._size} ranks"
            )
        if input.dtype != output.dtype:
            raise InvalidArgumentError(f"reduce_scatter_tensor: {input.dtype} can't be reduced into {output.dtype}")
        op = op_of(opts)
        reduce_op, factor = self._native(input, op)
        if reduce_op is None:
            return self._folded(output, input, op, scatter=True)
        memory, factor = _multiplied(input, factor)
        memory = dense(memory)
        return self._reduce_scatter(output, memory.data_ptr(), reduce_op, factor, (input, memory))

    def _reduce_scatter(self, output, pointer, reduce_op, factor, held):
        target = dense(output)
        arguments = _cuda.CudaCollectiveArgs(
            collective=core.REDUCE_SCATTER,
            dtype=_REDUCED[target.dtype],
            reduce_op=reduce_op,
            codec=self._codec_of(target),
            input=pointer,
            output=target.data_ptr(),
            count=target.numel(),
            factor=factor,
        )
        return self._moved(arguments, "reduce_scatter", output, (*held, output, target), output, target)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        one_for_each("reduce_scatter_single_coalesced", outputs, inputs)
        return together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)])

    def reduce_scatter(self, outputs, inputs, opts=None, *_):
        output, parts = single(outputs), single(inputs, lists=True)
        one_per_rank(self._size, len(parts), "reduce_scatter's input list")
        if output.numel() != parts[self._rank].numel():
            raise InvalidArgumentError(
                f"reduce_scatter: the output has {output.numel()} elements, rank {self._rank}'s part of the input "
                f"{parts[self._rank].numel()}"
            )
        reduce_op, factor = self._native(output, op_of(opts))
        counts = [part.numel() for part in parts]
        alike = all(count == counts[0] for count in counts)
        if alike and reduce_op is not None and not isinstance(factor, torch.Tensor):
            packed = Packed(parts).pack()
            return self._reduce_scatter(output, packed.pointer(), reduce_op, factor, (*parts, packed.memory))
        if alike:
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            return self._also_holding(self.reduce_scatter_single(output, flat, opts), (flat, *parts), [output])
        # Parts of different sizes: all are reduced, and this rank keeps its own.
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        work = self.allreduce([whole], opts)
        mine = whole.split(counts)[self._rank]
        return self._then(work, lambda: output.copy_(mine.view(output.shape)), (output,), [output])

    # --- data movement ----------------------------------------------------------------------------------------------

    def broadcast(self, tensors, opts=None, *_):
        tensor = single(tensors)
        _require_strided(tensor)
        return self._broadcast(tensor, opts.rootRank)

    def _broadcast(self, tensor, root):
        target = dense(tensor)
        arguments = _cuda.CudaCollectiveArgs(
            collective=core.BROADCAST, dtype=_BYTES, root=root, output=target.data_ptr(), count=_size_of(target)
        )
        return self._moved(arguments, f"broadcast from {root}", tensor, (tensor, target), tensor, target)

    def all_gather_single(self, output, input, opts=None):
        _require_strided(input)
        same_dtype("all_gather_into_tensor", [output, input])
        if output.numel() != input.numel() * self._size:
            raise InvalidArgumentError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, expected the input's "
                f"{input.numel()} × {self._size} ranks"
            )
        source, target = dense(input), dense(output)
        held = (input, source, output, target)
        work = self._all_gather(target.data_ptr(), source, held, lambda: _copy(output, target))
        return self._also_holding(work, (), [output])

    def _all_gather(self, pointer, source, held, finish=None):
        arguments = _cuda.CudaCollectiveArgs(
            collective=core.ALL_GATHER,
            dtype=_BYTES,
            input=source.data_ptr(),
            output=pointer,
            count=_size_of(source),
            name=f"all_gather {describe(source)}".encode(),
            stream=self._streams.handle(),
        )
        return self._submit(lambda: self.path.collective(arguments), held, [], finish)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        one_for_each("all_gather_single_coalesced", outputs, inputs)
        return together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)])

    def allgather(self, outputs, inputs, opts=None, *_):
        parts, input = single(outputs, lists=True), single(inputs)
        one_per_rank(self._size, len(parts), "all_gather's output list")
        if parts[self._rank].numel() != input.numel():
            raise InvalidArgumentError(
                f"all_gather: the input has {input.numel()} elements, this rank's place in the output list "
                f"{parts[self._rank].numel()}"
            )
        if any(part.numel() != input.numel() for part in parts):
            parts[self._rank].copy_(input.view(parts[self._rank].shape))
            return together([self._broadcast(part, root) for root, part in enumerate(parts)])
        packed = Packed(parts)
        source = dense(input)
        work = self._all_gather(packed.pointer(), source, (*parts, packed.memory, input, source), packed.unpack)
        return self._also_holding(work, (), parts)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """output_lists[rank][i] takes rank's inputs[i]."""
        for row in output_lists:
            one_for_each("all_gather_coalesced", row, inputs)
        return together([self.allgather([[row[i] for row in output_lists]], [t], opts) for i, t in enumerate(inputs)])

    def gather(self, outputs, inputs, opts=None, *_):
        """All ranks get the parts; only the root keeps them."""
        input, root = single(inputs), opts.rootRank
        if self._rank == root:
            parts = single(outputs, lists=True)
        else:
            parts = [torch.empty_like(input, memory_format=torch.contiguous_format) for _ in range(self._size)]
        return self.allgather([parts], [input])

    def scatter(self, outputs, inputs, opts=None, *_):
        """The root's list goes to all; each keeps its part."""
        output, root = single(outputs), opts.rootRank
        if self._rank == root:
            parts = single(inputs, lists=True)
            one_per_rank(self._size, len(parts), "scatter's input list")
            if any(part.numel() != output.numel() for part in parts):
                raise InvalidArgumentError("scatter: every tensor of the input list must have the output's size")
            whole = torch.stack([part.detach().reshape(-1) for part in parts])
        else:
            whole = output.new_empty((self._size, output.numel()))
        work = self._broadcast(whole, root)
        mine = whole[self._rank]
        return self._then(work, lambda: output.copy_(mine.view(output.shape)), (output,), [output])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _native(self, tensor, op):
        """(the path's reduction, factor) or (None, None) for what is gathered and folded."""
        reduce_op, factor = reduction(op)
        if tensor.dtype not in _REDUCED or reduce_op not in (core.SUM, core.AVERAGE):
            return None, None
        return reduce_op, 1.0 if factor is None else factor

    def _codec_of(self, memory):
        return self._codec if memory.dtype == torch.float32 else _cuda.CODEC_NONE

    def _moved(self, arguments, what, tensor, held, output, target):
        """Submits a collective whose result lies in `target` and belongs into `output`."""
        arguments.name = f"{what} {describe(tensor)}".encode()
        arguments.stream = self._streams.handle()
        size = self._checked(lambda: self.path.scratch(arguments))
        if size:
            scratch = torch.empty(size, dtype=torch.uint8, device=self._streams.device)
            arguments.scratch, arguments.scratch_bytes = scratch.data_ptr(), size
            held = (*held, scratch)
        return self._submit(lambda: self.path.collective(arguments), held, [output], lambda: _copy(output, target))

    def _checked(self, call):
        try:
            return call()
        except PacelineError as error:
            raise as_torch_error(error) from None

    def _submit(self, call, held, result, finish=None):
        op = self._checked(call)
        self.under_way += 1
        with self._streams.on_side():
            self._checked(lambda: self.path.join(op, self._streams.side_handle()))
            if finish is not None:
                finish()
            event = self._streams.record_side()
        return CudaWork(self._streams, event, held, result, self.arrive)

    def _then(self, work, action, tensors, result):
        """The work and what is to be done on the side stream after it."""
        with self._streams.on_side():
            action()
            work._event = self._streams.record_side()
        return self._also_holding(work, tensors, result)

    def _also_holding(self, work, tensors, result):
        work._held = (*work._held, *tensors)
        work._result = list(result)
        return work

    def _folded(self, target, tensor, op, scatter=False):
        """Gathers `tensor` from all ranks and folds it in rank order; scatter: this rank's block of it."""
        fold, factor = _fold_of(op, tensor)
        source = dense(tensor)
        if factor is not None:
            source = source * factor
        every = source.new_empty((self._size, source.numel()))

        def finish():
            rows = every.view(self._size, self._size, -1)[:, self._rank] if scatter else every
            total = rows[0].clone()
            for row in rows[1:]:
                total = fold(total, row)
            if op == dist.ReduceOp.AVG:
                total = total / self._size
            target.detach().copy_(total.view(target.shape))

        work = self._all_gather(every.data_ptr(), source, (target, tensor, source, every), finish)
        return self._also_holding(work, (), [target])


def _require_strided(tensor):
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            "sparse CUDA tensors are not reduced by the process group 'paceline'; convert with to_dense(), or hand "
            "over CPU tensors"
        )


def _copy(to, of):
    if to.data_ptr() != of.data_ptr():
        to.detach().copy_(of.view(to.shape))


def _size_of(tensor):
    return tensor.numel() * tensor.element_size()


def _multiplied(tensor, factor):
    """(tensor, factor) for the path, which takes a number; PREMUL_SUM may come with a tensor."""
    if isinstance(factor, torch.Tensor):
        return dense(tensor) * factor.to(tensor.dtype), 1.0
    return tensor, factor


def _fold_of(op, tensor):
    """(function of two tensors, factor before it or None)."""
    reduce_op, factor = reduction(op)
    if reduce_op in (core.SUM, core.AVERAGE):
        return torch.add if tensor.dtype != torch.bool else torch.logical_or, factor
    folds = {core.MIN: torch.minimum, core.MAX: torch.maximum, core.PRODUCT: torch.mul}
    if reduce_op is not None:
        return folds[reduce_op], None
    bitwise = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    found = next((f for name, f in bitwise.items() if op == getattr(dist.ReduceOp, name)), None)
    if found is None:
        raise UnsupportedError(f"the reduction {op} is not known to the process group 'paceline'")
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedError(f"bitwise reductions take integers and bool, got {tensor.dtype}")
    return found, None
