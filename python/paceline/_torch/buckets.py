"""The sizes of DDP's buckets where the script chooses none.

What is ready last must be small: when the backward pass ends, everything else has left. What is ready first should
leave soon. A bucket costs the host and the device some work, so a big model has bigger ones.
"""

import inspect

import torch
from torch.nn.parallel import distributed

from paceline import _state
from paceline import communicator as core
from paceline._torch import cores, rows

MIB = 2**20
#: The usual bucket of a CUDA model is its gradients' bytes over this …
_BUCKETS = 24
#: … within these limits: the thread that trains spends 0.15 to 0.2 ms on a bucket, and a model whose layers are small
#: has none to spare …
_LEAST, _MOST = 4 * MIB, 64 * MIB
#: … and the last ones shrink to this size, each to a quarter of the one before: the first layer's gradient comes long
#: after the others, and nothing else should wait for it. The first ones grow to theirs in the same way, from the least
#: size on: the link has something to carry early.
_LAST, _STEP = MIB // 8, 4
#: A bucket of a CPU model under top-k where a rank has fewer cores than these. What the codec takes, it takes from the
#: core that trains then: nothing hides behind the backward pass, and each bucket more interrupts it more often.
_SPARSE, _CORES_TO_HIDE = 32 * MIB, 2


def fusion_threshold():
    """PACELINE_FUSION_THRESHOLD in bytes; raises InvalidArgumentError that names the variable."""
    text = core.setting("fusion_threshold", _state.face)
    if not text:
        core.check_settings(_state.face)  # raises
    return int(text)


