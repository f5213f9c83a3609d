"""Lines that a job shows once: on the job's rank 0, whichever groups of ranks they are about."""

import torch.distributed as dist

from paceline import _state


def job_rank(group_rank=0):
    """This process's rank in the job; before torch's process group is there, its rank in the group that is made."""
    return dist.get_rank() if dist.is_initialized() else group_rank


def say_once(sentence, group_rank=0):
    """See _state.say_once(). group_rank: for what is said while the default process group is made."""
    _state.say_once(job_rank(group_rank), sentence)
