"""A port for a server that starts later."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """Nobody has it, and it lies below those that the kernel hands out to whoever runs beside."""
    lowest_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(10_000, lowest_handed_out) or [0]  # 0: where the kernel hands out all, its choice
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", random.choice(below)))
            except OSError:
                continue
            return probe.getsockname()[1]
