"""What is owed to parameters that no rank has used stays owed.

A parameter that a pass leaves unused travels with its bucket, as zeros or as what .grad holds, with what is owed to it
on top. Where no rank has used it DDP drops what arrives and leaves .grad as it was, so its residuals return to their
values before the pass, on every rank. Whether DDP has dropped it is seen from .grad itself when the pass has ended: who
has used what is known to DDP's own reducer alone, and on CUDA the host would have to wait for it.
"""

import torch


class UnusedParameters:
    """One model's. steps: the ResidualSteps that its communicator has; keys: residual keys by a parameter's id; dtypes:
    of the gradients that have residuals."""

    def __init__(self, ddp, steps, model, keys, dtypes):
        self._views = ddp.gradient_as_bucket_view
        self._dtypes = dtypes
        self._steps = steps
        self._model = model
        self._keys = keys
        self._noted = []  # of this pass: (parameter, .grad as its bucket leaves, its version)
        self._seen = {}  # where .grad lay as the last pass ended, and its version, by a parameter's id
        self._again = False

    def note(self, bucket, overlapped):
        """A bucket is about to leave, with its own number. overlapped: .grad will stand for what arrives."""
        if bucket.index() == 0:
            self._noted, self._again = [], self._steps.begins(self._model)
        if bucket.buffer().dtype in self._dtypes and bucket.buffer().layout == torch.strided:
            # In these cases what has arrived becomes .grad, unless there is none.
            self._note(bucket.parameters(), missing=self._views or overlapped)
        if not bucket.is_last():
            return
        queue = torch.autograd.Variable._execution_engine.queue_callback
        try:
            queue(lambda: queue(self._look))  # behind DDP's own end of the pass, which its last bucket queues
        except RuntimeError:  # not in a backward pass: a joined rank shadows the others' (joined.py)
            self._noted = []

    def _note(self, parameters, missing):
        noted = []
        for parameter in parameters:
            gradient = parameter.grad
            # torch's optimizers fused into the backward pass take what has arrived without .grad.
            if hasattr(parameter, "_in_backward_optimizers") or (missing and gradient is not None):
                continue
            noted.append((parameter, gradient, None if gradient is None else gradient._version))
        self._noted += noted
        if self._again:
            unused = [p for p, g, version in noted if g is None or self._seen.get(id(p)) == (g.data_ptr(), version)]
            self._steps.keep_what_passes_left(self._model, [(self._keys[id(p)], p.numel()) for p in unused])

    def _look(self):
        """The backward pass has ended."""
        noted, self._noted = self._noted, []
        dropped = [p for p, g, version in noted if p.grad is g and (g is None or g._version == version)]
        self._steps.give_back(self._model, [self._keys[id(p)] for p in dropped])
        if not self._views:
            now = ((p, p.grad) for p, _, _ in noted)
            self._seen = {id(p): (g.data_ptr(), g._version) for p, g in now if g is not None}
