"""DistributedDataParallel through Paceline: a comm hook that every new model gets.

forward() stays untouched, so torch.compile sees DDP as it is. A bucket is all-reduced in place while the backward
pass goes on (cpu_ddp.py, cuda_ddp.py).
"""

import contextlib
import functools
import inspect
import weakref

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states

from paceline import _state
from paceline import communicator as core
from paceline._torch import (
    buckets,
    cpu_ddp,
    cuda,
    cuda_ddp,
    endpoints,
    joined,
    lost_ranks,
    overlap,
    residual_state,
    same_model,
)
from paceline._torch.attachment import completed
from paceline._torch.start_lines import job_rank, say_once
from paceline.errors import PacelineError, UnsupportedError

_attached = weakref.WeakKeyDictionary()
_hooked_before = weakref.WeakSet()
_wrapped = weakref.WeakSet()
#: Whether a model's buffers may differ where broadcast_buffers=False: older torch spreads rank 0's all the same.
_LEAVES_BUFFERS = "broadcast_buffers" in inspect.signature(_sync_module_states).parameters


def attachment_of(ddp):
    """The Attachment of a DistributedDataParallel, or a named error that says why there is none."""
    found = _attached.get(ddp)
    if found is None:
        raise UnsupportedError(
            "this model does not travel through Paceline (one rank, a CUDA model whose ranks share a node, "
            "PACELINE_DISABLE=1, or wrapped before `import paceline.torch`)"
        )
    return found


def attachment_or_none(ddp):
    """The Attachment of a DistributedDataParallel, or None where its gradients don't travel through Paceline."""
    return _attached.get(ddp)


def wrapped_models():
    """All DDP models that were made while Paceline was on."""
    return list(_wrapped)


def paceline_hook(state, bucket):
    """The hook that DDP calls; a user's own hook, registered later, takes its place."""
    if state.delegate is not None:
        hook, hook_state = state.delegate
        return hook(hook_state, bucket)
    bucket = state.numbered(bucket)
    if state.failure is not None and state.is_rest_of_failed_pass(bucket):
        return completed(bucket.buffer())
    try:
        if state.unused is not None:
            if state.overlap is not None and bucket.index() == 0:
                state.overlap.settle()  # the pass before this one
            state.unused.note(bucket, state.overlap is not None)
        if state.overlap is not None:
            return state.overlap.take(bucket)
        return state.all_reduce(bucket)
    except PacelineError as error:
        return state.failed(error, bucket.buffer())


def attach(ddp):
    """Gives a DDP model its way through Paceline, where one applies."""
    if ddp in _attached or ddp in _hooked_before:
        return
    group = ddp.process_group
    if dist.get_world_size(group) <= 1:
        return
    found = _attachment_for(ddp, group)
    if found is None:
        return
    ddp.logger._set_comm_hook_name("paceline")
    dist._register_comm_hook(ddp.reducer, found, paceline_hook)
    _attached[ddp] = found


def _attachment_for(ddp, group):
    """The way of a model, or None where it keeps torch's own, which a line says."""
    if ddp.device_type == "cpu":
        return cpu_ddp.CpuAttachment(ddp, endpoints.of(group))
    if ddp.device_type == "cuda":
        endpoint = cuda.endpoint_of(group, cuda.device_of(ddp.module))
        return cuda_ddp.CudaAttachment(ddp, endpoint) if endpoint is not None else None
    say_once(f"this build accelerates models on CPUs and CUDA; the one on '{ddp.device_type}' keeps torch's all-reduce")
    return None


def patch(module):
    """Patches torch.nn.parallel.distributed (called when it has been imported)."""
    cls = module.DistributedDataParallel
    if "_paceline_patched" in cls.__dict__:
        return
    cls._paceline_patched = True
    _wrap_constructor(cls)
    _wrap_setstate(cls)
    _wrap_register(cls)
    _wrap_register_builtin(cls)
    _wrap_notify(module)
    joined.patch(cls, attachment_or_none)
    lost_ranks.patch_buffers(cls)


