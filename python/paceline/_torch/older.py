"""What torch before 2.0 can't do, by name."""

import platform

import torch

from paceline._import_hook import when_import_fails
from paceline.errors import UnsupportedError

MODERN = hasattr(torch, "compile")


class UnsupportedModuleError(UnsupportedError, ImportError):
    """A module of torch that this version of torch can't import; also caught by scripts that try an import."""


def name_what_is_missing():
    """Debian's torch 1.13 on Python 3.11 can't import its own FSDP, and says something about dataclasses."""
    if not MODERN:
        when_import_fails("torch.distributed.fsdp", _no_fsdp)


def _no_fsdp(error):
    return UnsupportedModuleError(
        f"torch {torch.__version__} on Python {platform.python_version()} can't import torch.distributed.fsdp "
        f"({type(error).__name__}); use DistributedDataParallel with ZeroRedundancyOptimizer, or torch 2 or later"
    )
