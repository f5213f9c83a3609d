"""``import paceline.torch``: DistributedDataParallel travels through Paceline, with no other change of the script.

Also registers the process group backend "paceline" for torch.distributed.init_process_group. PACELINE_DISABLE=1
turns everything off; PACELINE_QUIET=1 silences the start-up line.
"""

import torch  # noqa: F401

from paceline._activate import activate

activate("paceline")

from paceline._torch.ddp import load_residual_state_dict, residual_state_dict  # noqa: E402

__all__ = ["load_residual_state_dict", "residual_state_dict"]
