#!/usr/bin/env python3
"""Sharded models (fully_shard) on GPUs joined by Ethernet: Paceline's process group beside NCCL's sockets.

    python bench/gpu/sharded.py                                   # 2 nodes × 2 GPUs, 25 Gb/s, GPT-2 medium
    python bench/gpu/sharded.py --models bert --paths node hybrid-nccl hybrid
    python bench/gpu/sharded.py --smoke                           # all of it, small, on CPUs

Each model is one `paceline lab` launch with a process a GPU that holds every path and visits them in turn; medians of
the rounds count. `full`: parameters sharded over all ranks; `hybrid`: over a node's, with a copy on each node; `node`:
hybrid without the sum over nodes. The floor is the greater of `node` and the path's bytes on a node's link at 95 % of
the line with what can't be hidden behind them: the update, a hybrid's forward pass. Written as it goes:
OUT/sharded.json, sharded.txt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from train import rank_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tools" / "demo"))  # behind this folder: both have a train.py

import output  # noqa: E402

MODELS = ("gpt2", "bert", "untied")
PATHS = (
    *("node", "full-nccl", "full", "full-nccl-bf16", "full-bf16"),
    *("hybrid-nccl", "hybrid", "hybrid-nccl-bf16", "hybrid-bf16"),
)


def run_model(model, args, until, first):
    """Runs a model; its figures, or None where it left none."""
    figures = args.out / f"sharded-{model}.json"
    figures.unlink(missing_ok=True)
    command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--nodes", str(args.nodes), "--slots", str(args.slots)]
    command += ["--rate", args.rate, "--grace", "2s", *([] if first else ["--no-calibration"]), "--"]
    command += [sys.executable, str(HERE / "sharded_rank.py"), "--model", model, "--out", str(figures)]
    command += ["--rounds", str(args.rounds), "--until", f"{until:.1f}", *(["--smoke"] if args.smoke else [])]
    command += ["--paths", *args.paths, "--profile", *args.profile]
    env = {**rank_environment(args.rate), "OMP_NUM_THREADS": "1" if args.smoke else "4"}
    env.update({"CUDA_VISIBLE_DEVICES": ""} if args.smoke else {})
    process = subprocess.Popen(command, env=env)
    try:
        process.wait(max(5.0, until + 25 - time.time()))
    except subprocess.TimeoutExpired:
        print(f"bench: {model} ran past its time", flush=True)
        process.terminate()
        process.wait(20)
    return json.loads(figures.read_text()) if figures.exists() else None


def table(result):
    """One line a path."""
    where = f"{result['nodes']} × {result['slots']}"
    lines = [f"{result['text']}, {result.get('parameters', 0) / 1e6:.1f} M parameters, {where}"]
    lines.append(f"{'path':18}{'ms':>8}{'floor':>8}{'of it':>7}{'wire MB':>9}{'cores':>7}{'loss':>9}")
    for name, f in result["paths"].items():
        floor = f"{f['floor'] * 1e3:8.1f}{f['seconds'] / f['floor']:7.2f}" if f["floor"] else f"{'-':>8}{'-':>7}"
        cells = f"{f['seconds'] * 1e3:8.1f}{floor}{f['wire'] / 1e6:9.1f}{f['cores']:7.2f}{f['losses'][-1]:9.4f}"
        lines.append(f"{name:18}{cells}  {f['text']} ({len(f['rounds'])} rounds of {f['iterations']})")
    lines += [f"{name:18} failed: {why.strip().splitlines()[-1]}" for name, why in result["failed"].items()]
    return "\n".join(lines)


def path_of(text):
    """A path, or one of ours with settings of its own after @."""
    name, at, rest = text.partition("@")
    if name not in PATHS:
        raise argparse.ArgumentTypeError(f"{name} is not known; there are {', '.join(PATHS)}")
    if at and not all("=" in one for one in rest.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: after @ write NAME=VALUE, several with commas")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="GPUs on each node")
    parser.add_argument("--rate", default="25gbit", help="of each node's link, both directions")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2"], metavar="MODEL")
    parser.add_argument(
        "--paths",
        nargs="+",
        type=path_of,
        default=list(PATHS),
        metavar="PATH",
        help="full@PACELINE_LANES=2: with settings",
    )
    parser.add_argument("--profile", nargs="+", default=[], metavar="PATH", help="write the GPU's trace of these, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=300, help="seconds in all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-gpu")
    parser.add_argument("--smoke", action="store_true", help="small models on CPUs")
    args = parser.parse_args()
    output.prepare(args.out, "bench")
    results, until = [], time.time() + args.limit
    for index, model in enumerate(args.models):
        left = until - time.time()
        result = run_model(model, args, time.time() + left / (len(args.models) - index) - 10, index == 0)
        if result is None:
            print(f"bench: {model} left no figures", flush=True)
            continue
        results.append(result)
        figures = json.dumps({"arguments": vars(args), "models": results}, default=str)
        output.write(args.out / "sharded.json", figures, "bench")
        output.write(args.out / "sharded.txt", "\n\n".join(map(table, results)) + "\n", "bench")
        print(table(result), flush=True)
    return 0 if len(results) == len(args.models) and not any(r["failed"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
