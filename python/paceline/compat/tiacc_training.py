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
    tensors keep torch's own backend.
    """
    activate("tiacc_training")
    if _state.disabled():
        return
    import torch  # noqa: F401  (first: its import sets off what uses lifetime)

    from paceline._torch import lifetime

    lifetime.redirect_new_groups()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    import torch.distributed

    return getattr(torch.distributed, name)
