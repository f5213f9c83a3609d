"""How long the operations of a torch process group may take: as long as the script and torch would wait.

A script may let the others wait for a rank that evaluates or writes a checkpoint; what torch bears, Paceline bears. A
time-out among the settings, or of the face in use, comes first where torch's own is the default or was meant for Gloo.
"""

import torch.distributed as dist

from paceline import _state
from paceline import communicator as core
from paceline._torch import backends


def given(timeout):
    """Seconds of a time-out that a script gave to a process group of ours; 0.0 for torch's own default or None."""
    return 0.0 if timeout is None or timeout == default() else timeout.total_seconds()


def of_operations(timeout):
    """Seconds for operations where torch would wait for `timeout` (a timedelta or None); 0.0: the settings'."""
    if timeout is None or core.setting_source("timeout", _state.face) or _face_has_its_own():
        return 0.0
    return timeout.total_seconds()


def of_group(process_group, device):
    """What a process group of torch's was made with, for tensors on a type of device; None where it does not tell."""
    backend = backends.of(process_group, device) or process_group
    return getattr(getattr(backend, "options", None), "_timeout", None)


def default():
    """torch's own, of process groups that are not NCCL's."""
    return dist.distributed_c10d.default_pg_timeout


def _face_has_its_own():
    return _state.face != "paceline" and core.setting("timeout", _state.face) != core.setting("timeout", "paceline")
