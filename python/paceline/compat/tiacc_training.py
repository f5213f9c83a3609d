"""What `import tiacc_training.torch.distributed as tdist; tdist.init_tiacc_training()` does.

Everything else that is asked of tdist is torch.distributed's.
"""

from paceline import _state
from paceline._activate import activate
from paceline._launch import supply_at_import

_state.choose_face("tiacc_training")
supply_at_import()


def init_tiacc_training():
    """DistributedDataParallel and torch.distributed's collectives on CPU tensors travel through Paceline.

    Call it before init_process_group(): process groups made from then on carry CPU tensors by Paceline; CUDA
    tensors keep torch's own backend. Called later it says so, once: models that are wrapped from then on travel by
    Paceline all the same, collectives of the groups that are there do not.
    """
    activate("tiacc_training")
    if _state.disabled():
        return
    import torch.distributed  # first: its import sets off what uses lifetime

    from paceline._torch import endpoints, lifetime, start_lines

    first = lifetime.redirect_new_groups()
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    if first and started and not endpoints.is_native(torch.distributed.group.WORLD):
        start_lines.say_once(
            "init_tiacc_training() came after init_process_group(): collectives on the groups that are there keep "
            "torch's own way, DistributedDataParallel models travel by Paceline; call it before init_process_group()"
        )


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    import torch.distributed

    return getattr(torch.distributed, name)
