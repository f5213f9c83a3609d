"""DDP's comm hook for CUDA models: a bucket is handed over in stream order and the host goes on at once.

DDP looks at the futures that it gets when the pass has ended. One of them is completed with the last bucket of the
pass, when the stream that computes has joined all: a stream that waited beside it would slow its kernels down. The
others need say nothing, and are complete from the beginning. What waits for the network is the optimizer's step or,
where that has a gate, the next pass's first bucket (cuda_steps.py); a table's rows wait for what the last pass said.

The hook stands in the way of the thread that launches the model's kernels, and models of many small kernels have none
to spare: what a bucket's call needs is worked out once (CudaCommunicator.prepare) and kept until DDP makes other ones.
"""

import torch
from torch.futures import Future

from paceline import _cuda
from paceline._torch import buckets, rows
from paceline._torch.attachment import Attachment, average_by_process_group, first_tensor
from paceline.errors import PacelineError

_DTYPES = {getattr(torch, name): code for name, code in _cuda.DTYPES.items()}
_HALF = (torch.float16, torch.bfloat16)
_RESIDUAL_CODECS = ("topk", "int8")


def stream_handle(device):
    """The stream on which work for the device is enqueued now."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class CudaAttachment(Attachment):
    """A model on one CUDA device."""

    residual_dtypes = (torch.float32, *_HALF)

    def __init__(self, ddp, endpoint):
        super().__init__(ddp, endpoint)
        # Before DDP has seen a backward pass, all gradients may lie in one bucket.
        endpoint.reserve(self.model, self._float32_bytes() if endpoint.steps.enabled else self._gradient_bytes())
        self._under_way = []  # buckets that this pass has handed over and nothing is ordered after yet
        self._encoded_names = {}
        self._rows = rows.of_model(ddp.module, endpoint.codec)
        self._parts = {}
        rows.say(self._rows, self.keyed_parameters())
        self._open = None  # (future, buffer) that is completed with this pass
        self._begun = False  # whether the path has something of this pass: what it does not carry may come before
        self._last = 0  # operation of this pass
        #: torch's optimizers fused into the backward pass look at a bucket's future at once.
        self._each_at_once = any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters())

    def __del__(self):
        super().__del__()
        endpoint = self.__dict__.get("endpoint")
        if endpoint is None:
            return
        endpoint.release(self.__dict__.get("model"))
        # A backward pass has raised, its model is gone: the path writes into the buckets until they have ended.
        endpoint.steps.keep(self.__dict__.get("_under_way"))

    def _float32_bytes(self):
        """What residuals take."""
        return sum(4 * p.numel() for _, p, _ in self.keyed_parameters())

    def _gradient_bytes(self):
        return sum(p.numel() * p.element_size() for _, p, _ in self.keyed_parameters())

    def usual_elements(self):
        """Elements of a bucket of the size that Paceline chooses for this model, as if they were float32."""
        return buckets.usual_size(self._gradient_bytes()) // 4

    def all_reduce(self, bucket):
        """Enqueues the average of a bucket over the ranks; the future holds the bucket's own buffer."""
        buffer, index, last = bucket.buffer(), bucket.index(), bucket.is_last()
        if index == 0:
            self._open = None  # a pass that raised has left it
            self.endpoint.steps.keep(self._under_way)  # and these
            self._under_way = []
            self._begun = False
            self.begin_pass()
        known = self.known(index, buffer)
        if known is None:
            if not self.carries(buffer):
                if last:
                    self._complete()
                return self._by_process_group(buffer, last)
            known = self.keep(index, buffer, self.prepare(buffer, *self.encoded_layout(bucket)))
        steps = self.endpoint.steps
        steps.submitted(not self._begun, self.model)
        self._begun = True
        try:
            self._last = self.submit(known.calls)
        except BaseException:
            steps.not_submitted(self.model)
            raise
        if self._each_at_once or self.join_work is not None:
            future = Future(devices=[self.endpoint.device])
            self._complete_aside(future, buffer, self._last, last)
            return future
        self._under_way.append(buffer)
        if self._open is None:
            future = Future(devices=[self.endpoint.device])
            self._open = future, buffer
        else:
            future = known.future
            if future is None:
                future = known.future = Future(devices=[self.endpoint.device])
                future.set_result(buffer)
        if last:
            self._complete()
        return future

    def _complete(self):
        """The current stream joins the pass's operations; a later one's end is behind all earlier ones."""
        open_, self._open = self._open, None
        if open_ is None:
            return
        endpoint = self.endpoint
        endpoint.join(self._last, stream_handle(endpoint.device))
        self._under_way.clear()
        future, buffer = open_
        future.set_result(buffer)

    def _complete_aside(self, future, buffer, op, last):
        """One operation, joined by a stream of its own."""
        side = self.endpoint.side
        with torch.cuda.stream(side):
            self.endpoint.join(op, side.cuda_stream)
            buffer.record_stream(side)
            self._apply_join_factor(buffer, last)
            future.set_result(buffer)

    def carries(self, buffer):
        """Whether the path takes the buffer; others travel by torch's process group."""
        return buffer.dtype in _DTYPES and buffer.layout == torch.strided

    def prepare(self, buffer, segments, name, parts=()):
        """The calls that average a bucket's buffer in place, for submit()."""
        if not parts:
            return [self._prepared(buffer, 0, buffer.numel(), name, segments=segments)]
        return [
            self._prepared(buffer, first, elements, part_name, row_elements=row_elements)
            for first, elements, row_elements, part_name in parts
        ]

    def prepare_span(self, buffer, first, elements, name):
        """The same for some elements of a bucket, without residuals: the ranks cut it alike."""
        return [self._prepared(buffer, first, elements, b"%s, %d" % (name, first))]

    def prepare_exactly(self, buffer, name):
        """The same without a codec, whatever the settings say."""
        return [self._prepared(buffer, 0, buffer.numel(), name, codec=_cuda.CODEC_NONE)]

    def submit(self, calls):
        """Enqueues them behind the current stream; returns the (last) operation."""
        communicator, operation = self.endpoint.communicator, 0
        stream = stream_handle(self.endpoint.device)
        try:
            for call in calls:
                operation = communicator.submit(call, stream)
        except PacelineError as error:
            self.endpoint.steps.failed(error)
            raise
        self.endpoint.steps.sent(self.model, operation)
        return operation

    def _prepared(self, buffer, first, elements, name, codec=None, **arguments):
        return self.endpoint.communicator.prepare(
            buffer.data_ptr() + first * buffer.element_size(),
            elements,
            _DTYPES[buffer.dtype],
            codec=self._codec(buffer.dtype) if codec is None else codec,
            momentum=self.endpoint.momentum,
            name=name,
            **arguments,
        )

    def _codec(self, dtype):
        """Gradients of 16 bits gain nothing from a cast to 16 bits."""
        if dtype in _HALF and self.endpoint.codec not in _RESIDUAL_CODECS:
            return _cuda.CODEC_NONE
        return _cuda.CODEC_SETTINGS

    def _by_process_group(self, buffer, last):
        self.endpoint.steps.torch_carries()
        future = average_by_process_group(self.process_group(), buffer, self.endpoint.size)
        ranks = self._joined_ranks(last)
        if ranks is None:
            return future
        factor = (self.endpoint.size / ranks.to(buffer.device, buffer.dtype)).reshape(())  # sparse ones take no vector
        return future.then(lambda averaged: averaged.value().mul_(factor))

    def _apply_join_factor(self, buffer, last):
        ranks = self._joined_ranks(last)
        if ranks is not None:
            buffer.mul_(self.endpoint.size / ranks.to(buffer.device, buffer.dtype))

    def _joined_ranks(self, last):
        """join(divide_by_initial_world_size=False): how many ranks still have inputs, whose mean it is; else None."""
        work = self.join_work
        if work is None:
            return None
        if last:
            self.join_work = None
        ddp = self._ddp()
        if ddp is None or getattr(ddp, "_divide_by_initial_world_size", True):
            return None
        work.wait()
        return first_tensor(work)

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
        return f"{self._names[id(weight)]} of model {self.model}, by rows"
