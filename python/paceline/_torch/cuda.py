"""Which way the gradients of a CUDA model take: Paceline's between nodes, or torch's own all-reduce and why.

All ranks of a process group decide together, once: a rank that could not would leave the others waiting.
"""

import ctypes
import os
import time

import torch
import torch.distributed as dist

from paceline import _cuda, _state
from paceline import communicator as core
from paceline._torch import cuda_probe, endpoints, everybody, guard
from paceline._torch.cuda_steps import CudaSteps
from paceline._torch.older import MODERN
from paceline._torch.start_lines import say_once
from paceline.errors import RANK_IS_MISSING, PacelineError, UnsupportedError

_RESIDUAL_CODECS = ("topk", "int8")
#: torch's streams and ours on queues of their own.
_QUEUES = 8
_chosen = {}


class CudaEndpoint:
    """A communicator for tensors of one device, the stream on which its results are joined, the step under way."""

    residual_unit = "average"  # the path scales a gradient before it encodes it

    def __init__(self, communicator, process_group, device):
        self.communicator = communicator
        self.process_group = process_group
        self.device = device
        self.rank, self.size = communicator.rank, communicator.size
        self.codec = core.setting("codec", _state.face)
        self.momentum = float(core.setting("topk_momentum", _state.face)) if self.codec == "topk" else 0.0
        # Of high priority: those streams are nobody's unless asked for, so nothing else gets behind our waits.
        self.side = torch.cuda.Stream(device, priority=-1)
        self.steps = CudaSteps(self, self.codec in _RESIDUAL_CODECS)
        self._sizes = {}  # by model, of those that live
        guard.watch(self.steps)

    def reserve(self, model, size):
        """Memory for one more model's gradients of `size` bytes; collective, for all ranks wrap the same models."""
        self._come_to_rest()
        self._sizes[model] = size
        # A garbage collector may have come to a former model on some ranks only.
        sizes = (ctypes.c_int64 * 2)(sum([*self._sizes.values()]), max([*self._sizes.values()]))
        address = ctypes.addressof(sizes)
        self.communicator.communicator.run(
            core.ALL_REDUCE,
            dtype=core.DTYPES["int64"],
            input=address,
            output=address,
            count=2,
            reduce_op=core.MAX,
            name="sizes of the models",
        )
        self.communicator.reserve(*sizes)

    def _come_to_rest(self):
        self.steps.arrive()
        torch.cuda.synchronize(self.device)

    def release(self, model):
        """The model is gone."""
        self._sizes.pop(model, None)

    def join(self, op, stream):
        """The stream waits, on the device, for the operation; what failed ends torch's own communication too."""
        try:
            self.communicator.join(op, stream)
        except PacelineError as error:
            self.steps.failed(error)
            raise


def device_of(module):
    """The one CUDA device on which all of a module's parameters lie, or None."""
    devices = {p.device for p in module.parameters()}
    device = next(iter(devices)) if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


def carries(module, process_group):
    """Whether a model that is about to be wrapped will travel through Paceline. Collective over the group."""
    group = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    return dist.get_world_size(group) > 1 and endpoint_of(group, device_of(module)) is not None


def endpoint_of(process_group, device):
    """The CudaEndpoint of a process group, or None where its models keep torch's own all-reduce (a line says why).

    The first call for a group and device is collective over its ranks. Under PACELINE_CUDA_PATH=paceline the reason is
    raised as UnsupportedError, on all ranks.
    """
    prune()
    key = (process_group, device)
    if key not in _chosen:
        _chosen[key] = _choose(process_group, device)
    return _chosen[key]


def close(process_group=None):
    """Closes the endpoints of one process group, or of all. Collective, as the groups' own end is."""
    for key in [k for k in _chosen if process_group is None or k[0] is process_group]:
        endpoint = _chosen.pop(key)
        if endpoint is not None:
            _close(endpoint)


def _close(endpoint):
    endpoint.steps.forget()
    endpoint.communicator.close()


