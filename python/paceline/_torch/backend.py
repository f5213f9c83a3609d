"""The process group backend "paceline" by name: torch finds register() through its entry points, without an import.

Kept apart from paceline.torch, whose import accelerates DistributedDataParallel; this only makes
torch.distributed.init_process_group("paceline") known.
"""

from paceline import _state
from paceline._import_hook import when_imported
from paceline.errors import PacelineError, UnsupportedError


def register():
    """Registers the backend once, switched off or not; does nothing where torch has no distributed package."""
    import torch.distributed as dist

    from paceline._torch.older import name_what_is_missing

    if not dist.is_available() or hasattr(dist.Backend, "PACELINE"):
        return
    try:
        dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
    except TypeError:  # torch before 2.0 knows no devices
        dist.Backend.register_backend("paceline", _create, extended_api=True)
    if not _state.disabled():
        when_imported("torch._dynamo.trace_rules", _keep_out_of_traces)
        name_what_is_missing()


def _keep_out_of_traces(trace_rules):
    """torch.compile must not look into this package when a compiled model's collectives call it."""
    trace_rules.add("paceline")


def _create(options, _backend_options):
    from paceline._torch.work import as_torch_error

    if _state.disabled():
        raise as_torch_error(
            UnsupportedError(
                "PACELINE_DISABLE is set, and the script asks for the backend 'paceline' by name: unset it, or call "
                "init_process_group with torch's own backend ('gloo' for CPU tensors, 'nccl' for CUDA's)"
            )
        )
    from paceline._torch.process_group import create

    try:
        return create(options)
    except PacelineError as error:
        raise as_torch_error(error) from error.__cause__
