"""The ways that gradients can take in the training benchmark: each a DDP wrapper over its own copy of the model."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from train_models import MOMENTUM

#: name: (who, codec of the floor's formula)
PATHS = {
    "none": ("no communication", "exact"),
    "none-joined": ("no communication but a sum of one number: what every synchronous step waits for", "exact"),
    "ddp": ("DDP, NCCL sockets", "exact"),
    "fp16-hook": ("DDP, fp16 hook", "fp16"),
    "powersgd": ("DDP, PowerSGD rank 2", None),
    "exact": ("Paceline exact", "exact"),
    "fp16": ("Paceline fp16", "fp16"),
    "int8": ("Paceline int8", "int8"),
    "topk": ("Paceline top-k 1 %", "topk"),
    "topk-momentum": ("Paceline top-k 1 %, momentum corrected", "topk"),
    "exact-overlap": ("Paceline exact, no barrier between iterations", "exact"),
    "fp16-overlap": ("Paceline fp16, no barrier between iterations", "fp16"),
    "int8-overlap": ("Paceline int8, no barrier between iterations", "int8"),
    "topk-overlap": ("Paceline top-k 1 %, no barrier between iterations", "topk"),
    "fp16-nowait": ("Paceline fp16, no wait before the step: what the wait costs", "fp16"),
}
OURS = ("exact", "fp16", "int8", "topk", "topk-momentum", "exact-overlap", "fp16-overlap", "int8-overlap")
OURS += ("topk-overlap", "fp16-nowait")


def parts(path):
    """("topk", {"PACELINE_LANES": "2"}) of "topk@PACELINE_LANES=2": a path with settings of its own (more after ,).

    torch's own have arguments of DDP instead: "fp16-hook@bucket_cap_mb=8".
    """
    name, _, rest = path.partition("@")
    return name, dict(one.split("=", 1) for one in rest.split(",") if one)


def own_settings(path):
    """The PACELINE_* variables of a path of ours that are not all paths'."""
    name, own = parts(path)
    return {**({"PACELINE_TOPK_MOMENTUM": str(MOMENTUM)} if name.endswith("-momentum") else {}), **own}


@contextlib.contextmanager
def environment(**variables):
    """Variables of this process while something is made that reads them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wrap_plain(module, device, group, **arguments):
    """DistributedDataParallel as torch makes it."""
    with environment(PACELINE_DISABLE="1"):
        return _ddp(module, device, group, **arguments)


def our_environment(codec, device, nodes, settings):
    """The variables under which a path of ours is made; `settings`, of --set and behind a path's @, win."""
    chosen = {"PACELINE_CODEC": "none" if codec == "exact" else codec}
    if device == "cuda" and nodes > 1:
        # What is measured is this path, also where the probe would choose NCCL. On one node NCCL is what is chosen.
        chosen["PACELINE_CUDA_PATH"] = "paceline"
    return {**chosen, **settings}


def wrap_ours(module, device, codec, settings, nodes, algorithm="unset"):
    """DistributedDataParallel as `import paceline.torch` makes it, with a communicator of its own.

    algorithm: of the NCCL group to which it belongs, as in nccl_group(): that group carries its gradients on one node,
    or where Paceline chooses it, and DDP's beside it has the fastest.
    """
    if device.type == "cuda":
        group = nccl_group(algorithm, lambda group: dist.all_reduce(torch.ones(1, device=device), group=group))
    else:
        group = dist.new_group()
    with environment(**our_environment(codec, device.type, nodes, settings)):
        return _ddp(module, device, group)


def _ddp(module, device, group, **arguments):
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        module, device_ids=ids, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True, **arguments
    )


def make(path, module, device, peers, settings, nodes):
    """The model wrapped for a path; peers: (algorithm, group) of torch's own paths, as of fastest_group()."""
    name, own = parts(path)
    algorithm, group = peers
    if name in OURS:
        model = wrap_ours(module, device, name.split("-")[0], {**settings, **own_settings(path)}, nodes, algorithm)
        if name.endswith("-nowait"):
            _do_not_wait(model)
        return model
    model = wrap_plain(module, device, group, **{key: float(value) for key, value in own.items()})
    if name == "none":
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name == "none-joined":
        model.register_comm_hook((group, torch.ones(1, device=device)), joining_hook)
    elif name == "fp16-hook":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def is_ours(path):
    """Whether Paceline carries the path's gradients."""
    return parts(path)[0] in OURS


def keeps_ranks_equal(path):
    """Whether ranks that begin with the same parameters must have the same bits after any number of steps."""
    name = parts(path)[0]
    return name in OURS or name in ("ddp", "fp16-hook")


def without_barrier(path):
    """Whether the path's optimizer updates parameters as their gradients arrive."""
    return parts(path)[0].endswith("-overlap")


