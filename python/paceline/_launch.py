"""Torch's variables from whatever launcher started this process."""

import ctypes
import os

from paceline import _library, _state
from paceline.errors import LibraryNotFoundError, from_code

_CAPACITY = 4096
#: What mpirun (Open MPI, MPICH) tells each rank that it starts, and what srun does.
_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_STARTED_BY_ANOTHER = (*_MPIRUN, "SLURM_STEP_ID")
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The names of the setting that may put mpirun's variables before torch's.
_ORDER = ("PACELINE_USE_DDP_LAUNCHER", "PERSEUS_USE_DDP_LAUNCHER")
#: What tells one rank of one mpirun from another.
_PLACE = ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "PMI_FD", "PMI_RANK", "PMI_SIZE")
#: Holds that place where torch's variables are its: this process, and those that it starts, have them from here.
_MARK = "PACELINE_LAUNCHED"


def supply_at_import():
    """What scripts for torch's launcher read, where mpirun or srun started this process.

    On import already, for such scripts read RANK or LOCAL_RANK before they call anything. Every rank imports the
    same face, so every rank comes here: under mpirun that is collective. Switched off as well: a script that lives by
    it would not start without, and there would be nothing to compare with.
    """
    has_them = "RANK" in os.environ or not any(name in os.environ for name in _STARTED_BY_ANOTHER)
    if has_them and not _may_come_second():
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
    nothing under torchrun and `paceline run`, which set them, and without a launcher. What the user has set stays,
    but for a RANK under mpirun with PACELINE_USE_DDP_LAUNCHER=0: then none of torch's variables is this rank's.
    Returns what was set. Raises a PacelineError that names what is wrong.
    """
    ordered = _may_come_second()
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")) and not ordered:
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
    if given and ordered:
        os.environ[_MARK] = _place()
        if "RANK" in os.environ:  # and mpirun's come first all the same
            for name in _TORCH:
                os.environ.pop(name, None)
    added = {name: value for name, value in given.items() if name not in os.environ}
    os.environ.update(added)
    return added


def _may_come_second():
    """True where torch's variables may have to make way for mpirun's: the library knows what the setting says.

    Not twice: it is collective, and a process that a rank starts (a DataLoader's, mp.spawn's) takes no part in it.
    """
    asked = any(name in os.environ for name in _ORDER) and any(name in os.environ for name in _MPIRUN)
    return asked and os.environ.get(_MARK) != _place()


def _place():
    return "/".join(os.environ.get(name, "") for name in _PLACE)
