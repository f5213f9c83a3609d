"""Which communicator and group carry the operations of a torch process group.

The process group of backend "paceline" brings its own. For any other backend (Gloo …) a communicator over exactly
its ranks is made when it is first needed, by way of the default process group's store; so only the ranks that use
it take part.
"""

import torch.distributed as dist

from paceline import _state
from paceline import communicator as core
from paceline._torch import backends, patience
from paceline._torch.residuals import ResidualSteps
from paceline._torch.start_lines import job_rank, say_once
from paceline._torch.stores import TorchStore

_endpoints = {}
_created = {}
_native_worlds = []
_told = False  # the line of the whole job


class Endpoint:
    """A communicator, the group on it, and the state of the step under way."""

    residual_unit = "gradient"  # what a rank's residuals are added to

    def __init__(self, communicator, group=0, rank=None, size=None):
        self.communicator = communicator
        self.group = group
        self.rank = communicator.rank if rank is None else rank
        self.size = communicator.size if size is None else size
        self.steps = ResidualSteps.of(communicator)


def of(process_group):
    """The endpoint of a process group. The first call for a group is collective over its ranks."""
    _prune()
    endpoint = _endpoints.get(process_group)
    if endpoint is None:
        endpoint = _native(process_group) or Endpoint(connect(process_group, "paceline/ddp"))
        _endpoints[process_group] = endpoint
    return endpoint


def make_communicator(rank, size, store, prefix, timeout=0.0, announce=True, bears=None):
    """Creates a communicator, which warns of settings without effect, and prints the start-up line (if asked).

    Both once, on rank 0. The line is the job's: groups of some of its ranks have none where all ranks have had theirs.
    timeout: the script's in seconds, 0.0 for none; bears: how long torch would wait for an operation then, a timedelta.
    """
    global _told
    serial = _created.get(prefix, 0)
    _created[prefix] = serial + 1
    communicator = core.Communicator(
        rank=rank,
        size=size,
        store=None if store is None else TorchStore(store),
        prefix=f"{prefix}/{serial}",
        face=_state.face,
        timeout=timeout,
        job_rank=job_rank(rank),
        operation_timeout=timeout or patience.of_operations(bears or patience.default()),
    )
    whole = not dist.is_initialized() or size == dist.get_world_size()
    if announce and (whole or not _told):
        _told = _told or whole
        say_once(communicator.describe().removeprefix("paceline: "), rank)
    return communicator


def close(process_group=None):
    """Closes the communicators of one process group, or of all."""
    for key in [k for k in _endpoints if process_group is None or k is process_group]:
        endpoint = _endpoints.pop(key)
        if _native(key) is None:
            endpoint.communicator.close()


def own(communicator):
    """Remembers a communicator of a "paceline" process group, for close_native()."""
    _native_worlds.append(communicator)


def close_native():
    """Older torch tells its process groups nothing when they are destroyed."""
    while _native_worlds:
        _native_worlds.pop().close()


def group_ranks(process_group):
    """The global ranks of a process group, in its own order."""
    if hasattr(dist, "get_process_group_ranks"):
        return dist.get_process_group_ranks(process_group)
    ranks = dist.distributed_c10d._pg_group_ranks[process_group]
    return sorted(ranks, key=ranks.get)


def connect(process_group, purpose, device="cpu", announce=True):
    """A communicator over the ranks of a process group, by way of the default group's store, for tensors on a type of
    device ("cpu"). Collective.
    """
    ranks = group_ranks(process_group)
    name = "world" if len(ranks) == dist.get_world_size() else "ranks-" + "-".join(map(str, ranks))
    store = dist.distributed_c10d._get_default_store()
    bears = patience.of_group(process_group, device)
    rank, prefix = ranks.index(dist.get_rank()), f"{purpose}/{name}"
    return make_communicator(rank, len(ranks), store, prefix, announce=announce, bears=bears)


def known(process_group):
    """Whether torch still knows the process group."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return process_group in (world.pg_map if world is not None else dist.distributed_c10d._pg_map)


def is_native(process_group):
    """Whether the group's collectives on CPU tensors are Paceline's."""
    return _native(process_group) is not None


def _native(process_group):
    """The endpoint that a process group of backend "paceline" brings along, or None."""
    own = getattr(process_group, "paceline_endpoint", None)
    if own is not None:
        return own
    return getattr(backends.of(process_group, "cpu"), "paceline_endpoint", None)


def _prune():
    """Process groups that were destroyed behind our back."""
    for key in [k for k in _endpoints if not known(k)]:
        close(key)
