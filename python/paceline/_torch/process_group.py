"""torch.distributed.init_process_group("paceline"): all collectives over the C ABI, with no Gloo beside it.

CPU tensors here; under "cpu:paceline,cuda:paceline" CUDA tensors go to cuda_group.py, which stands in front of these
methods. Newer torch takes a Backend, older torch a whole ProcessGroup; both get the same methods. torch
calls some methods by different names in different versions: the aliases are at the end of the class.
"""

import datetime

import torch
import torch.distributed as dist

from paceline import communicator as core
from paceline._torch import endpoints, lifetime, patience
from paceline._torch.arguments import (
    one_for_each,
    one_per_rank,
    op_of,
    other_names,
    reduction,
    same_dtype,
    scaled,
    single,
    split_counts,
)
from paceline._torch.cuda_group import ByDevice, CudaGroup
from paceline._torch.dtypes import Packed, dense, describe, flat_view, moved_as, require_cpu
from paceline._torch.folds import gathered_fold, sparse_all_reduce
from paceline._torch.older import MODERN
from paceline._torch.work import PacelineWork, as_torch_error, ask_python_works
from paceline.errors import InvalidArgumentError, UnsupportedError

_world = None


def create(options):
    """torch's creator function: the world's communicator, or a group on it.

    A process group whose ranks are not covered by a "paceline" world (Gloo is the default, say) gets a
    communicator of its own.
    """
    global _world
    lifetime.patch()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout = patience.given(options.timeout)
    if dist.is_initialized() and _world is not None and not _world.closed:
        group = _world.create_group(ranks)
        endpoint = endpoints.Endpoint(_world, group, options.group_rank, options.group_size)
        return _made(endpoint, timeout, False, options)
    prefix = "world" if not dist.is_initialized() else "ranks-" + "-".join(map(str, ranks))
    communicator = endpoints.make_communicator(
        options.group_rank, options.group_size, options.store, f"paceline/group/{prefix}", timeout
    )
    endpoints.own(communicator)
    if not dist.is_initialized():
        _world = communicator
    return _made(endpoints.Endpoint(communicator), timeout, True, options)


def _made(endpoint, timeout, owner, options):
    made = _flavour()(endpoint, timeout or patience.of_operations(options.timeout), owner)
    name = str(getattr(options, "group_id", "") or "group")
    world = endpoint.communicator
    made.paceline_cuda = CudaGroup(endpoint.rank, endpoint.size, options.store, name, timeout, world)
    return made


