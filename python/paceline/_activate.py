"""Turns Paceline on in this process, under one face (settings' family). Imports no framework."""

import os

from paceline import _state
from paceline._import_hook import when_imported


def activate(face):
    """Accelerates DistributedDataParallel and registers the backend "paceline": now, or as soon as torch is there."""
    _state.choose_face(face)
    if not _state.disabled():
        # The driver puts streams on so many queues, 8 unless told: one that waits for the network would hold up what
        # shares its queue. It reads this when CUDA starts in the process.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        when_imported("torch", _patch_torch)


def _patch_torch(_module):
    import importlib

    import torch.nn.parallel.distributed

    from paceline._torch import amp, backend, ddp, lifetime

    backend.register()
    lifetime.patch()
    ddp.patch(torch.nn.parallel.distributed)
    amp.watch_optimizers(importlib.import_module("torch.optim.optimizer"))  # torch.optim hides the module's name
    amp.patch(importlib.import_module("torch.cuda.amp.grad_scaler").GradScaler)
    if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):
        amp.patch(torch.amp.GradScaler)
