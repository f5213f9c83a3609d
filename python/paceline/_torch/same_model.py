"""Whether all ranks wrap the same model, asked before torch compares and spreads it.

torch's own comparison is with rank 0's: the others raise, rank 0 then loses its peers and can't say why; element types
are not compared at all. Here every rank raises the same sentence, with the tensor, and what each of the ranks has.
"""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from paceline._torch import endpoints
from paceline.errors import MismatchError


def check(module, group, buffers=True):
    """Raises MismatchError on all ranks of `group` (None: the world's) where their parameters or buffers differ.

    module: what DistributedDataParallel is given; buffers: whether it will spread them. 8 bytes a rank go round; the
    descriptions only where these differ. What torch refuses on every rank alike is left to torch.
    """
    described = _described(module, buffers)
    device = _device_for(module, group)
    if described is None or device is None:
        return
    word = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([word], device=device)
    words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(words, mine, group=group)
    if set(torch.cat(words).tolist()) == {word}:
        return
    everybody = [None] * len(words)
    # NCCL takes objects by way of the current device, which need not be the model's.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        dist.all_gather_object(everybody, described, group=group)
    what = _difference(dict(zip(endpoints.group_ranks(group if group is not None else dist.group.WORLD), everybody)))
    if what is not None:
        if device.type == "cpu":
            # A thread of torch's Gloo may still hold tensors of Python's, and where it drops them while the interpreter
            # ends it takes the process down by a signal. A barrier holds none and gives the others' threads their time.
            _barrier_of_the_host(group)
        raise MismatchError(f"the model is not the same on all ranks: {what}: build it alike on every rank")


def _described(module, buffers):
    """What must be alike, by tensor; None where something has no shape yet, which torch refuses by itself."""
    left_out = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    tensors = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    if any(is_lazy(tensor) for _, tensor in tensors):
        return None
    return {name: _text(tensor) for name, tensor in tensors if name not in left_out}


def _text(tensor):
    kind = str(tensor.dtype).removeprefix("torch.")
    trained = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
    return f"{kind} {list(tensor.shape)}{trained}"


def _barrier_of_the_host(group):
    """dist.barrier() may take NCCL, where the group has both and the process a GPU of its own."""
    try:
        backend = (group if group is not None else dist.group.WORLD)._get_backend(torch.device("cpu"))
    except AttributeError:  # before torch 2.0 a group has one backend
        dist.barrier(group)
        return
    backend.barrier().wait()


def _device_for(module, group):
    """Where a number must lie to go through the group: the host; for NCCL alone where the model is; None: nowhere."""
    model = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    try:
        (group if group is not None else dist.group.WORLD)._get_backend(torch.device("cpu"))
    except AttributeError:  # before torch 2.0 a group has one backend
        return model
    except RuntimeError:  # it has none for the host: a model there is a slip that torch has a sentence for
        return None if model.type in ("cpu", "meta") else model
    return torch.device("cpu")


def _difference(everybody):
    """The first tensor that is not alike: each version, and the ranks that have it. None: names of the ranks' own, such
    as "expert_3", for tensors that are alike in torch's order.

    everybody: {rank: {name: what it is}}.
    """
    names = dict.fromkeys(name for described in everybody.values() for name in described)
    if any(described.keys() != names.keys() for described in everybody.values()):
        kinds = {rank: tuple(described.values()) for rank, described in everybody.items()}
        if len(set(kinds.values())) == 1:
            return None
        if len(set(map(len, kinds.values()))) == 1:
            return _difference_by_place(kinds, list(next(iter(everybody.values()))))
    for name in names:
        versions = _versions({rank: described.get(name, "missing") for rank, described in everybody.items()})
        if versions is not None:
            return f"'{name}' is {versions}"
    (first, order), *others = ((rank, list(described)) for rank, described in everybody.items())
    other, theirs = next((rank, theirs) for rank, theirs in others if theirs != order)
    at = next(i for i, (a, b) in enumerate(zip(order, theirs)) if a != b)
    return f"tensor {at} is '{order[at]}' on rank {first} and '{theirs[at]}' on rank {other}"


def _difference_by_place(kinds, names):
    """The first of the tensors that is not alike, where ranks have names of their own for as many of them."""
    for at, name in enumerate(names):
        versions = _versions({rank: kind[at] for rank, kind in kinds.items()})
        if versions is not None:
            return f"tensor {at} ('{name}' on rank {next(iter(kinds))}) is {versions}"
    raise AssertionError("asked only where they differ")


def _versions(by_rank):
    """What each rank has, in words; None where all have the same. by_rank: {rank: what it has}."""
    versions = {}
    for rank, what in by_rank.items():
        versions.setdefault(what, []).append(rank)
    if len(versions) == 1:
        return None
    return " and ".join(f"{what} on {_ranks(ranks)}" for what, ranks in versions.items())


def _ranks(ranks):
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
