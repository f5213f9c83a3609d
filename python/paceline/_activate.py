"""Turns Paceline on in this process, under one face (settings' family). Imports no framework."""

from paceline import _state
from paceline._import_hook import when_imported


def activate(face):
    """Accelerates DistributedDataParallel and registers the backend "paceline": now, or as soon as torch is there."""
    _state.choose_face(face)
    if not _state.disabled():
        when_imported("torch", _patch_torch)


def _patch_torch(_module):
    import torch.cuda.amp.grad_scaler
    import torch.nn.parallel.distributed

    from paceline import _torch_backend
    from paceline.torch import _amp, _ddp, _lifetime

    _torch_backend.register()
    _ddp.patch(torch.nn.parallel.distributed)
    _amp.patch(torch.cuda.amp.grad_scaler.GradScaler)
    if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):
        _amp.patch(torch.amp.GradScaler)
    _lifetime.patch()
