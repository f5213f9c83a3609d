"""Turns Paceline on in this process, under one face (settings' family). Imports no framework."""

import os

from paceline import _state
from paceline._import_hook import when_imported


def activate(face):
    """Accelerates DistributedDataParallel and registers the backend "paceline": now, or as soon as torch is there.

    Switched off, only the backend's name is known, so that who asks for it is told why there is none.
    """
    _state.choose_face(face)
    if _state.disabled():
        when_imported("torch", _register_backend)
        return
    # The driver puts streams on so many queues, 8 unless told: one that waits for the network would hold up what
    # shares its queue. It reads this when CUDA starts in the process.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    when_imported("torch", _patch_torch)


def _register_backend(_module):
    from paceline._torch import backend

    backend.register()


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
