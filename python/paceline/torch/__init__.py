"""``import paceline.torch``: DistributedDataParallel travels through Paceline, with no other change of the script.

Registers the process group backend "paceline" for torch.distributed.init_process_group and, under mpirun and srun,
sets the variables that torch's launcher would have set. PACELINE_DISABLE=1 turns everything but the last off (the
backend "paceline" is refused then); PACELINE_QUIET=1 silences the start-up line.
"""

import torch  # noqa: F401

from paceline._activate import activate
from paceline._launch import supply_at_import

activate("paceline")
supply_at_import()

from paceline._torch.cuda_group import compress  # noqa: E402
from paceline._torch.ddp import load_residual_state_dict, residual_state_dict  # noqa: E402
from paceline._torch.optimizer import distributed_optimizer as DistributedOptimizer  # noqa: E402

__all__ = ["DistributedOptimizer", "compress", "load_residual_state_dict", "residual_state_dict"]
