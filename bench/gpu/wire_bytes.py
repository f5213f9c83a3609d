"""Whether a node's link carried what was handed to it for a step: the payload, its headers, and little more."""

from __future__ import annotations

#: An Ethernet frame at MTU 1500, and what of it TCP carries: Ethernet, IPv4, TCP and its time stamps take 66 bytes.
FRAME, SEGMENT = 1514, 1448
#: What may come on top of payload and headers: packets that are sent twice, acknowledgements, frames that are not full.
SHARE = 1.02
#: Bytes a step and rank of a node for control: who is ready, where to send, what has come. Models under top-k were
#: seen to take 17 kB a node (21 buckets) beyond payload and headers; where more is sent SHARE has room for it.
CONTROL = 8 << 10


def framed(payload: float) -> float:
    """The payload with its headers."""
    return payload * FRAME / SEGMENT


def most(payload: float, slots: int) -> float:
    """Bytes that a link may carry in one direction for the payload of a step; slots: ranks of a node."""
    return SHARE * (framed(payload) + slots * CONTROL)


def complaint(payload: float, wire: float, slots: int) -> str:
    """What is wrong with these bytes of a step; "" where nothing is."""
    if payload <= wire <= most(payload, slots):
        return ""
    formula = f"{SHARE} × (payload × {FRAME} / {SEGMENT} + {slots * CONTROL / 1e6:.3f} MB for control)"
    return (
        f"its node's link carried {wire / 1e6:.3f} MB a step: the payload, {payload / 1e6:.3f} MB, or more is right, "
        f"and at most {most(payload, slots) / 1e6:.3f} MB: {formula}"
    )


#: By how much the payload may differ from the formula's: tables beside the numbers (scales of int8, starts of top-k's
#: tiles) are 1 to 2 %, and top-k may keep up to 3 % of its entries back.
UNLIKE = 0.04


def unlike_the_plan(payload: float, predicted: float | None) -> str:
    """What is wrong with the payload of a step beside its bytes by formula; "" where nothing is, or there are none."""
    if not predicted or abs(payload / predicted - 1) <= UNLIKE:
        return ""
    return (
        f"its node sent {payload / 1e6:.3f} MB a step, {payload / predicted - 1:+.1%} beside the "
        f"{predicted / 1e6:.3f} MB that its codec makes of these gradients: at most {UNLIKE:.0%} is right"
    )