def _wrap_constructor(cls):
    """Before torch makes a model, all ranks hear of models that differ, of which torch tells rank 0 nothing; it is made
    with the bucket size that suits a slow link, where the script gives none; then it gets its way.

    Buckets of torch's 25 MiB leave the link idle until a large part of the backward pass is over, and much of the
    gradients to send when it has ended.
    """
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        with lost_ranks.naming():  # torch compares the ranks' parameters and spreads rank 0's
            try:
                given = signature.bind(self, *args, **kwargs)
            except TypeError:
                original(self, *args, **kwargs)  # raises torch's own sentence
                raise
            _check_settings()
            if _compares(given.arguments):
                same_model.check(
                    given.arguments["module"],
                    given.arguments.get("process_group"),
                    buffers=_spreads_buffers(given.arguments),
                )
            _make(self, original, given)
        _remember(self)

    cls.__init__ = __init__


def _check_settings():
    """What is wrong with the settings is raised before anything is exchanged, and by one rank, too, which makes no
    communicator that would look at them: the job that is tried on one rank is the one that runs on many."""
    if not _state.disabled() and dist.is_initialized():
        core.warn_of_settings(job_rank(), _state.face)


def _make(ddp, original, given):
    """Calls DDP's own constructor, with a bucket size of ours where that is to be chosen."""
    if not _chooses_for(given.arguments):
        original(*given.args, **given.kwargs)
        return
    module = given.arguments["module"]
    if all(p.device.type == "cpu" for p in module.parameters()):
        # Without fusion, the smallest cap gives each parameter a bucket of its own.
        chosen = buckets.for_cpu(given.arguments, _group_of(given.arguments))
        given.arguments.update(chosen)
        with _first_bucket_of_at_most(int(chosen.get("bucket_cap_mb", 1) * buckets.MIB)):
            original(*given.args, **given.kwargs)
        if "bucket_cap_mb_list" in chosen:
            buckets.tell_compiler(ddp, chosen["bucket_cap_mb_list"][-1] * buckets.MIB)
        return
    chosen = {}
    if cuda.carries(module, given.arguments.get("process_group")):
        chosen = buckets.for_cuda(given.arguments)
        given.arguments.update(chosen)
    original(*given.args, **given.kwargs)
    if "bucket_cap_mb_list" in chosen:
        buckets.tell_compiler(ddp, buckets.cap_for_cuda(module))


def _chooses_for(arguments):
    """Whether the model may travel through Paceline (several ranks) in buckets of our size."""
    if _state.disabled() or any(arguments.get(name) is not None for name in ("bucket_cap_mb", "bucket_cap_mb_list")):
        return False
    if not dist.is_initialized() or dist.get_world_size() <= 1:
        return False
    if all(p.device.type == "cpu" for p in arguments["module"].parameters()):
        return True
    # A device mesh names its process group only inside DDP: such a model keeps torch's bucket size.
    return arguments.get("device_mesh") is None and cuda.device_of(arguments["module"]) is not None


def _group_of(arguments):
    """The process group that DDP will have."""
    mesh = arguments.get("device_mesh")
    return arguments.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)


@contextlib.contextmanager
def _first_bucket_of_at_most(threshold):
    """torch fills 1 MiB into the first bucket, even where the script asks for smaller ones (before 2.0)."""
    usual = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = min(usual, threshold)
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = usual


def _spreads_buffers(arguments):
    """Whether torch sends rank 0's buffers to all as it makes the model.

    broadcast_buffers=False alone keeps it from that; forward_sync_buffers (from 2.15 on, where None is the default of
    both) says nothing about this but is the one that counts where both are given.
    """
    asked = arguments.get("broadcast_buffers")
    return not _LEAVES_BUFFERS or asked is None or bool(asked) or arguments.get("forward_sync_buffers") is not None


