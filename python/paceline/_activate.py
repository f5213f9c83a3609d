"""Turns Paceline on in this process, under one face (settings' family). Imports no framework."""

from paceline import _state
from paceline._import_hook import when_imported


def activate(face):
    """Accelerates DistributedDataParallel and registers the backend "paceline": now, or as soon as torch is there."""
    _state.choose_face(face)
    if not _state.disabled():
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