@other_names
class _Operations:
    """torch's methods; tensors live on the CPU, of any dtype and layout."""

    # torch asks for these wherever a job has a device of its own, of whole process groups too. Where a backend is made
    # in Python it asks Python, finds its own question, and asks again.
    supports_splitting = supports_shrinking = supports_window = supports_reconfigure = False
    _supports_time_estimate = False

    def __init__(self, endpoint, timeout, owner):
        super().__init__(endpoint.rank, endpoint.size)
        self.paceline_endpoint = endpoint
        self._communicator = endpoint.communicator
        self._group = endpoint.group
        self._rank = endpoint.rank
        self._size = endpoint.size
        self._timeout = timeout
        self._owner = owner
        self._is_shut = False
        self._batch = None
        self._unclaimed = set()

    # --- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None, *_):
        tensor = single(tensors)
        require_cpu([tensor])
        if tensor.layout != torch.strided:
            return self._done(lambda: sparse_all_reduce(self, tensor, op_of(opts)), [tensor])
        reduce_op, scale = reduction(op_of(opts))
        if reduce_op is None:
            return gathered_fold(self, tensor, op_of(opts), opts)
        source = scaled(dense(tensor), scale)
        target = source if source is not tensor else tensor
        dtype, flat = flat_view(target, reduce_op)
        op = self._submit(
            core.ALL_REDUCE, opts, dtype, flat, flat, reduce_op=reduce_op, name="all_reduce", shape=describe(tensor)
        )
        return self._work(op, [tensor], copies=[(tensor, target)])

    def allreduce_coalesced(self, tensors, opts=None):
        require_cpu(tensors)
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self._together(works, tensors)

    def reduce(self, tensors, opts=None, *_):
        tensor = single(tensors)
        require_cpu([tensor])
        root = opts.rootRank
        reduce_op, scale = reduction(op_of(opts))
        if reduce_op is None:
            return gathered_fold(self, tensor, op_of(opts), opts, root)
        source = scaled(dense(tensor), scale)
        target = torch.empty_like(source) if self._rank == root else source
        dtype, flat = flat_view(source, reduce_op)
        op = self._submit(
            core.REDUCE,
            opts,
            dtype,
            flat,
            target,
            reduce_op=reduce_op,
            root=root,
            name="reduce",
            shape=describe(tensor),
        )
        return self._work(op, [tensor], [(tensor, target)] if self._rank == root else [], keep=source)

    def reduce_scatter(self, outputs, inputs, opts=None, *_):
        output, parts = single(outputs), single(inputs, lists=True)
        require_cpu([output, *parts])
        same_dtype("reduce_scatter", [output, *parts])
        one_per_rank(self._size, len(parts), "reduce_scatter's input list")
        if output.numel() != parts[self._rank].numel():
            raise InvalidArgumentError(
                f"reduce_scatter: the output has {output.numel()} elements, rank {self._rank}'s part of the input "
                f"{parts[self._rank].numel()}"
            )
        scale = reduction(op_of(opts))[1]
        return self._reduce_scatter(output, Packed(parts, apart=scale is not None).pack(), opts)

    def reduce_scatter_single(self, output, input, opts=None, *_):
        require_cpu([output, input])
        same_dtype("reduce_scatter_tensor", [output, input])
        if input.numel() != output.numel() * self._size:
            raise InvalidArgumentError(
                f"reduce_scatter_tensor: the input has {input.numel()} elements, expected the output's "
                f"{output.numel()} × {self._size} ranks"
            )
        packed = Packed([dense(input).view(-1)])
        packed.counts = [output.numel()] * self._size
        return self._reduce_scatter(output, packed, opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        one_for_each("reduce_scatter_single_coalesced", outputs, inputs)
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs)]
        return self._together(works, outputs)

    def _reduce_scatter(self, output, packed, opts):
        reduce_op, scale = reduction(op_of(opts))
        if reduce_op is None:
            raise UnsupportedError("reduce_scatter takes SUM, AVG, MIN, MAX, PRODUCT and PREMUL_SUM")
        source = scaled(packed.memory.reshape(-1), scale)
        factor = 2 if source.is_complex() else 1
        dtype, flat = flat_view(source, reduce_op)
        target = dense(output)
        op = self._submit(
            core.REDUCE_SCATTER,
            opts,
            dtype,
            flat,
            target,
            count=flat.numel(),
            counts=[count * factor for count in packed.counts],
            reduce_op=reduce_op,
            name="reduce_scatter",
            shape=describe(source),
        )
        return self._work(op, [output], [(output, target)], keep=(source, packed))

    # --- data movement ----------------------------------------------------------------------------------------------

    def broadcast(self, tensors, opts=None, *_):
        tensor = single(tensors)
        require_cpu([tensor])
        target = dense(tensor)
        dtype, factor = moved_as(tensor)
        op = self._submit(
            core.BROADCAST,
            opts,
            dtype,
            target,
            target,
            count=target.numel() * factor,
            root=opts.rootRank,
            name="broadcast",
            shape=describe(tensor),
        )
        mine = self._rank == opts.rootRank  # it has what it sent
        return self._work(op, [tensor], [] if mine else [(tensor, target)], keep=target)

    def allgather(self, outputs, inputs, opts=None, *_):
        parts, input = single(outputs, lists=True), single(inputs)
        require_cpu([input, *parts])
        same_dtype("all_gather", [input, *parts])
        one_per_rank(self._size, len(parts), "all_gather's output list")
        if parts[self._rank].numel() != input.numel():
            raise InvalidArgumentError(
                f"all_gather: the input has {input.numel()} elements, this rank's place in the output list "
                f"{parts[self._rank].numel()}"
            )
        packed = Packed(parts)
        return self._all_gather(packed.memory, packed.counts, input, opts, parts, packed.unpack)

    def all_gather_single(self, output, input, opts=None):
        require_cpu([output, input])
        same_dtype("all_gather_into_tensor", [output, input])
        if output.numel() != input.numel() * self._size:
            raise InvalidArgumentError(
                f"all_gather_into_tensor: the output has {output.numel()} elements, expected the input's "
                f"{input.numel()} × {self._size} ranks"
            )
        target = dense(output)
        return self._all_gather(target, None, input, opts, [output], copies=[(output, target)])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        one_for_each("all_gather_single_coalesced", outputs, inputs)
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs)]
        return self._together(works, outputs)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        """output_lists[rank][i] takes rank's inputs[i]."""
        for row in output_lists:
            one_for_each("all_gather_coalesced", row, inputs)
        works = [self.allgather([[row[i] for row in output_lists]], [t], opts) for i, t in enumerate(inputs)]
        return self._together(works, [t for row in output_lists for t in row])

    def _all_gather(self, target, counts, input, opts, result, finish=None, copies=()):
        source = dense(input)
        dtype, factor = moved_as(source)
        op = self._submit(
            core.ALL_GATHER,
            opts,
            dtype,
            source,
            target,
            count=source.numel() * factor,
            counts=None if counts is None else [count * factor for count in counts],
            name="all_gather",
            shape=describe(input),
        )
        return self._work(op, result, copies, finish, keep=(source, target))

    def gather(self, outputs, inputs, opts=None, *_):
        input = single(inputs)
        root = opts.rootRank
        source = dense(input)
        dtype, factor = moved_as(source)
        packed = None
        require_cpu([input])
        if self._rank == root:
            parts = single(outputs, lists=True)
            require_cpu(parts)
            same_dtype("gather", [input, *parts])
            one_per_rank(self._size, len(parts), "gather's output list")
            if any(part.numel() != input.numel() for part in parts):
                raise InvalidArgumentError("gather: every tensor of the output list must have the input's size")
            packed = Packed(parts)
        op = self._submit(
            core.GATHER,
            opts,
            dtype,
            source,
            packed.memory if packed else None,
            count=source.numel() * factor,
            root=root,
            name="gather",
            shape=describe(input),
        )
        result = packed.tensors if packed else []
        return self._work(op, result, finish=packed.unpack if packed else None, keep=(source, packed))

    def scatter(self, outputs, inputs, opts=None, *_):
        output = single(outputs)
        root = opts.rootRank
        target = dense(output)
        dtype, factor = moved_as(target)
        packed = None
        require_cpu([output])
        if self._rank == root:
            parts = single(inputs, lists=True)
            require_cpu(parts)
            same_dtype("scatter", [output, *parts])
            one_per_rank(self._size, len(parts), "scatter's input list")
            if any(part.numel() != output.numel() for part in parts):
                raise InvalidArgumentError("scatter: every tensor of the input list must have the output's size")
            packed = Packed(parts).pack()
        op = self._submit(
            core.SCATTER,
            opts,
            dtype,
            packed.memory if packed else None,
            target,
            count=target.numel() * factor,
            root=root,
            name="scatter",
            shape=describe(output),
        )
        return self._work(op, [output], [(output, target)], keep=packed)

    def alltoall(self, outputs, inputs, opts=None, *_):
        require_cpu([*outputs, *inputs])
        same_dtype("all_to_all", [*outputs, *inputs])
        one_per_rank(self._size, len(outputs), "all_to_all's output list")
        one_per_rank(self._size, len(inputs), "all_to_all's input list")
        source, target = Packed(inputs).pack(), Packed(outputs)
        return self._all_to_all(
            target.memory, source.memory, target.counts, source.counts, opts, outputs, target.unpack, (source, target)
        )

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None, *_):
        require_cpu([output, input])
        same_dtype("all_to_all_single", [output, input])
        source, target = dense(input), dense(output)
        send = split_counts(input, input_splits, self._size, "input")
        receive = split_counts(output, output_splits, self._size, "output")
        return self._all_to_all(target, source, receive, send, opts, [output], None, source, copies=[(output, target)])

    alltoall_base = all_to_all_single

    def _all_to_all(self, target, source, receive, send, opts, result, finish, keep, copies=()):
        dtype, factor = moved_as(source)
        op = self._submit(
            core.ALL_TO_ALL,
            opts,
            dtype,
            source,
            target,
            count=sum(send) * factor,
            send_counts=[n * factor for n in send],
            receive_counts=[n * factor for n in receive],
            name="all_to_all",
            shape=describe(source),
        )
        return self._work(op, result, copies, finish, keep=(keep, source, target))

    # --- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors, peer, tag=0):
        tensor = single(tensors)
        require_cpu([tensor])
        source = dense(tensor)
        op = self._communicator.send(
            source.data_ptr(),
            source.numel() * source.element_size(),
            peer,
            tag,
            self._group,
            f"send {describe(tensor)} to rank {peer}",
            self._timeout,
            describe(tensor),
        )
        return self._work(op, [tensor], keep=source)

    def recv(self, tensors, peer, tag=0):
        tensor = single(tensors)
        require_cpu([tensor])
        target = dense(tensor)
        op = self._communicator.receive(
            target.data_ptr(),
            target.numel() * target.element_size(),
            peer,
            tag,
            self._group,
            f"recv {describe(tensor)} from rank {peer}",
            self._timeout,
            describe(tensor),
        )
        return self._work(op, [tensor], [(tensor, target)])

    def recv_anysource(self, _tensors, _tag=0):
        raise as_torch_error(
            UnsupportedError("recv() without a source is not offered by the process group 'paceline': name the source")
        )

    # --- the rest ---------------------------------------------------------------------------------------------------

    def barrier(self, opts=None, *_):
        op = self._submit(core.BARRIER, opts, 0, None, None, count=0, name="barrier")
        return self._work(op, [])

    def monitored_barrier(self, opts=None, wait_all_ranks=False):
        """A barrier that names the rank that did not come. opts: BarrierOptions or a timedelta."""
        self.barrier(opts).wait()

    def set_timeout(self, timeout):
        """For operations from now on."""
        chosen = patience.given(timeout)
        self._timeout = chosen or patience.of_operations(timeout)
        if self.paceline_cuda is not None:
            self.paceline_cuda.set_timeout(chosen)

    _set_default_timeout = set_timeout

    @property
    def supports_coalescing(self):
        return True

    def start_coalescing(self, *_):
        self._batch = []

    def end_coalescing(self, *_):
        works, self._batch = self._batch or [], None
        return self._together(works, [])

    def _end_coalescing(self, *_):
        """As end_coalescing(); torch before 2.0 waits for the batch's own Works and drops what this would return."""
        if MODERN:
            return self.end_coalescing()
        self._batch = None

    def getBackendName(self):
        return "paceline"

    def shutdown(self):
        if self._is_shut:  # by torch already
            return
        self._is_shut = True
        if self._owner:
            self._communicator.close()
        elif not self._communicator.closed:
            self._communicator.destroy_group(self._group)

    def abort(self, *_):
        self._communicator.abort(f"rank {self._rank} called abort() on its process group")

    def _set_sequence_number_for_group(self):
        """The engine numbers operations itself."""

    # --- inside -----------------------------------------------------------------------------------------------------

    def _submit(self, collective, opts, dtype, source, target, count=None, **arguments):
        timeout = getattr(opts, "timeout", opts)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            return self._communicator.submit(
                collective,
                dtype=dtype,
                input=source.data_ptr() if source is not None else None,
                output=target.data_ptr() if target is not None else None,
                count=source.numel() if count is None else count,
                group=self._group,
                timeout=seconds if seconds > 0 else self._timeout,
                **arguments,
            )
        except Exception as error:
            raise as_torch_error(error) from None

    def _work(self, op, result, copies=(), finish=None, keep=None):
        copies = [(to, of) for to, of in copies if to.data_ptr() != of.data_ptr()]

        def copy_out():
            for to, of in copies:
                to.detach().copy_(of.view(to.shape))
            if finish is not None:
                finish()

        held = (keep, copies, result)
        work = self._hand_out(PacelineWork(self._communicator, [op], copy_out, held, result, self._claim))
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _hand_out(self, work):
        """Older torch's C++ keeps only its half of the object alive: it is ours until someone waits for it."""
        if not _IS_BACKEND:
            self._unclaimed.add(work)
        return work

    def _claim(self, work):
        self._unclaimed.discard(work)

    def _together(self, works, result):
        """One Work for several."""
        operations = [op for work in works for op in work.hand_over()]

        def finish_all():
            for work in works:
                work.finish()

        whole = PacelineWork(self._communicator, operations, finish_all, works, result, self._claim)
        for work in works:
            work.follow(whole)
        if self._batch is not None:
            self._batch = [work for work in self._batch if work not in works] + [whole]
        return self._hand_out(whole)

    def _done(self, action, result):
        return self._hand_out(PacelineWork(self._communicator, [], action, None, result, self._claim))

    _start_coalescing = start_coalescing


