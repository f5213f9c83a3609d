"""Under plain mpirun: the variables that torch's scripts read, from what the MPI launcher tells."""

import os

from paceline import _launch, _state

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def supply():
    """Fills in what is missing, where an MPI launcher started this process and no other launcher did.

    Every rank has to come here: rank 0's address goes through the launcher's key-value space.
    """
    if "RANK" not in os.environ and any(name in os.environ for name in _RANK_VARIABLES):
        _launch.supply_environment(_state.face)
