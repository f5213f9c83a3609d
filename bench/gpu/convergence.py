#!/usr/bin/env python3
"""Whether what travels changes what is learnt: loss over steps and over seconds, by codec and optimizer.

    python bench/gpu/convergence.py                                 # 2 nodes × 1 GPU (which they may share), 25 Gb/s
    python bench/gpu/convergence.py --tasks gpt --codecs exact int8 --steps 1000
    python bench/gpu/convergence.py --smoke                         # small models on CPUs
    python bench/gpu/convergence.py --draw OUT                      # tables and a picture from figures taken before

A byte-level GPT on the Python library's sources: a codec keeps up where its validation loss is within 1 % of exact, or
within two standard deviations of exact's three seeds, whichever is more. ResNet-18 on scikit-learn's digits: within 0.5
points of accuracy. `topk-momentum` applies SGD's momentum before the selection. Exact runs with every seed, the others
with the first --other-seeds; runs are ordered so that a cut (--limit) leaves whole comparisons.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tools" / "demo"))  # behind this folder: both have a train.py

import output  # noqa: E402

CODECS = ("exact", "fp16", "int8", "topk", "topk-momentum")
TASKS = ("gpt", "resnet")


def runs_of(args):
    """[(codec, optimizer, seed)]: a comparison's exact run comes before what is compared with it."""
    runs = []
    for seed in range(args.seeds):
        for optimizer in args.optimizers:
            for codec in args.codecs:
                if codec == "topk-momentum" and optimizer != "sgd":
                    continue
                if codec == "exact" or seed < args.other_seeds:
                    runs.append((codec, optimizer, seed))
    return runs


def verdicts(result):
    """One row a codec and optimizer: its mean score, how far from exact, what is allowed, whether it keeps up."""
    rows = []
    last = {}
    for run in result["runs"]:
        last.setdefault((run["optimizer"], run["codec"]), []).append(run["points"][-1])
    for (optimizer, codec), points in last.items():
        exact = [p[3] for p in last.get((optimizer, "exact"), [])]
        scores = [p[3] for p in points]
        row = {"optimizer": optimizer, "codec": codec, "seeds": len(scores), "score": statistics.mean(scores)}
        row["seconds"] = statistics.mean(p[1] for p in points)
        if exact:
            middle = statistics.mean(exact)
            if result["lower_is_better"]:
                spread = 2 * statistics.stdev(exact) if len(exact) > 1 else 0.0
                row["allowed"] = max(0.01 * middle, spread)
                row["off"] = row["score"] - middle
            else:
                row["allowed"] = 0.005
                row["off"] = middle - row["score"]
            row["keeps_up"] = row["off"] <= row["allowed"]
        rows.append(row)
    return sorted(rows, key=lambda r: (r["optimizer"], CODECS.index(r["codec"])))


def table(result):
    lines = [f"{result['text']}; {result['ranks']} ranks, {result['steps']} steps; {result['metric']}", ""]
    lines.append("| optimizer | codec | seeds | score | worse than exact by | allowed | keeps up | seconds |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in verdicts(result):
        cells = [r["optimizer"], r["codec"], str(r["seeds"]), f"{r['score']:.4f}"]
        if r["codec"] == "exact" or "off" not in r:
            cells += ["", f"{r['allowed']:.4f}" if "allowed" in r else "", ""]
        else:
            cells += [f"{r['off']:+.4f}", f"{r['allowed']:.4f}", "yes" if r["keeps_up"] else "no"]
        lines.append("| " + " | ".join([*cells, f"{r['seconds']:.1f}"]) + " |")
    return "\n".join(lines)


def draw(results, picture):
    """Score over steps and over seconds, a row a task and optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(result, name) for result in results for name in sorted({r["optimizer"] for r in result["runs"]})]
    figure, axes = plt.subplots(len(rows), 2, figsize=(11, 3.2 * len(rows)), squeeze=False)
    for (result, name), (by_step, by_second) in zip(rows, axes):
        for codec in CODECS:
            runs = [r for r in result["runs"] if r["optimizer"] == name and r["codec"] == codec and r["seed"] == 0]
            for run in runs:
                steps, seconds, _, scores = zip(*run["points"])
                by_step.plot(steps, scores, marker=".", label=codec)
                by_second.plot(seconds, scores, marker=".", label=codec)
        by_step.set(title=f"{result['task']}, {name}", xlabel="steps", ylabel=result["metric"])
        by_second.set(title=f"{result['task']}, {name}", xlabel="seconds")
        by_step.legend()
    figure.tight_layout()
    output.write(picture, output.drawn(figure), "convergence", "--draw")


def launch(task, args, until):
    out = args.out / f"convergence-{task}.json"
    command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--nodes", str(args.nodes), "--slots", str(args.slots)]
    command += ["--rate", args.rate, "--grace", "2s", "--no-calibration"] if not args.smoke else ["--loopback"]
    command += ["--", sys.executable, str(HERE / "convergence_rank.py"), "--task", task, "--out", str(out)]
    command += ["--runs", json.dumps(runs_of(args)), "--steps", str(args.steps), "--until", f"{until:.1f}"]
    command += ["--smoke"] if args.smoke else []
    env = {**os.environ, "PACELINE_TIMEOUT": "30", "OMP_NUM_THREADS": "4" if not args.smoke else "1"}
    env.update({"CUDA_VISIBLE_DEVICES": ""} if args.smoke else {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1"})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    out.unlink(missing_ok=True)
    process = subprocess.Popen(command, env=env)
    try:
        process.wait(max(10.0, until + 60 - time.time()))
    except subprocess.TimeoutExpired:
        print(f"convergence: {task} ran past its time", flush=True)
        process.terminate()
        process.wait(20)
    return json.loads(out.read_text()) if out.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--codecs", nargs="+", choices=CODECS)
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adamw"], choices=("sgd", "adamw"))
    parser.add_argument("--seeds", type=int, default=3, help="of exact")
    parser.add_argument("--other-seeds", type=int, default=1, help="of the other codecs")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="GPUs on each node")
    parser.add_argument("--rate", default="25gbit")
    parser.add_argument("--limit", type=float, default=520, help="seconds in all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-gpu")
    parser.add_argument("--smoke", action="store_true", help="small models on CPUs, the codecs that are there")
    parser.add_argument("--draw", type=Path, metavar="DIRECTORY", help="only tables and a picture of its figures")
    args = parser.parse_args()
    if args.draw:
        results = [json.loads(f.read_text()) for f in sorted(args.draw.glob("convergence-*.json"))]
        if not results:
            parser.error(f"--draw: {args.draw} has no convergence-*.json")
        print("\n\n".join(table(r) for r in results))
        draw(results, args.draw / "convergence.png")
        return 0
    args.codecs = args.codecs or (("exact", "fp16", "topk") if args.smoke else CODECS)
    args.steps = args.steps or (30 if args.smoke else 400)
    output.prepare(args.out, "convergence")
    started, kept = time.time(), True
    for index, task in enumerate(args.tasks):
        share = (started + args.limit - time.time()) / (len(args.tasks) - index)
        result = launch(task, args, time.time() + share)
        if result is None or not result["runs"]:
            print(f"convergence: {task} left no figures", flush=True)
            kept = False
            continue
        print(table(result), flush=True)
        kept = kept and all(r.get("keeps_up", True) for r in verdicts(result))
    print("every codec keeps up" if kept else "NOT every codec keeps up, or figures are missing")
    return 0 if kept or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
