"""DDP's comm hook for CUDA models: a bucket is handed over in stream order and the host goes on at once.

The futures that DDP gets are completed with the last bucket of the pass, when the stream that computes has joined all
of them: a stream that waited beside it would slow its kernels down. DDP looks at them only afterwards. Nothing here
waits for the network; the optimizer's step does (cuda_steps.py).
"""

import torch
from torch.futures import Future

from paceline import _cuda
from paceline._torch import buckets, rows
from paceline._torch.attachment import Attachment, average_by_process_group, first_tensor

_DTYPES = {getattr(torch, name): code for name, code in _cuda.DTYPES.items()}
_HALF = (torch.float16, torch.bfloat16)
_RESIDUAL_CODECS = ("topk", "int8")


class CudaAttachment(Attachment):
    """A model on one CUDA device."""

    def __init__(self, ddp, endpoint):
        super().__init__(ddp, endpoint)
        # Before DDP has seen a backward pass, all gradients may lie in one bucket.
        size = self._gradient_bytes()
        endpoint.reserve(size, size)
        self._encoded_names = {}
        self._rows = rows.of_model(ddp.module, endpoint.codec)
        self._parts = {}
        rows.say(endpoint.rank, self._rows, self.keyed_parameters())
        self._open = []  # (future, buffer, operation) of this pass
        #: torch's optimizers fused into the backward pass look at a bucket's future at once.
        self._each_at_once = any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters())

    def _gradient_bytes(self):
        return sum(p.numel() * p.element_size() for _, p, _ in self.keyed_parameters())

    def usual_elements(self):
        """Elements of a bucket of the size that Paceline chooses for this model, as if they were float32."""
        return buckets.usual_size(self._gradient_bytes()) // 4

    def all_reduce(self, bucket):
        """Enqueues the average of a bucket over the ranks; the future holds the bucket's own buffer."""
        buffer = bucket.buffer()
        endpoint = self.endpoint
        if bucket.index() == 0:
            self._open = []  # a pass that raised has left them
        if not self.carries(buffer):
            if bucket.is_last():
                self._complete()
            return average_by_process_group(self.process_group(), buffer, endpoint.size)
        steps = endpoint.steps
        steps.submitted(bucket.index() == 0, self._model)
        try:
            op = self.submit(buffer, *self.encoded_layout(bucket))
        except BaseException:
            steps.not_submitted()
            raise
        future = Future(devices=[endpoint.device])
        if self._each_at_once or self.join_work is not None:
            self._complete_aside(future, buffer, op, bucket.is_last())
            return future
        self._open.append((future, buffer, op))
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self):
        """The current stream joins the pass's operations; a later one's end is behind all earlier ones."""
        open_, self._open = self._open, []
        if not open_:
            return
        endpoint = self.endpoint
        stream = torch.cuda.current_stream(endpoint.device)
        endpoint.communicator.join(open_[-1][2], stream.cuda_stream)
        for future, buffer, _ in open_:
            future.set_result(buffer)

    def _complete_aside(self, future, buffer, op, last):
        """One operation, joined by a stream of its own."""
        side = self.endpoint.side
        with torch.cuda.stream(side):
            self.endpoint.communicator.join(op, side.cuda_stream)
            buffer.record_stream(side)
            self._apply_join_factor(buffer, last)
            future.set_result(buffer)

    def carries(self, buffer):
        """Whether the path takes the buffer; others travel by torch's process group."""
        return buffer.dtype in _DTYPES and buffer.layout == torch.strided

    def submit(self, buffer, segments, name, parts=()):
        """Enqueues the average of a bucket's buffer, in place, behind the current stream; returns the (last) op."""
        if not parts:
            return self._submit(buffer.data_ptr(), buffer.numel(), buffer.dtype, name, segments=segments)
        operation = 0
        for first, elements, row_elements, part_name in parts:
            pointer = buffer.data_ptr() + first * buffer.element_size()
            operation = self._submit(pointer, elements, buffer.dtype, part_name, row_elements=row_elements)
        return operation

    def submit_span(self, buffer, first, elements, name):
        """The same for some elements of a bucket, without residuals: the ranks cut it alike."""
        pointer = buffer.data_ptr() + first * buffer.element_size()
        return self._submit(pointer, elements, buffer.dtype, b"%s, %d" % (name, first))

    def _submit(self, pointer, elements, dtype, name, **arguments):
        endpoint = self.endpoint
        return endpoint.communicator.all_reduce(
            pointer,
            elements,
            _DTYPES[dtype],
            torch.cuda.current_stream(endpoint.device).cuda_stream,
            codec=self._codec(dtype),
            momentum=endpoint.momentum,
            name=name,
            **arguments,
        )

    def _codec(self, dtype):
        """Gradients of 16 bits gain nothing from a cast to 16 bits."""
        if dtype in _HALF and self.endpoint.codec not in _RESIDUAL_CODECS:
            return _cuda.CODEC_NONE
        return _cuda.CODEC_SETTINGS

    def _apply_join_factor(self, buffer, last):
        """join(divide_by_initial_world_size=False): the mean over the ranks that still have inputs."""
        work = self.join_work
        if work is None:
            return
        if last:
            self.join_work = None
        ddp = self._ddp()
        if ddp is None or getattr(ddp, "_divide_by_initial_world_size", True):
            return
        work.wait()
        buffer.mul_(self.endpoint.size / first_tensor(work).to(buffer.device, buffer.dtype))

    def encoded_layout(self, bucket):
        """The bucket's segments, its name as the C ABI takes it, and what it is cut into, for submit()."""
        segments, name = self.layout(bucket)
        if name not in self._encoded_names:
            self._encoded_names[name] = name.encode()
        return segments, self._encoded_names[name], self._parts_of(bucket, name) if self._rows else ()

    def _parts_of(self, bucket, name):
        """[(first element, elements, elements of a row or 0, name)]; empty where the bucket travels whole."""
        parameters = bucket.parameters()
        key = (bucket.index(), *map(id, parameters))
        if key not in self._parts:
            cut = rows.parts(parameters, self._rows, bucket.buffer().element_size())
            self._parts[key] = [
                (
                    first,
                    elements,
                    row_elements,
                    (self._rows_name(weight) if row_elements else f"{name}, {first}").encode(),
                )
                for first, elements, row_elements, weight in cut
            ]
        return self._parts[key]

    def _rows_name(self, weight):
        """What the path has met of these rows goes by their name: it must outlive DDP's first cut of the buckets."""
        return f"{self._names[id(weight)]} of model {self._model}, by rows"
