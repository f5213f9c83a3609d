"""Residuals in checkpoints: read, dealt out to other numbers of ranks, written back; velocities beside them.

Velocities are momentum-corrected top-k's (PACELINE_TOPK_MOMENTUM), on CUDA alone.
"""

import torch
import torch.distributed as dist

from paceline._torch.residuals import Kept
from paceline._torch.start_lines import say_once
from paceline.errors import InvalidArgumentError


def read_state(attachment, all_ranks):
    """See paceline.torch.residual_state_dict."""
    endpoint = attachment.endpoint
    if attachment.overlap is not None:
        attachment.overlap.settle()
    endpoint.steps.commit(attachment.model)
    kept = {
        name: Kept.read(endpoint.communicator, key, parameter.shape, endpoint.steps.momentum)
        for name, parameter, key in attachment.keyed_parameters()
    }
    mine = {"residuals": {name: one.residual for name, one in kept.items()}}
    head = {"world_size": endpoint.size, "unit": endpoint.residual_unit}
    if endpoint.steps.momentum:
        mine["velocities"] = {name: one.velocity for name, one in kept.items()}
        head["local_size"] = _local_size(endpoint)
    if not all_ranks:
        return {**head, "rank": endpoint.rank, **mine}
    gathered = [None] * endpoint.size
    dist.all_gather_object(gathered, mine, group=attachment.process_group())
    state = {**head, "all_ranks": [one["residuals"] for one in gathered]}
    if endpoint.steps.momentum:
        state["all_ranks_velocities"] = [one["velocities"] for one in gathered]
    return state


def write_state(attachment, state):
    """See paceline.torch.load_residual_state_dict."""
    endpoint = attachment.endpoint
    unit, momentum = endpoint.residual_unit, endpoint.steps.momentum
    if state.get("unit", unit) != unit:
        raise InvalidArgumentError(
            f"the residual state is in units of the {state['unit']}, those of this model are in units of the {unit}: "
            "one of the two models is on the CPU; load it where it was saved, or begin without residuals"
        )
    if not momentum and ("velocities" in state or "all_ranks_velocities" in state):
        raise InvalidArgumentError(
            "the residual state holds velocities of momentum-corrected top-k, and this job corrects no momentum: set "
            "PACELINE_TOPK_MOMENTUM as it was when the state was saved, or take the velocities out of the state"
        )
    wanted = {name: (parameter, key) for name, parameter, key in attachment.keyed_parameters()}
    residuals = _checked(_for_rank(state, endpoint.rank, endpoint.size, unit), wanted, "residual")
    velocities = _checked(_velocities(state, endpoint), wanted, "velocity") if momentum else {}
    if attachment.overlap is not None:
        attachment.overlap.settle()
    endpoint.steps.commit(attachment.model)
    for name, (_, key) in wanted.items():
        Kept(_plain(residuals[name]), _plain(velocities.get(name))).write(endpoint.communicator, key)


def _checked(tensors, wanted, what):
    """Tensors by name, one of each parameter's shape."""
    if set(tensors) != set(wanted):
        odd = sorted(set(tensors) ^ set(wanted))
        raise InvalidArgumentError(
            f"residual state and model differ in the parameters {', '.join(odd[:5])}; load the state of this model"
        )
    for name, tensor in tensors.items():
        parameter, _ = wanted[name]
        if tensor.shape != parameter.shape:
            raise InvalidArgumentError(
                f"{what} of '{name}' has shape {list(tensor.shape)}, the parameter {list(parameter.shape)}"
            )
    return tensors


def _plain(tensor):
    """As the C ABI takes it."""
    return None if tensor is None else tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()


def _for_rank(state, rank, size, unit):
    """This rank's residuals. After a resize what is owed goes to other ranks; the next step's average stays the same.

    Where residuals are in units of a rank's gradient (models on the CPU), every rank takes the mean. Those of the path
    for CUDA tensors are in units of the average, and each element is one rank's: the sum is dealt out.
    """
    if "all_ranks" in state:
        ranks = state["all_ranks"]
        if len(ranks) == size:
            return ranks[rank]
        sums = _sums(ranks)
        if unit == "gradient":
            return {name: total / len(ranks) for name, total in sums.items()}
        return {name: _share_of(total, rank, size) for name, total in sums.items()}
    if state.get("world_size") != size or state.get("rank") != rank:
        raise InvalidArgumentError(
            f"residual state of rank {state.get('rank')} of {state.get('world_size')} can't be loaded on rank {rank} "
            f"of {size}; every rank loads its own, or save with residual_state_dict(model, all_ranks=True)"
        )
    return state["residuals"]


def _local_size(endpoint):
    """GPUs of a node."""
    return endpoint.communicator.communicator.identity.local_size


def _velocities(state, endpoint):
    """This rank's. On another number of ranks, or of GPUs a node, each node takes an even part of every element's: the
    sum stays the same.

    With one GPU a node, that is: with several each keeps those of its own shards, which no state says yet.
    """
    residuals = state.get("residuals") or state["all_ranks"][0]
    nothing = {name: torch.zeros_like(residual) for name, residual in residuals.items()}
    if "velocities" not in state and "all_ranks_velocities" not in state:
        say_once("the residual state holds no velocities: momentum correction begins at zero", endpoint.rank)
        return nothing
    local_size = _local_size(endpoint)
    alike = state.get("world_size") == endpoint.size and state.get("local_size", local_size) == local_size
    if alike:
        return state["velocities"] if "velocities" in state else state["all_ranks_velocities"][endpoint.rank]
    if local_size > 1 or "velocities" in state:
        say_once(
            f"velocities of {state.get('world_size')} ranks, {state.get('local_size', '?')} a node, can't be dealt out "
            f"to {endpoint.size}, {local_size} a node: momentum correction begins at zero (one rank a node can take "
            "those of a state that was saved with all_ranks=True)",
            endpoint.rank,
        )
        return nothing
    return {name: total / endpoint.size for name, total in _sums(state["all_ranks_velocities"]).items()}


def _sums(ranks):
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


def _share_of(total, rank, size):
    """A rank's even share of the elements; 0 elsewhere."""
    share = torch.zeros_like(total)
    first, last = total.numel() * rank // size, total.numel() * (rank + 1) // size
    share.view(-1)[first:last] = total.reshape(-1)[first:last]
    return share
