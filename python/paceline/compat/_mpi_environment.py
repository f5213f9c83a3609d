"""Under plain mpirun: the variables that torch's scripts read, from what the MPI launcher set.

RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE at once. MASTER_ADDR and MASTER_PORT when the process group is
made: the ranks meet through Paceline's own bootstrap, and rank 0 tells an address and a free port.
"""

import ctypes
import functools
import os
import socket

_LAUNCHERS = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)
_ADDRESS_BYTES = 256


def supply():
    """Fills in what is missing, where an MPI launcher started this process and no other launcher did."""
    if "RANK" in os.environ:
        return
    for names in _LAUNCHERS:
        if names["RANK"] in os.environ:
            for ours, theirs in names.items():
                if theirs in os.environ:
                    os.environ[ours] = os.environ[theirs]
            from paceline._import_hook import when_imported

            when_imported("torch", _patch)
            return


def _patch(_module):
    import torch.distributed as dist

    if not dist.is_available():
        return
    original = dist.distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        if "MASTER_ADDR" not in os.environ:
            _meet()
        return original(*args, **kwargs)

    dist.distributed_c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def _meet():
    """MASTER_ADDR and MASTER_PORT, agreed among the ranks of the MPI job."""
    from paceline import _state
    from paceline import communicator as core

    communicator = core.Communicator(prefix="paceline/master", face=_state.face)
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        if communicator.rank == 0:
            probe.bind(("", 0))
            host = "127.0.0.1" if communicator.identity.node_count == 1 else _own_address()
            text.value = f"{host} {probe.getsockname()[1]}".encode()
    pointer = ctypes.addressof(text)
    communicator.run(
        core.BROADCAST, dtype=core.DTYPES["uint8"], input=pointer, output=pointer, count=_ADDRESS_BYTES, name="master"
    )
    communicator.close()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = text.value.decode().split()


def _own_address():
    """The address of the interface that leads out of this machine; asks the routing table, sends nothing."""
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 9))
                return probe.getsockname()[0]
            except OSError:
                continue
    return socket.gethostname()
