"""Torch's variables from whatever launcher started this process."""

import ctypes
import os

from paceline import _library, _state
from paceline.errors import LibraryNotFoundError, from_code

_CAPACITY = 4096
#: What mpirun (Open MPI, MPICH) and srun tell each rank that they start.
_STARTED_BY_ANOTHER = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")


def supply_at_import():
    """What scripts for torch's launcher read, where mpirun or srun started this process.

    On import already, for such scripts read RANK or LOCAL_RANK before they call anything. Every rank imports the
    same face, so every rank comes here: under mpirun that is collective. Switched off as well: a script that lives by
    it would not start without, and there would be nothing to compare with.
    """
    if "RANK" in os.environ or not any(name in os.environ for name in _STARTED_BY_ANOTHER):
        return
    try:
        supply_environment(_state.face)
    except LibraryNotFoundError:
        if not _state.disabled():  # which is also for who has no library that works
            raise


def supply_environment(face="paceline"):
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where they are missing.

    Under plain mpirun (Open MPI, MPICH) rank 0 picks an address and a free port and tells the others through the
    launcher's own key-value space, so every rank has to call this; under Slurm they follow from its variables. Does
    nothing under torchrun and `paceline run`, which set them, and without a launcher. What the user has set stays.
    Returns what was set. Raises a PacelineError that names what is wrong.
    """
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return {}
    library = _library.load()
    function = library.paceline_launch_environment
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    text = ctypes.create_string_buffer(_CAPACITY)
    code = function(face.encode(), text, _CAPACITY)
    if code:
        raise from_code(code, library.paceline_error(None).decode())
    given = dict(line.split("=", 1) for line in text.value.decode().splitlines())
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(added)
    return added
