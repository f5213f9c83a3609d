"""DDP's comm hook for models on the CPU.

When the backward pass ends, just before DDP's own finalizer, the calling thread waits for the operations itself: no
other thread has to be woken, and a failure is raised from backward() with its own type. So DDP looks at a bucket's
future when all is there, and the future may be complete from the beginning; where it looks at once it gets another.
"""

import contextlib
import time

import torch
from torch.futures import Future

from paceline import communicator as core
from paceline._torch import shared_pages
from paceline._torch.attachment import Attachment, average_by_process_group, completed, first_tensor
from paceline._torch.dtypes import flat_view
from paceline.errors import PacelineError

#: -1 where no backward pass runs; torch 1 does not tell.
_backward_pass = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_KEEPS_TYPES = hasattr(torch, "compile")  # of what a hook raises: torch 2
_SLACK = 0.002  # seconds; below, the network is as fast as the backward pass


class CpuAttachment(Attachment):
    """A model on the CPU, and the operations of the backward pass under way."""

    def __init__(self, ddp, endpoint):
        super().__init__(ddp, endpoint)
        self._running = []  # (operation, future that is to be completed or None, buffer, what is kept of its bucket)
        self._passes = 0
        self._looked_at_late = False
        self._waited = 0.0  # seconds, at the end of the last pass

    def other_buckets(self):
        """See Attachment. In its first pass DDP may have the whole model in one bucket: its memory is free now."""
        other = super().other_buckets()
        if other and self._rebuilt:
            self.endpoint.communicator.trim()
        return other

    def all_reduce(self, bucket):
        """Submits the average of a bucket over the ranks; the future holds the bucket's own buffer."""
        buffer, index, last = bucket.buffer(), bucket.index(), bucket.is_last()
        if index == 0:
            self._finish()  # what a backward pass that raised has left behind
            self.begin_pass()
            self._looked_at_late = _backward_pass() >= 0 and not self._starts_all_at_its_end()
        known = self.known(index, buffer)
        if known is None:
            if buffer.layout != torch.strided:
                future = self._by_process_group(buffer, last)
                if last:
                    self._finish_with_backward()
                return future
            known = self.keep(index, buffer, self.prepare(buffer, *self.layout(bucket)))
        elif known.pages is None:  # in its second pass: in the first ones DDP may cut its buckets anew
            known.pages = shared_pages.of_bucket(self.endpoint.communicator, buffer)
        steps = self.endpoint.steps
        steps.submitted(not self._running, self.model)  # sparse gradients may come before a pass's first
        try:
            op = self.submit(known.calls)
        except BaseException:
            steps.ended(True, 1, self.model)
            raise
        if index == 0 and self._waited > _SLACK:
            # The network waits for the last rank of the node, and this one has time to spare at the end.
            self.endpoint.communicator.give_way(op, self._waited / 2)
        if self._looked_at_late:
            if known.future is None:
                known.future = completed(buffer)
            self._running.append((op, None, buffer, known))
            future = known.future
        else:
            future = Future()
            self._running.append((op, future, buffer, known))
        if last:
            self._finish_with_backward()
        return future

    def failed(self, error, buffer):
        """See Attachment. What a hook raises in a backward pass is a RuntimeError with its text on torch 1; what the
        end of the pass raises keeps its type.
        """
        if _KEEPS_TYPES or self._starts_all_at_its_end():
            raise error

        def tell():
            raise error

        try:
            torch.autograd.Variable._execution_engine.queue_callback(tell)
        except RuntimeError:  # not in a backward pass
            raise error from None
        self.failure = error
        return completed(buffer)

    def prepare(self, buffer, segments, name):
        """The call that averages a bucket's buffer in place, for submit()."""
        dtype, flat = flat_view(buffer)
        return self.endpoint.communicator.prepare(
            core.ALL_REDUCE,
            dtype=dtype,
            input=flat.data_ptr(),
            output=flat.data_ptr(),
            count=flat.numel(),
            reduce_op=core.AVERAGE,
            group=self.endpoint.group,
            codec=core.CODEC_SETTINGS,  # whose codec is for float32; all else travels exactly
            segments=segments,
            name=name,
            shape=str(list(buffer.shape)),
        )

    def submit(self, call, window=0):
        """Submits what prepare() has returned; returns the operation. window: see Communicator.submit()."""
        return self.endpoint.communicator.submit_prepared(call, window)

    def _starts_all_at_its_end(self):
        """Whether DDP starts all buckets of this pass when it has ended, and waits for them at once."""
        return self._passes == 0 and getattr(self._ddp(), "static_graph", False)

    def _finish_with_backward(self):
        at_its_end = self._starts_all_at_its_end()
        self._passes += 1
        if at_its_end:
            self._watch()
            return
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        except RuntimeError:  # not in a backward pass: a joined rank shadows the others' buckets
            self._watch()

    def _finish(self):
        """Waits for the operations of this backward pass, on the thread that runs it."""
        running, self._running = self._running, []
        if not running:
            return
        factor = self._join_factor()
        finite = True
        ended = 0
        began = time.monotonic()
        try:
            for op, *_ in running:
                finite = self.endpoint.communicator.wait(op) and finite
                ended += 1
        except PacelineError:
            ended = len(running)  # the communicator's others have ended with it
            raise
        finally:
            self._waited = time.monotonic() - began
            self._running = running[ended:]  # a signal's handler has raised: they still write into the buckets
            self.endpoint.steps.ended(finite, ended, self.model)
        for _, future, buffer, _ in running:
            if factor is not None:
                buffer.mul_(factor)
            if future is not None:
                future.set_result(buffer)

    def _watch(self):
        """Completes the futures from the completion thread."""
        running, self._running = self._running, []
        for op, future, buffer, known in running:
            self.endpoint.communicator.watch(
                op, _Completion(future, buffer, self.endpoint.steps, self.model), (buffer, known)
            )

    def __del__(self):
        super().__del__()
        # A backward pass has raised, its model is gone: the engine writes into the buckets until they have ended.
        communicator = self.endpoint.communicator if self.__dict__.get("_running") else None
        if communicator is None or communicator.closed:
            return
        for op, _, buffer, known in self._running:
            with contextlib.suppress(RuntimeError):  # it has ended, with the job or the process
                communicator.watch(op, _Dropped(self.endpoint.steps, self.model), (buffer, known))

    def _by_process_group(self, buffer, last):
        future = average_by_process_group(self.process_group(), buffer, self.endpoint.size)
        factor = self._join_factor(ends=last and not self._running)
        return future if factor is None else future.then(lambda averaged: averaged.value().mul_(factor))

    def _join_factor(self, ends=True):
        """join(divide_by_initial_world_size=False): the mean over the ranks that still have inputs.

        ends: the pass has nothing left that asks for it.
        """
        work = self.join_work
        if ends:
            self.join_work = None
        ddp = self._ddp()
        if work is None or ddp is None or getattr(ddp, "_divide_by_initial_world_size", True):
            return None
        work.wait()
        return self.endpoint.size / first_tensor(work).item()


class _Dropped:
    """The end of an operation that nobody waits for."""

    def __init__(self, steps, model):
        self.steps, self.model = steps, model

    def __call__(self, error, finite):
        self.steps.ended(finite and error is None, 1, self.model)


class _Completion:
    def __init__(self, future, buffer, steps, model):
        self.future, self.buffer, self.steps, self.model = future, buffer, steps, model

    def __call__(self, error, finite):
        self.steps.ended(finite and error is None, 1, self.model)
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.buffer)
