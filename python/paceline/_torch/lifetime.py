"""Communicators end with the process group that they were made for; new groups can be redirected to Paceline."""

import functools
import inspect

import torch
import torch.distributed as dist

from paceline import communicator as core
from paceline._torch import aborts, arrivals, backends, cuda, cuda_group, endpoints, lost_ranks, overlap
from paceline._torch.work import as_torch_error


def patch():
    """Wraps destroy_process_group(), under both of its names, batch_isend_irecv(), monitored_barrier(), time-outs,
    torch's debugging, how the ranks meet, and what its collectives raise."""
    arrivals.patch()
    lost_ranks.patch()
    patch_batches()
    patch_monitored_barrier()
    patch_timeouts()
    patch_debugging()
    original = dist.distributed_c10d.destroy_process_group
    if getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def destroy_process_group(group=None):
        with core.mismatches() as mismatches:
            # Updates of the last step are missing; or what a rank did that waits for nobody (a broadcast's root, a
            # sender) was not what the others did.
            unseen = _end(original, group)
            if mismatches and not unseen:
                unseen = [as_torch_error(mismatches.pop(0)[1])]
        if unseen:
            raise unseen[0]

    destroy_process_group._paceline_patched = True
    _replace("destroy_process_group", destroy_process_group)


def _end(original, group):
    """Ends what was built on a process group, then the group by torch's own function; the errors that nobody saw."""
    whole = group is None or group is dist.group.WORLD
    if whole:
        cuda_group.close_all()
    unseen = overlap.end_all(None if whole else group)
    cuda.close(None if whole else group)
    endpoints.close(None if whole else group)
    if whole:
        aborts.end_world(original)
    else:
        original(group)
    if not whole and hasattr(group, "paceline_endpoint"):
        group.shutdown()  # which torch only calls where our group is a backend within one of its own
    if whole:
        endpoints.close_native()
    return unseen


def patch_batches():
    """Wraps batch_isend_irecv(): where our groups are in Python (torch before 2.15) torch knows no batches of theirs.

    It would hand over one message after the other, and NCCL waits for the other rank of the first.
    """
    original = dist.distributed_c10d.batch_isend_irecv
    if getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list):
        group = p2p_op_list[0].group or dist.distributed_c10d._get_default_group() if p2p_op_list else None
        tensors = [operation.tensor for operation in p2p_op_list]
        if not hasattr(group, "paceline_cuda") or cuda_group.first_cuda_device(tensors) is None:
            return original(p2p_op_list)
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group.start_coalescing()
        try:
            for operation in p2p_op_list:
                operation.op(operation.tensor, operation.peer, operation.group, operation.tag)
        except BaseException:
            group.drop_batch()
            raise
        return [group.end_coalescing()]

    batch_isend_irecv._paceline_patched = True
    _replace("batch_isend_irecv", batch_isend_irecv)


def patch_monitored_barrier():
    """Wraps monitored_barrier(), which torch before 2.15 keeps for Gloo: any barrier of ours names who is late."""
    original = dist.distributed_c10d.monitored_barrier
    if getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        chosen = dist.distributed_c10d._get_default_group() if group is None else group
        if not hasattr(chosen, "paceline_endpoint"):
            return original(group, timeout, wait_all_ranks)
        chosen.monitored_barrier(timeout, wait_all_ranks)
        return None

    monitored_barrier._paceline_patched = True
    _replace("monitored_barrier", monitored_barrier)


def patch_timeouts():
    """Wraps _set_pg_timeout() of torch before 2.15, which passes over backends that are not torch's own."""
    original = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if original is None or hasattr(dist, "set_timeout") or getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def _set_pg_timeout(timeout, group=None):
        found = _backends(group if group is not None else dist.distributed_c10d._get_default_group())
        ours = [backend for backend in found if hasattr(backend, "paceline_endpoint")]
        for backend in ours:
            backend.set_timeout(timeout)
        if len(ours) < len(found) or not ours:
            original(timeout, group)

    _set_pg_timeout._paceline_patched = True
    dist.distributed_c10d._set_pg_timeout = _set_pg_timeout


def _backends(group):
    """Those of a process group, by device; a whole process group of ours is its own."""
    if hasattr(group, "paceline_endpoint"):
        return [group]
    found = [backends.of(group, device) for device in ("cpu", "cuda")]
    return [backend for backend in found if backend is not None]


def patch_debugging():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL leaves our groups as they are: the engine names ranks whose operations differ.

    torch's wrapper with its Gloo beside would drop the half of a backend that is in Python.
    """
    original = getattr(dist.distributed_c10d, "_create_process_group_wrapper", None)
    if original is None or getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def wrapper(wrapped_pg, *args, **kwargs):
        if hasattr(wrapped_pg, "paceline_endpoint"):
            return wrapped_pg
        return original(wrapped_pg, *args, **kwargs)

    wrapper._paceline_patched = True
    dist.distributed_c10d._create_process_group_wrapper = wrapper


def redirect_new_groups():
    """init_process_group() with Gloo, NCCL, "cpu:gloo,…" or no backend, new_group() where it is given one of these:
    Paceline carries the CPU tensors.

    Returns whether this call is the one from which on they do.
    """
    names = ("init_process_group", "new_group")
    plain = {name: getattr(dist.distributed_c10d, name) for name in names}
    plain = {name: f for name, f in plain.items() if not getattr(f, "_paceline_redirected", False)}
    for name, original in plain.items():
        _replace(name, _redirected(original))
    return bool(plain)


def _redirected(original):
    signature = inspect.signature(original)
    in_any_case = original.__name__ == "init_process_group"

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises torch's own sentence
        if in_any_case or "backend" in given.arguments:
            given.arguments["backend"] = redirected(given.arguments.get("backend"))
        return original(*given.args, **given.kwargs)

    wrapper._paceline_redirected = True
    return wrapper


def redirected(backend):
    """The backend that takes the place of one that a script gives: None, a name, or names by device."""
    name = str(backend).lower() if backend is not None else None
    if name is not None and "cpu:gloo" in name.split(",") and hasattr(dist.distributed_c10d, "BackendConfig"):
        return ",".join("cpu:paceline" if one == "cpu:gloo" else one for one in name.split(","))
    if name not in (None, "gloo", "nccl"):
        return backend
    if torch.cuda.is_available():
        return "cpu:paceline,cuda:nccl"
    return "paceline"


def _replace(name, function):
    setattr(dist.distributed_c10d, name, function)
    setattr(dist, name, function)
