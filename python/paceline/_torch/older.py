"""What an older torch can't do, by name."""

import platform

import torch

from paceline._import_hook import when_import_fails
from paceline.errors import UnsupportedError

MODERN = hasattr(torch, "compile")
#: What scripts ask of newer torch, and what to do without it.
_NO_SCALER = (
    "on the CPU train in bfloat16, which needs no loss scale, on CUDA take torch.cuda.amp.GradScaler, or use torch 2.3 "
    "or later"
)
_ADDED_LATER = {
    (torch, "compile"): "use the model as it is, or torch 2 or later",
    (torch.amp, "GradScaler"): _NO_SCALER,
    (torch.cpu.amp, "GradScaler"): _NO_SCALER,
}


class UnsupportedModuleError(UnsupportedError, ImportError):
    """A module of torch that this version of torch can't import; also caught by scripts that try an import."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """A name that this version of torch does not have; hasattr() and getattr() with a default go on as before."""


def name_what_is_missing():
    """Debian's torch 1.13 on Python 3.11 can't import its own FSDP, and says something about dataclasses."""
    if not MODERN:
        when_import_fails("torch.distributed.fsdp", _no_fsdp)
    for (module, name), remedy in _ADDED_LATER.items():
        if not hasattr(module, name):
            _explain_absence(module, name, f"torch {torch.__version__} has no {module.__name__}.{name}; {remedy}")


def _explain_absence(module, name, sentence):
    """By the module's __getattr__ (PEP 562); `from module import name` looks for a submodule as well."""
    before = getattr(module, "__getattr__", None)

    def __getattr__(asked):
        if asked == name:
            raise UnsupportedNameError(sentence)
        if before is not None:
            return before(asked)
        raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}", name=asked, obj=module)

    module.__getattr__ = __getattr__
    when_import_fails(f"{module.__name__}.{name}", lambda _: UnsupportedModuleError(sentence))


def _no_fsdp(error):
    return UnsupportedModuleError(
        f"torch {torch.__version__} on Python {platform.python_version()} can't import torch.distributed.fsdp "
        f"({type(error).__name__}); use DistributedDataParallel with ZeroRedundancyOptimizer, or torch 2 or later"
    )
