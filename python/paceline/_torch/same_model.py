"""Whether all ranks wrap the same model, asked before torch compares and spreads it.

torch's own comparison is with rank 0's: the others raise, rank 0 then loses its peers and can't say why; element types
are not compared at all. Here every rank raises the same sentence, with the tensor, and what each of the ranks has.
"""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from paceline.errors import MismatchError


def check(module, group):
    """Raises MismatchError on all ranks of `group` (None: the world's) where their parameters or buffers differ.

    module: what DistributedDataParallel is given. 8 bytes a rank go round; the descriptions only where these differ.
    """
    described = _described(module)
    if described is None:
        return
    word = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([word], device=_device_for(module, group))
    words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(words, mine, group=group)
    if set(torch.cat(words).tolist()) == {word}:
        return
    everybody = [None] * len(words)
    dist.all_gather_object(everybody, described, group=group)
    what = _difference(everybody)
    raise MismatchError(f"the model is not the same on all ranks: {what}: build it alike on every rank")


def _described(module):
    """What must be alike, by tensor; None where something has no shape yet, which torch refuses by itself."""
    left_out = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if any(is_lazy(tensor) for _, tensor in tensors):
        return None
    return {name: _text(tensor) for name, tensor in tensors if name not in left_out}


def _text(tensor):
    kind = str(tensor.dtype).removeprefix("torch.")
    trained = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
    return f"{kind} {list(tensor.shape)}{trained}"


def _device_for(module, group):
    """Where a number must lie to go through the group: the host, or, for NCCL alone, where the model is."""
    model = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    if model.type == "cpu":
        return model
    group = group if group is not None else dist.group.WORLD
    try:
        group._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):  # before torch 2.0 a group has one backend; later it says that it has none
        return model
    return torch.device("cpu")


def _difference(everybody):
    """The first tensor that is not alike: each version, and the ranks of the group that have it."""
    names = dict.fromkeys(name for described in everybody for name in described)
    for name in names:
        versions = {}
        for rank, described in enumerate(everybody):
            versions.setdefault(described.get(name, "missing"), []).append(rank)
        if len(versions) > 1:
            return f"'{name}' is " + " and ".join(f"{what} on {_ranks(ranks)}" for what, ranks in versions.items())
    orders = [list(described) for described in everybody]
    other = next(rank for rank, order in enumerate(orders) if order != orders[0])
    at = next(i for i, (a, b) in enumerate(zip(orders[0], orders[other])) if a != b)
    return f"tensor {at} is '{orders[0][at]}' on rank 0 and '{orders[other][at]}' on rank {other}"


def _ranks(ranks):
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
