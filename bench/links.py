#!/usr/bin/env python3
"""All-reduce on shaped links, against the floor: the busiest link's predicted bytes over 95 % of the nominal rate.

    python bench/links.py                         # every row
    python bench/links.py --rows 1:2x1 1:4x1      # Gb/s:NODESxRANKS
    python bench/links.py --json build/links.json

Each row is one `paceline lab` launch: its links are calibrated first, then the all-reduce runs between barriers; the
median counts. Bytes are counted at the qdiscs that shape the links. No framework is loaded. `cores` is what the ranks
used (user and system time over wall time); the kernel's own packet work on a busy machine comes on top. `link held` is
what the slowest link carried by itself in its calibration, and `of that` the share of a floor at that rate: where a
machine is too slow for its links the nominal rate says little.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools" / "demo")]

import output  # noqa: E402

ROWS = ("1:2x1", "1:4x1", "5:2x1", "5:4x1", "10:2x1", "10:4x1", "1:2x2", "10:2x2")
#: Share of the floor that each row is held to; rows without a number are reported.
GOALS = {"1:2x1": 0.93, "1:4x1": 0.93, "5:2x1": 0.93, "5:4x1": 0.88, "10:2x1": 0.88}
TCP_SHARE = 0.95
#: By how much the bytes on a link may differ from what its plan predicts.
BYTES_OFF = 0.02


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rank_main(sizes: list[int], seconds: float, out: str) -> None:
    """One rank inside the lab; rank 0 writes what was measured."""
    from lab_bytes import busiest, read_links

    from paceline import communicator as core

    comm = core.Communicator()
    word = (ctypes.c_double * 1)()

    def gather(value: float, op: int) -> float:
        word[0] = value
        comm.run(
            core.ALL_REDUCE,
            dtype=core.DTYPES["float64"],
            input=ctypes.addressof(word),
            output=ctypes.addressof(word),
            count=1,
            reduce_op=op,
            name="figures",
        )
        return word[0]

    results = []
    for size in sizes:
        count = size // 4
        source = random.Random(comm.rank)
        some = [source.random() for _ in range(min(count, 4099))]  # a prime: no page is like another
        data = (ctypes.c_float * count)(*itertools.islice(itertools.cycle(some), count))
        output = (ctypes.c_float * count)()
        arguments = {"dtype": 0, "input": ctypes.addressof(data), "output": ctypes.addressof(output), "count": count}

        def once(arguments=arguments) -> float:
            comm.run(core.BARRIER, name="barrier")
            started = time.perf_counter()
            comm.run(core.ALL_REDUCE, name="links", **arguments)
            return time.perf_counter() - started

        for _ in range(3):
            took = once()
        repeats = max(7, int(gather(seconds / took, core.MIN)))
        comm.run(core.BARRIER, name="barrier")
        links, predicted = read_links(), comm.stats()["predicted_link_bytes"]
        cpu, wall = cpu_seconds(), time.perf_counter()
        times = [once() for _ in range(repeats)]
        comm.run(core.BARRIER, name="barrier")
        cores = gather((cpu_seconds() - cpu) / (time.perf_counter() - wall), core.SUM)
        time.sleep(0.1)  # the last acknowledgements
        measured = busiest(links, read_links()) / repeats
        predicted = (comm.stats()["predicted_link_bytes"] - predicted) / repeats
        results.append({
            "bytes": size, "repeats": repeats, "us_p50": gather(statistics.median(times), core.MAX) * 1e6,
            "us_p99": gather(sorted(times)[int(len(times) * 0.99)], core.MAX) * 1e6,
            "bytes_predicted": gather(predicted, core.MAX), "bytes_measured": measured, "cores": cores,
        })  # fmt: skip
    if comm.rank == 0:
        Path(out).write_text(json.dumps({"describe": comm.describe(), "results": results}))
    comm.close()


def run_row(row: str, sizes: list[int], seconds: float) -> list[dict]:
    gigabits, shape = row.split(":")
    nodes, slots = (int(v) for v in shape.split("x"))
    out, lab = ROOT / "build" / "links-ranks.json", ROOT / "build" / "links-lab.json"
    out.unlink(missing_ok=True)
    command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--quiet", "--nodes", str(nodes), "--slots", str(slots)]
    command += ["--rate", f"{gigabits}gbit", "--json", str(lab), "--", sys.executable, str(Path(__file__).resolve())]
    command += ["--rank", str(out), "--seconds", str(seconds), "--mib", *(str(s >> 20) for s in sizes)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "PACELINE_QUIET": "1"})
    said = json.loads(out.read_text())
    links = json.loads(lab.read_text())["links"]
    held = min(link["calibration"][d]["payload_bps"] for link in links for d in ("up", "down"))
    rows = []
    for r in said["results"]:
        floor = r["bytes_predicted"] / (float(gigabits) * 1e9 / 8 * TCP_SHARE) * 1e6
        share = floor / r["us_p50"]
        rows.append({
            "row": row, "op": "all-reduce", "ranks": nodes * slots, "nodes": nodes, "rate_gbps": float(gigabits),
            "dtype": "float32", "floor_us": floor, "floor_share": share, "calibrated_gbps": held / 1e9,
            "held_share": share * TCP_SHARE * float(gigabits) * 1e9 / held,
            "plan": said["describe"], **r,
        })  # fmt: skip
    return rows


def print_rows(rows: list[dict]) -> None:
    print(f"{'Gb/s':>5} {'nodes':>6} {'MiB':>5} {'p50 ms':>9} {'floor ms':>9} {'of floor':>9} {'goal':>6} "
          f"{'MB on link':>11} {'predicted':>10} {'off':>7} {'cores':>6} {'link held':>10} {'of that':>8}")  # fmt: skip
    for r in rows:
        goal = f"{GOALS[r['row']]:.0%}" if r["row"] in GOALS else "-"
        off = r["bytes_measured"] / r["bytes_predicted"] - 1
        print(f"{r['rate_gbps']:5g} {r['row'].split(':')[1]:>6} {r['bytes'] >> 20:5} {r['us_p50'] / 1e3:9.2f} "
              f"{r['floor_us'] / 1e3:9.2f} {r['floor_share']:9.1%} {goal:>6} {r['bytes_measured'] / 1e6:11.3f} "
              f"{r['bytes_predicted'] / 1e6:10.3f} {off:+7.2%} {r['cores']:6.2f} "
              f"{r['calibrated_gbps']:7.2f} Gb {r['held_share']:8.1%}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="GBPS:NODESxRANKS")
    parser.add_argument("--mib", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring per size")
    parser.add_argument("--json", type=Path, help="write one JSON object a line to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [m << 20 for m in args.mib]
    if args.rank:
        rank_main(sizes, args.seconds, args.rank)
        return 0
    output.check(args.json, "links")
    rows = []
    for row in args.rows:
        rows += run_row(row, sizes, args.seconds)
        print(f"==> {row} measured", file=sys.stderr, flush=True)
    print_rows(rows)
    if args.json:
        output.write(args.json, "".join(json.dumps(r) + "\n" for r in rows), "links", "--json")
    short = [r for r in rows if r["floor_share"] < GOALS.get(r["row"], 0)]
    astray = [r for r in rows if abs(r["bytes_measured"] / r["bytes_predicted"] - 1) > BYTES_OFF]
    found = [(r, f"{r['floor_share']:.1%} of its floor, {GOALS[r['row']]:.0%} is the goal") for r in short]
    found += [(r, f"{r['bytes_measured']:.0f} bytes, {r['bytes_predicted']:.0f} predicted") for r in astray]
    for r, what in found:
        print(f"links: {r['row']} of {r['bytes'] >> 20} MiB: {what}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