def prune():
    """Process groups that were destroyed behind our back."""
    for group in dict.fromkeys(key[0] for key in _chosen):  # as on all ranks: a close waits for the others
        if not endpoints.known(group):
            close(group)


def _choose(process_group, device):
    rank = dist.get_rank(process_group)
    wish = core.setting("cuda_path", _state.face)
    if wish == "torch":
        _keep_torch(wish, "PACELINE_CUDA_PATH=torch asks for it")
        return None
    communicator = endpoints.connect(process_group, "paceline/cuda", "cuda", announce=False)
    try:
        made, reason = _agree(communicator, device)
        endpoint = None if reason else CudaEndpoint(made, process_group, device)
        if endpoint is not None and wish == "auto" and endpoint.codec == "none" and _has_nccl(process_group):
            started = time.perf_counter()
            figures = cuda_probe.compare(made, process_group, device)
            reason = cuda_probe.reason_for_torch(*figures)
            say_once(cuda_probe.outcome(*figures, time.perf_counter() - started))
    except BaseException:
        communicator.abort(f"rank {rank} could not set up the path for CUDA tensors")
        communicator.close()
        raise
    if reason:
        if endpoint is None:
            communicator.close()
        else:
            _close(endpoint)
        _keep_torch(wish, reason)
        return None
    say_once(made.describe().removeprefix("paceline: "))
    _say_what_queues_cost()
    _say_how_to_share_the_link()
    return endpoint


def _has_nccl(process_group):
    """Whether torch's own way of a CUDA model is NCCL: what the probe compares with."""
    return "nccl" in str(dist.get_backend_config(process_group))


def _say_what_queues_cost():
    """Few hardware queues are correct, but streams that share one wait for each other."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdigit() and int(queues) < _QUEUES:
        say_once(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: computation waits for communication now and then: their "
            f"streams share a hardware queue; leave it unset, or give {_QUEUES} or more",
        )


def _say_how_to_share_the_link():
    if float(core.setting("link_rate", _state.face)) == 0:
        say_once(
            "PACELINE_LINK_RATE is not given: with the Gb/s of a node's network, as 25, its ranks share the link by"
            " what they have to send and keep it full to the end of a step",
        )


def _agree(communicator, device):
    """(CudaCommunicator, "") on every rank, or (anything, why not) on every rank."""
    if communicator.identity.node_count <= 1:
        return None, "its ranks share one node, where NCCL needs no help"
    reason = _first_reason(communicator, _lacks(device))
    if reason:
        return None, reason
    return _create(communicator, device)


def _lacks(device):
    """What this rank lacks, as a sentence; "" when nothing."""
    if not MODERN:
        return f"torch {torch.__version__} has no step hook that keeps a fault from changing parameters; use 2"
    if device is None:
        return "its parameters lie on several devices; keep each model on one"
    return _cuda.missing()


def _create(communicator, device):
    """(communicator for CUDA tensors, "") or (None, why not): a creation that fails on one rank fails on all.

    Raises what names a rank that is missing: torch's own all-reduce would wait for it.
    """
    try:
        return _cuda.CudaCommunicator(communicator, device.index), ""
    except RANK_IS_MISSING:
        raise
    except PacelineError as error:
        return None, str(error)


def _first_reason(communicator, mine):
    """The reason of the first rank that has one; the same on all ranks."""
    reasons = everybody.texts(communicator, mine, "way of a CUDA model")
    found = next(((rank, text) for rank, text in enumerate(reasons) if text), None)
    if found is None:
        return ""
    everywhere = all(text == found[1] for text in reasons)
    return found[1] if everywhere else f"rank {found[0]}: {found[1]}"


def _keep_torch(wish, reason):
    if wish == "paceline":
        raise UnsupportedError(f"PACELINE_CUDA_PATH=paceline, but this CUDA model can't travel through it: {reason}")
    say_once(f"the CUDA model keeps torch's own all-reduce: {reason}")
