#!/usr/bin/env python3
"""Memory that an all-reduce takes beyond the caller's buffer and the residuals, against the buffer.

    python bench/memory.py [--mib 64] [--json FILE]

Four ranks on this machine, as four nodes of one rank and as two of two; codecs exact, fp16, top-k. Each rank resets its
peak of resident memory, runs three all-reduces in place and reads the peak; residuals (two planes of what a rank
encodes) are taken off. Held to: at most 2 × the buffer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

CODECS = {"exact": 0, "fp16": 1, "topk": 3}
GOAL = 2.0


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def rank_main(bytes_: int, slots: int, out: str) -> None:
    os.environ["PACELINE_NODE_ID"] = f"node{int(os.environ['RANK']) // slots}"
    from paceline import communicator as core

    comm = core.Communicator()
    count = bytes_ // 4
    source = random.Random(comm.rank)
    some = (ctypes.c_float * 65536)(*(source.gauss(0, 1) for _ in range(65536)))
    data = (ctypes.c_float * count)()
    for at in range(0, bytes_, ctypes.sizeof(some)):
        ctypes.memmove(ctypes.addressof(data) + at, some, min(ctypes.sizeof(some), bytes_ - at))
    taken = {}
    for name, codec in CODECS.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        for _ in range(3):
            comm.run(
                core.ALL_REDUCE, dtype=0, input=ctypes.addressof(data), output=ctypes.addressof(data), count=count,
                codec=codec, segments=core.segment_array([(1, 0, count)]) if codec == 3 else None, name="memory",
            )  # fmt: skip
        residuals = 2 * bytes_ // slots if codec == 3 else 0
        taken[name] = max(0, resident("VmHWM") - before - residuals)
    comm.run(core.BARRIER, name="end")
    Path(f"{out}.{comm.rank}").write_text(json.dumps(taken))
    comm.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.mib << 20, int(args.rank[0]), args.rank[1])
        return 0
    rows = []
    for nodes, slots in ((4, 1), (2, 2)):
        out = ROOT / "build" / "memory-rank"
        command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--loopback", "--quiet", "--nodes", "4", "--"]
        command += [
            sys.executable,
            str(Path(__file__).resolve()),
            "--mib",
            str(args.mib),
            "--rank",
            str(slots),
            str(out),
        ]
        subprocess.run(command, check=True, timeout=120)
        said = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(4)]
        for codec in CODECS:
            worst = max(s[codec] for s in said) / (args.mib << 20)
            rows.append({"nodes": nodes, "slots": slots, "codec": codec, "mib": args.mib, "buffers": worst})
            print(f"{nodes} × {slots}  {codec:6} {worst:5.2f} × the buffer of {args.mib} MiB")
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = all(row["buffers"] <= GOAL for row in rows)
    print("within" if kept else "NOT within", f"{GOAL:g} × the buffer")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
