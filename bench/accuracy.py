#!/usr/bin/env python3
"""Whether what travels changes what is learnt: test accuracy with exact, fp16 and top-k gradients, several seeds.

    python bench/accuracy.py [--seeds 3] [--steps 300] [--json FILE]

The demo's network at half its depth (10.6 M parameters) and its data (2,500 test samples that are never trained on);
real Paceline ranks as processes on this machine, each told that it is a node of its own, so that every gradient passes
the codec. Held to: mean accuracy within 0.5 points of exact.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools" / "demo")]

import output  # noqa: E402

#: By name: PACELINE_CODEC and PACELINE_TOPK_FP16.
CODECS = {"none": ("none", "0"), "fp16": ("fp16", "0"), "topk": ("topk", "0"), "topk-fp16": ("topk", "1")}
GOAL_POINTS = 0.5
DEPTH = 10  # of the network


def rank_main(seeds: int, steps: int, out: str) -> None:
    import torch.distributed as dist
    import train
    from torch.nn.parallel import DistributedDataParallel

    import paceline.torch  # noqa: F401

    os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = train.Digits()
    results = []
    for seed in range(seeds):
        for codec, (name, halves) in CODECS.items():
            os.environ.update(PACELINE_CODEC=name, PACELINE_TOPK_FP16=halves)
            group = dist.new_group(backend="gloo")
            model = DistributedDataParallel(
                train.build_model(seed, DEPTH), process_group=group, gradient_as_bucket_view=True
            )
            optimizer = train.build_optimizer(model)
            schedule = train.torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for step in range(steps):
                loss = train.train_step(model, optimizer, *data.batch(step, rank, seed))
                schedule.step()
            share = train.accuracy(model.module, data, rank, size)
            results.append({"seed": seed, "codec": codec, "accuracy": share, "loss": float(loss)})
            if rank == 0:
                print(f"seed {seed}, {codec}: accuracy {share:.4f}", flush=True)
                Path(out).write_text(json.dumps({"results": results, "samples": len(data.test_y), "ranks": size}))
            del model, optimizer, schedule
            dist.destroy_process_group(group)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds in all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.seeds, args.steps, args.rank)
        return 0
    output.check(args.json, "accuracy")
    out = ROOT / "build" / "accuracy-ranks.json"
    command = [
        str(ROOT / "build" / "bin" / "paceline"),
        "lab",
        "--loopback",
        "--quiet",
        "--nodes",
        str(args.ranks),
        "--",
    ]
    command += [sys.executable, str(Path(__file__).resolve()), "--rank", str(out)]
    command += ["--seeds", str(args.seeds), "--steps", str(args.steps)]
    subprocess.run(command, check=True, timeout=args.timeout)
    said = json.loads(out.read_text())
    means = {c: statistics.mean(r["accuracy"] for r in said["results"] if r["codec"] == c) for c in CODECS}
    print(f"\n{said['ranks']} ranks, {args.steps} steps, {args.seeds} seeds, {said['samples']} test samples")
    kept = True
    for codec, mean in means.items():
        off = (mean - means["none"]) * 100
        kept = kept and abs(off) <= GOAL_POINTS
        print(f"{codec:9} {mean:8.2%}  {off:+.2f} points")
    if args.json:
        output.write(
            args.json, json.dumps({**said, "means": means, "kept": kept}, indent=2) + "\n", "accuracy", "--json"
        )
    print("within" if kept else "NOT within", f"{GOAL_POINTS} points of exact")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