class PacelineProcessGroup(ByDevice, _Operations, dist.ProcessGroup):
    """Older torch's flavour: a whole process group, for all devices; torch 2 asks it for its names and backends."""

    _paceline_name = _paceline_desc = ""

    def _get_backend(self, _device):
        return self

    @property
    def group_name(self):
        return self._paceline_name

    def _set_group_name(self, name):
        self._paceline_name = name

    @property
    def group_desc(self):
        return self._paceline_desc

    def _set_group_desc(self, description):
        self._paceline_desc = description


def _can_be_made(kind):
    """Whether Python may make one: torch has the class Backend since 2.0, its constructor only since later."""
    try:
        kind(0, 1)
    except TypeError:
        return False
    return True


_Backend = getattr(torch._C._distributed_c10d, "Backend", None)
_IS_BACKEND = _Backend is not None and _can_be_made(_Backend)
if _IS_BACKEND:

    class PacelineBackend(ByDevice, _Operations, _Backend):
        """Newer torch's flavour: one of the backends of a process group."""

        @property
        def options(self):
            timeout = datetime.timedelta(seconds=self._timeout) if self._timeout else patience.default()
            return _Backend.Options("paceline", timeout)


def _flavour():
    if not _IS_BACKEND:
        return PacelineProcessGroup
    ask_python_works()
    return PacelineBackend