def give_optimizer(path, optimizer, model):
    """The optimizer as the path uses it."""
    if "PACELINE_TOPK_MOMENTUM" in own_settings(path):
        for group in optimizer.param_groups:
            if group.get("momentum") != MOMENTUM:
                kind = type(optimizer).__name__
                raise ValueError(f"{path}: {kind} has no momentum of {MOMENTUM}: take a model that SGD trains")
            group["momentum"] = 0.0
    if without_barrier(path):
        import paceline.torch

        paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")
    return optimizer


def attachment_of(model):
    """Paceline's side of a wrapped model; None where it keeps torch's own all-reduce."""
    from paceline._torch import ddp

    return ddp.attachment_or_none(model)


def order_of(model):
    """In which order the path's buckets are sent, and the times from which that follows; see BucketOrder.report()."""
    attachment = attachment_of(model)
    return None if attachment is None else attachment.overlap.order.report()


def keep_order(model):
    """The order of buckets stays as it is by now."""
    attachment = attachment_of(model)
    if attachment is not None and attachment.overlap is not None:
        attachment.overlap.order.learns = False


def settle(variant):
    """Gradients and updates of a train_rank.Variant that are under way count for the step that made them."""
    if hasattr(variant.optimizer, "synchronize"):
        variant.optimizer.synchronize()
    steps = _steps_on_a_gpu(variant.model)
    if steps is not None and parts(variant.path)[0].endswith("-nowait"):
        steps.arrive()  # while gradients are under way elsewhere no path's optimizer is given a gate: its host waits


def _do_not_wait(model):
    """Faults could then change parameters: for measuring only."""
    steps = _steps_on_a_gpu(model)
    if steps is not None:
        steps.before_step = lambda *_, **__: None


def _steps_on_a_gpu(model):
    attachment = attachment_of(model)
    steps = None if attachment is None else attachment.endpoint.steps
    return steps if hasattr(steps, "arrive") else None


def joining_hook(state, bucket):
    """Communicates no gradient, but the optimizer's step waits for all ranks, by a sum of one number at the pass's end.

    So ranks whose hosts take now more, now less time wait for each other in every step, as in all synchronous training.
    """
    group, number = state
    if not bucket.is_last():
        return debugging_hooks.noop_hook(None, bucket)
    summed = dist.all_reduce(number, group=group, async_op=True).get_future()
    return summed.then(lambda _: bucket.buffer())


class ReadyTrace:
    """A hook that communicates nothing and notes when each bucket is ready, on the device's clock."""

    def __init__(self, clock):
        self._clock = clock
        self.buckets = []

    def __call__(self, _state, bucket):
        self.buckets.append((self._clock.mark(), bucket.buffer().numel()))
        return debugging_hooks.noop_hook(None, bucket)

    __qualname__ = "ReadyTrace"


def wrap_trace(module, device, group, clock):
    """The model in Paceline's buckets without communication: (model, its ReadyTrace)."""
    from paceline._torch import buckets

    if device.type == "cuda":
        arguments = buckets.for_cuda({"module": module})
    else:
        arguments = {"bucket_cap_mb": buckets.fusion_threshold() / buckets.MIB}
    model = wrap_plain(module, device, group, **arguments)
    trace = ReadyTrace(clock)
    model.register_comm_hook(None, _as_function(trace))
    return model, trace


def _as_function(trace):
    def ready_trace_hook(state, bucket):
        return trace(state, bucket)

    return ready_trace_hook


def nccl_group(algorithm, use):
    """A group whose all-reduce has this algorithm of NCCL's; "unset": what NCCL, or the environment, makes of it.

    use(group), a collective, is called where NCCL reads which one that is.
    """
    # Only the all-reduce: NCCL refuses operations for which the named algorithm does not exist.
    with environment(**({} if algorithm == "unset" else {"NCCL_ALGO": f"allreduce:{algorithm}"})):
        group = dist.new_group()
        use(group)
    return group


def nccl_groups(use):
    """NCCL's groups by the algorithm of their all-reduce, see nccl_group()."""
    return {algorithm: nccl_group(algorithm, use) for algorithm in ("unset", "Ring", "Tree")}


def fastest_group(device, seconds_of):
    """NCCL's groups by algorithm, tried on one all-reduce: (name of the fastest, its group, seconds by name)."""
    if device.type != "cuda":
        return "gloo", dist.group.WORLD, {}
    tried = {}
    groups = nccl_groups(lambda group: tried.update({group: seconds_of(group)}))
    seconds = {name: tried[group] for name, group in groups.items()}
    best = min(seconds, key=seconds.get)
    return best, groups[best], seconds


def label(path):
    """What tables and pictures call a path: settings of its own are part of the name."""
    name, settings = parts(path)
    return ", ".join([PATHS[name][0], *(f"{setting}={value}" for setting, value in settings.items())])


def release():
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
