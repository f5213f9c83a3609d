#!/usr/bin/env python3
"""./dev demo: trains one model on a small cluster with real link speeds, with plain DDP and with Paceline.

Two clusters of network namespaces on this machine (4 nodes × 1 rank, then 2 × 2), 1 Gb/s Ethernet, real data, seven
ways to carry the gradients. Writes build/demo/report.html, demo.png and result.json, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import output

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VARIANTS = (
    "no-communication",
    "gloo",
    "gloo-fp16",
    "gloo-powersgd",
    "paceline-exact",
    "paceline-fp16",
    "paceline-topk",
)
#: What steady TCP carries of an Ethernet link at MTU 1500.
TCP_SHARE = 0.95


def program() -> Path:
    path = ROOT / "build" / "bin" / "paceline"
    if not path.exists():
        sys.exit(f"demo: {path} is not built; run ./dev build")
    return path


def settings() -> dict:
    """What every rank is started with, unless the user wants it otherwise.

    Top-k's values travel as fp16: what the rounding leaves over is kept too. glibc keeps memory that was freed, in one
    heap of all threads, which compare.py touches: whether it gives a layer's gradient or a hook's copy back to the
    kernel and takes it anew, page by page, is chance, and differs by process.
    """
    heap = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
    return {"PACELINE_TOPK_FP16": "1", **heap, **os.environ}


def run_cluster(nodes: int, slots: int, args, out: Path) -> dict:
    """One launch on `paceline lab`; the figures of compare.py plus the links as calibrated."""
    figures, links = out / f"ranks-{nodes}x{slots}.json", out / f"lab-{nodes}x{slots}.json"
    figures.unlink(missing_ok=True)
    command = [str(program()), "lab", "--nodes", str(nodes), "--slots", str(slots), "--rate", args.rate]
    command += ["--json", str(links), "--", sys.executable, str(HERE / "compare.py"), "--out", str(figures)]
    command += ["--rounds", str(args.rounds), "--steps", str(args.steps), "--variants", *args.variants]
    command += ["--budget", str(args.budget / len(args.clusters))]
    # PowerSGD's hook takes a visible GPU for the model's own.
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    env = {**settings(), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    print(f"==> {nodes} nodes × {slots} rank{'s' if slots > 1 else ''} at {args.rate}", flush=True)
    try:
        code = subprocess.run(command, env=env, check=False, timeout=args.timeout).returncode
    except subprocess.TimeoutExpired:
        sys.exit(
            f"demo: {nodes} × {slots} took longer than {args.timeout:g} s and was ended: "
            "raise --timeout, or lower --budget or --rounds"
        )
    if code != 0 or not figures.exists():
        sys.exit(f"demo: the ranks on {nodes} × {slots} ended with exit code {code}; what they said is above")
    result = json.loads(figures.read_text())
    result.update(nodes=nodes, slots=slots, lab=json.loads(links.read_text()))
    return result


def add_floors(cluster: dict) -> None:
    """The least that a synchronous step can take: max(compute + codec, forward + W / line).

    Each round of a variant is compared with the computing and the codec of that round, so that what else the machine
    does meets both sides; medians of the rounds count. The last rounds hold the quick variants alone.
    """
    line = cluster["lab"]["rate_bps"] / 8 * TCP_SHARE
    runs = {r["name"]: r for r in cluster["runs"]}
    alone, forward = runs["no-communication"]["round_s"], runs["no-communication"]["forward_s"]
    ranks = cluster["nodes"] * cluster["slots"]
    for run in runs.values():
        codec = run["codec_round_s"] or [0.0] * len(alone)
        wire = forward + run["bytes_predicted"] / line if run["bytes_predicted"] else 0.0
        floors = [max(a + c, wire) for a, c, _ in zip(alone, codec, run["round_s"], strict=False)]
        run["codec_s"] = statistics.median(codec)
        run["floor_s"] = statistics.median(floors)
        run["floor_share"] = median_ratio(floors, run["round_s"])
        run["samples_per_s"] = ranks * cluster["batch"] / run["step_s"]
        run["share_of_no_comm"] = median_ratio(alone, run["round_s"])


def median_ratio(above: list[float], below: list[float]) -> float:
    """Of the rounds that both took part in."""
    return statistics.median(a / b for a, b in zip(above, below, strict=False))


def result_rows(clusters: list[dict]) -> list[dict]:
    keys = ("samples_per_s", "share_of_no_comm", "floor_share", "final_accuracy", "bytes_predicted", "bytes_measured")
    return [
        {"name": r["name"], "nodes": c["nodes"], "slots": c["slots"], **{k: r[k] for k in keys}}
        for c in clusters
        for r in c["runs"]
    ]


def print_table(clusters: list[dict]) -> None:
    head = (
        f"{'':20}{'samples/s':>10}{'of no comm':>12}{'of floor':>10}{'MB a step':>11}{'predicted':>11}{'accuracy':>10}"
    )
    for c in clusters:
        print(
            f"\n{c['nodes']} nodes × {c['slots']}, {c['lab']['rate_bps'] / 1e9:g} Gb/s, {c['parameters']:,} parameters"
        )
        print(head)
        for r in c["runs"]:
            print(
                f"{r['name']:20}{r['samples_per_s']:10.0f}{r['share_of_no_comm']:12.1%}{r['floor_share']:10.1%}"
                f"{r['bytes_measured'] / 1e6:11.2f}{r['bytes_predicted'] / 1e6:11.2f}{r['final_accuracy']:10.2%}"
            )


def cluster_text(text: str) -> str:
    """NODESxRANKS, as it is: "4x1"."""
    if not re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not NODESxRANKS, such as 4x1 or 2x2")
    return text


def from_one_on(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 on")
    return int(text)


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds above 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=from_one_on, default=14)
    parser.add_argument("--steps", type=from_one_on, default=5, help="in a block")
    parser.add_argument("--clusters", nargs="+", type=cluster_text, default=["4x1", "2x2"], help="NODESxRANKS")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--budget", type=above_zero, default=480, help="seconds of training in all; a slow machine trains less"
    )
    parser.add_argument("--timeout", type=above_zero, default=1200, help="seconds a cluster may take")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if "no-communication" not in args.variants:
        parser.error("--variants: no-communication is what the others are compared with")
    started = time.monotonic()
    output.prepare(args.out)
    clusters = []
    for text in args.clusters:
        nodes, slots = (int(v) for v in text.split("x"))
        clusters.append(run_cluster(nodes, slots, args, args.out))
        add_floors(clusters[-1])
    output.write(args.out / "details.json", json.dumps(clusters))
    output.write(args.out / "result.json", json.dumps({"runs": result_rows(clusters)}, indent=2) + "\n")
    print_table(clusters)
    import report

    report.write(clusters, args.out)
    print(f"\n{args.out / 'report.html'} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