def _compares(arguments):
    """Where torch does, too; a device mesh names its process group only inside DDP."""
    if _state.disabled() or not dist.is_initialized():
        return False
    if arguments.get("device_mesh") is not None or not arguments.get("init_sync", True):
        return False
    return dist.get_world_size(arguments.get("process_group")) > 1


def _wrap_setstate(cls):
    original = cls.__setstate__

    @functools.wraps(original)
    def __setstate__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _remember(self)

    cls.__setstate__ = __setstate__


def _remember(ddp):
    if not _state.disabled() and getattr(ddp, "reducer", None) is not None:
        _wrapped.add(ddp)
        attach(ddp)


def _wrap_register(cls):
    original = cls.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self, state, hook):
        attachment = _attached.get(self)
        if attachment is None:
            original(self, state, hook)
            _hooked_before.add(self)
            return
        if attachment.delegate is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._check_comm_hook(hook)
        _hand_over(self, attachment, hook, state)

    cls.register_comm_hook = register_comm_hook


def _wrap_register_builtin(cls):
    original = cls._register_builtin_comm_hook

    @functools.wraps(original)
    def _register_builtin_comm_hook(self, comm_hook_type):
        attachment = _attached.get(self)
        if attachment is None:
            original(self, comm_hook_type)
            _hooked_before.add(self)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        by_type = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        _hand_over(self, attachment, by_type[comm_hook_type], self.process_group)

    cls._register_builtin_comm_hook = _register_builtin_comm_hook


def _hand_over(ddp, attachment, hook, state):
    if attachment.overlap is not None:
        overlap.refuse_hook()
    name = getattr(hook, "__qualname__", type(hook).__name__)
    ddp.logger._set_comm_hook_name(name)
    if hasattr(ddp, "_comm_hooks"):
        ddp._comm_hooks.append((hook, state))
    attachment.delegate = (hook, state)
    say_once(
        f"the script registered its own comm hook '{name}': this model's gradients travel by it, not by Paceline",
    )


def _wrap_notify(module):
    """What DDP calls as a forward pass begins; in join() it tells how many ranks still have inputs."""
    original = module.Join.notify_join_context

    def notify_join_context(joinable):
        work = original(joinable)
        if not isinstance(joinable, module.DistributedDataParallel):
            return work
        attachment = _attached.get(joinable)
        if attachment is not None:
            if work is not None and attachment.overlap is not None:
                overlap.refuse_join()
            attachment.join_work = work
        if torch.is_grad_enabled() and not joinable._has_rebuilt_buckets:
            _rebuild_buckets(joinable, module.logger)
        return work

    module.Join.notify_join_context = staticmethod(notify_join_context)


def _rebuild_buckets(ddp, logger):
    """What DDP does next, and then finds done: rank 0's order of gradients goes to all, from C++ by their own group."""
    with lost_ranks.naming():
        rebuilt = ddp.reducer._rebuild_buckets()
    if rebuilt:
        logger.info("Reducer buckets have been rebuilt in this iteration.")
        ddp._has_rebuilt_buckets = True


def residual_state_dict(model, all_ranks=False):
    """The residuals of a DDP model's parameters, for a checkpoint.

    Keyed by the parameter's name in the wrapped module; float32 tensors of the parameter's shape. On CUDA under
    PACELINE_TOPK_MOMENTUM the velocities of momentum correction are beside them, likewise. Every rank has its own
    residuals: save the result on every rank, or pass all_ranks=True on every rank (collective) and save
    it on one; only that form can be loaded by another number of ranks.
    """
    return residual_state.read_state(attachment_of(model), all_ranks)


def load_residual_state_dict(model, state):
    """Puts residuals (and velocities) from residual_state_dict() back. Raises InvalidArgumentError that names what
    differs."""
    residual_state.write_state(attachment_of(model), state)


__all__ = ["PacelineError", "attach", "load_residual_state_dict", "patch", "residual_state_dict"]