def chosen_size(total):
    """Bytes of a bucket as the user's settings have it for gradients of `total` bytes, 0 for none fused; None: unset.

    PACELINE_FUSION_BUCKETS gives a share of all gradients, PACELINE_FUSION_THRESHOLD the most. With both the one whose
    variable's family comes first holds, as for one setting: HOROVOD_FUSION_THRESHOLD=0 stands in every job's command
    line and must not undo what the face's own variable asks for. Of equal families the smaller holds. Raises
    InvalidArgumentError that names the variable.
    """
    chosen = []
    limit = fusion_threshold()
    if core.setting_source("fusion_threshold", _state.face):
        chosen.append((core.setting_precedence("fusion_threshold", _state.face), limit))
    count = core.setting("fusion_buckets", _state.face)
    if count != "auto":
        share = -(-total // int(count)) if int(count) else 0
        chosen.append((core.setting_precedence("fusion_buckets", _state.face), share))
    return min(chosen)[1] if chosen else None


def for_cpu(arguments, process_group):
    """Arguments of DistributedDataParallel that give a model on the CPU buckets of our sizes: the user's, else
    PACELINE_FUSION_THRESHOLD's default, under top-k more where cores are few and no small one at the end. A collective
    of the group's ranks under top-k.
    """
    chosen = chosen_size(sum(ready_order(arguments["module"])))
    if chosen is not None:
        return {"bucket_cap_mb": max(chosen, 1) / MIB}
    cap = max(fusion_threshold(), 1)
    if core.setting("codec", _state.face) == "topk":
        if cores.for_each_rank(process_group) < _CORES_TO_HIDE:
            cap = _SPARSE
        if caps := _without_a_dense_end(arguments, cap):
            return {"bucket_cap_mb_list": [size / MIB for size in caps]}
    return {"bucket_cap_mb": cap / MIB}


def _without_a_dense_end(arguments, cap):
    """Caps with which what is left at the end joins the bucket before it, where it would be too small for top-k by
    itself; None: nothing to join. A quarter of a mebibyte that travels exactly takes longer than the four before it,
    and nothing hides it.
    """
    if arguments.get("find_unused_parameters") and not arguments.get("static_graph"):
        return None  # such buckets are made once, from the first parameter on: what is small at the end is ready first
    threshold = int(core.setting("topk_threshold", _state.face))
    if not _takes_a_list() or cap < threshold or {p.dtype for p in _ready(arguments["module"])} != {torch.float32}:
        return None
    sizes, size = [], 0
    for one in ready_order(arguments["module"]):
        size += one
        if size >= cap:
            sizes.append(size)
            size = 0
    # Of two buckets in all the first would have to wait for the last gradient.
    if size == 0 or size >= threshold or len(sizes) < 2:
        return None
    # Where the gradients come in another order than the parameters were registered in, more buckets may follow.
    return [cap] * (len(sizes) - 1) + [sizes[-1] + size, cap]


def cap_for_cuda(module):
    """Bytes of a bucket of a CUDA model but for the first and last ones."""
    total = sum(ready_order(module))
    chosen = chosen_size(total)
    return chosen if chosen is not None else usual_size(total)


def tell_compiler(ddp, cap):
    """torch.compile cuts a model's graph by this attribute, which DDP sets to the largest of a list: one large bucket
    would leave a single graph, whose gradients all come at the end of the backward pass."""
    ddp.bucket_bytes_cap = int(cap)


def for_cuda(arguments):
    """Arguments of DistributedDataParallel that give a CUDA model buckets of our sizes."""
    sizes = ready_order(arguments["module"])
    cap = cap_for_cuda(arguments["module"])
    if cap == 0 or not _takes_a_list() or arguments.get("mixed_precision") is not None:
        return {"bucket_cap_mb": max(cap, 1) / MIB}
    caps = plan(sizes, cap, min(_LEAST, cap), min(_LAST, cap), by_rows(arguments["module"]))
    if arguments.get("find_unused_parameters") and not arguments.get("static_graph"):
        caps.reverse()  # such buckets are made once, from the first parameter on
    return {"bucket_cap_mb_list": [size / MIB for size in caps]}


def usual_size(total):
    """Bytes of the usual bucket of a CUDA model with gradients of `total` bytes."""
    return min(max(total // _BUCKETS, _LEAST), _MOST)


def plan(sizes, cap, first, last, alone=()):
    """Bytes of each bucket for gradients of `sizes` bytes in the order in which they are ready.

    Each bucket closes when it holds at least its cap: `first`, growing to `cap`; at the end caps shrink to `last`, as
    far as the gradients' own sizes allow. alone: indices of gradients that have a bucket of their own.
    """
    planned, begin = [], 0
    for index in [*sorted(alone), len(sizes)]:
        ends = not any(i not in alone for i in range(index, len(sizes)))
        planned += _plan_run(sizes[begin:index], cap, cap if planned else first, last if ends else cap)
        planned += sizes[index : index + 1]
        begin = index + 1
    return planned


def _plan_run(sizes, cap, first, last):
    tail, size, limit = [], 0, last
    left = list(sizes)
    while left and limit < cap:
        if size and size + left[-1] > limit:
            tail.append(size)
            size, limit = 0, limit * _STEP
            continue
        size += left.pop()
    left_over, head = size, []
    size, limit = 0, first
    for one in left:
        size += one
        if size >= limit:
            head.append(size)
            size, limit = 0, min(limit * _STEP, cap)
    if size + left_over:
        head.append(size + left_over)
    return head + tail[::-1]


def ready_order(module):
    """Bytes of the gradients, about as they get ready: the last parameter first."""
    return [p.numel() * p.element_size() for p in _ready(module)]


def by_rows(module):
    """Which of these travel by rows: alone in a bucket they are aligned as the path asks, and nothing else is cut."""
    found = rows.of_model(module, core.setting("codec", _state.face))
    return [index for index, parameter in enumerate(_ready(module)) if id(parameter) in found]


def _ready(module):
    return [p for p in module.parameters() if p.requires_grad][::-1]


def _takes_a_list():
    """Whether DDP takes a size for each bucket: newer ones, unless the Python reducer is asked for."""
    if "bucket_cap_mb_list" not in inspect.signature(distributed.DistributedDataParallel.__init__).parameters:
        return False
    return torch._dynamo.utils.get_optimize_ddp_mode() != "python_reducer"
