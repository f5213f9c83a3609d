"""The least that a synchronous data-parallel step can take, from when its gradients are ready.

floor = max over buckets of (ready time + bytes from that bucket on / line) + optimizer, and never below the step
without communication. Without a barrier between iterations the link may carry gradients during the forward pass too.
Bytes are those that a node's link has to carry in one direction.
"""

from __future__ import annotations

import dataclasses

#: What steady TCP carries of an Ethernet link at MTU 1500.
TCP_SHARE = 0.95
#: What switches a setting on.
ON = ("1", "true", "yes", "on")


def link_bytes(codec: str, elements: int, nodes: int, ratio: float = 0.01, value: int = 4) -> float:
    """Bytes of one direction of a node's link for an all-reduce of float32 `elements` over `nodes` nodes.

    ratio: of top-k; value: bytes of a top-k value. Its position takes two more. Tables beside the numbers (scales of
    int8, starts of top-k's tiles) are left out: 1 to 2 %.
    """
    if nodes <= 1:
        return 0.0
    dense = 2 * (nodes - 1) / nodes
    if codec == "exact":
        return 4 * elements * dense
    if codec in ("fp16", "bf16"):
        return 2 * elements * dense
    if codec == "int8":
        return elements * dense
    if codec == "topk":  # from every other node
        return (2 + value) * ratio * elements * (nodes - 1)
    raise ValueError(f"no formula for codec '{codec}'")


def bucket_bytes(codec: str, elements: int, nodes: int, topk: TopK) -> float:
    """link_bytes() of a bucket: what top-k has too few bytes for travels as it is."""
    exact = codec == "topk" and 4 * elements < topk.threshold
    return link_bytes("exact" if exact else codec, elements, nodes, topk.ratio, topk.value)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Which part of a gradient top-k sends, in how many bytes a value, and from how many bytes of gradient on."""

    ratio: float
    value: int
    threshold: int


def topk_format(settings: dict[str, str], ratio: float) -> TopK:
    """What these PACELINE_* variables say of top-k; `ratio`: where they name none."""

    def on(name):
        return settings.get(name, "").lower() in ON

    corrected = float(settings.get("PACELINE_TOPK_MOMENTUM", 0)) > 0  # then nothing may travel without its velocity
    threshold = 0 if corrected else int(settings.get("PACELINE_TOPK_THRESHOLD", 1 << 20))
    return TopK(float(settings.get("PACELINE_TOPK_RATIO", ratio)), 2 if on("PACELINE_TOPK_FP16") else 4, threshold)


def floor_seconds(trace: list[tuple[float, float]], optimizer: float, compute: float, line: float) -> float:
    """trace: (ready seconds since the step began, link bytes) per bucket in order; line: bytes per second."""
    left = sum(size for _, size in trace)
    latest = 0.0
    for ready, size in trace:
        latest = max(latest, ready + left / line)
        left -= size
    return max(compute, latest + optimizer)


def ready_in_a_stretch(ready: list[float], traced: float, compute: float) -> list[float]:
    """Ready times of a step that took `traced` seconds without communication, where others take `compute`.

    A step whose ready times are noted begins on a GPU that has rested: its forward pass may take longer (GPT-2: 38 ms
    where steps in a row take 32). What it took more was before the first gradient: a floor has to be the lower one.
    """
    return [max(at - max(traced - compute, 0.0), 0.0) for at in ready]


def without_zero_rows(sizes: list[float], sent: float) -> list[float]:
    """What of these link bytes, in the order in which they are ready, travels where `sent` of them do.

    The others are rows of embeddings that nobody looked up; an embedding's gradient is ready last.
    """
    saved = max(sum(sizes) - sent, 0.0)
    left = []
    for size in reversed(sizes):
        off = min(size, saved)
        saved -= off
        left.append(size - off)
    return left[::-1]


def floor_without_barrier(link_bytes_in_all: float, compute: float, line: float) -> float:
    """Where each layer's next forward pass waits for its own update only: computing, or keeping the link busy."""
    return max(compute, link_bytes_in_all / line)


def least_without_barrier(step: dict, whole: float, sent: float, compute: float, line: float) -> float | None:
    """Seconds that no order of the buckets beats: when gradients come and when layers want them, as one step had it.

    Nothing but the link takes time, and a bucket may stop for another (Jackson's rule: schedule.py). step: what
    BucketOrder reports; whole: link bytes of all gradients, sent: without rows that stay at home. None: no times noted.
    """
    from paceline._torch import schedule  # only here: the rest is used where no paceline is on the path

    if "ready" not in step:
        return None
    came = sorted(range(len(step["ready"])), key=lambda i: step["ready"][i])
    shares = [step["length"][i] for i in came]
    sizes = without_zero_rows([share / sum(shares) * whole for share in shares], sent)
    ready, tail = ([step[key][i] for i in came] for key in ("ready", "tail"))
    nothing = [0.0] * len(came)
    least = schedule.least_seconds(schedule.Step(ready, [size / line for size in sizes], tail, nothing, nothing))
    return max(compute, least)
