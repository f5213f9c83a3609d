"""Inside `paceline lab`: what this node's link has carried, read from the qdiscs that shape it."""

from __future__ import annotations

import json
import os
import socket


def read_links() -> list[dict[str, int]]:
    """One entry per node: up_bytes, up_packets, up_drops, down_bytes, down_packets, down_drops."""
    path = os.environ.get("PACELINE_LAB_BYTES")
    if not path:
        raise RuntimeError("PACELINE_LAB_BYTES is not set: start this with `paceline lab`")
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(path)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    links = json.loads(answer)
    if "error" in links:
        raise RuntimeError(links["error"])
    return links["nodes"]


def busiest(before: list[dict[str, int]], after: list[dict[str, int]]) -> int:
    """Bytes of the link direction that carried most in between."""
    return max(b[key] - a[key] for a, b in zip(before, after) for key in ("up_bytes", "down_bytes"))


def drops(before: list[dict[str, int]], after: list[dict[str, int]]) -> int:
    """Packets that the links' queues dropped in between: TCP sends them again."""
    return sum(b[key] - a[key] for a, b in zip(before, after) for key in ("up_drops", "down_drops"))
