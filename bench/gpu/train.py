#!/usr/bin/env python3
"""Data-parallel training on GPUs joined by Ethernet: Paceline beside tuned peers and the floor.

    python bench/gpu/train.py                                     # 2 nodes × 2 GPUs, 25 Gb/s, the four main models
    python bench/gpu/train.py --nodes 2 --slots 4 --rate 100gbit --models resnet50 gpt2
    python bench/gpu/train.py --nodes 1 --slots 2 --paths none ddp exact    # one node: beside plain DDP
    python bench/gpu/train.py --plan                              # what would run, and whether the models can be made
    python bench/gpu/train.py --smoke                             # all of it, small, on CPUs

Each model is one `paceline lab` launch: namespaces as nodes, links shaped and calibrated, one process a GPU that holds
every path (a DDP wrapper over its own copy of the model) and visits them in turn. Medians of the rounds count. Written
as it goes: OUT/train.json, train.txt, train.md. With --limit rounds become fewer, never below what was finished.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import train_phases

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tools" / "demo"))  # behind this folder: both have a train.py

import output  # noqa: E402

MODELS = ("resnet50", "gpt2", "vgg16", "bert")
PATHS = ("none", "ddp", "fp16-hook", "powersgd", "exact", "fp16", "fp16-overlap", "int8", "topk")
#: Not run unless asked for.
MORE_PATHS = ("none-joined", "topk-momentum", "exact-overlap", "int8-overlap", "topk-overlap", "fp16-nowait")
THEIRS = ("none", "none-joined", "ddp", "fp16-hook", "powersgd")
#: What the environment does not say otherwise.
NCCL = {
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
}
#: Seconds a model's launch needs before its first round: imports, NCCL, DDP's first iterations.
_START = 40.0


def link_rate(rate):
    """Gb/s, as PACELINE_LINK_RATE wants it, of a rate as tc writes it; 0 where it is written otherwise."""
    found = re.fullmatch(r"([0-9.]+)([gm])bit", rate)
    return f"{float(found[1]) / {'g': 1, 'm': 1000}[found[2]]:g}" if found else "0"


def rank_environment(rate):
    """The variables of a launch over links of this rate; those of this process win."""
    # The namespaces stand for machines, and to another machine memory leaves without a copy.
    env = {"PACELINE_ZERO_COPY": "1", "PACELINE_LINK_RATE": link_rate(rate), **NCCL, **os.environ}
    paths = [str(ROOT / "python"), str(ROOT / "tools" / "demo"), os.environ.get("PYTHONPATH", "")]
    return {**env, "PACELINE_TIMEOUT": "30", "PYTHONPATH": os.pathsep.join(paths)}


def command_of(model, args, out, until, first, skipped):
    """The command line of one model's launch."""
    lab = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--nodes", str(args.nodes), "--slots", str(args.slots)]
    lab += ["--rate", args.rate, "--grace", "2s", "--json", str(out / f"lab-{model}.json")]
    lab += [] if first else ["--no-calibration"]
    rank = [sys.executable, str(HERE / "train_rank.py"), "--model", model, "--out", str(out / f"{model}.json")]
    rank += ["--rounds", str(args.rounds), "--until", f"{until:.1f}", "--ratio", str(args.ratio)]
    rank += ["--settings", json.dumps(args.settings), "--loaders", str(args.loaders)]
    rank += ["--stretch", str(args.stretch)] + (["--warm-up", str(args.warm_up)] if args.warm_up else [])
    rank += ["--smoke"] if args.smoke else []
    rank += ["--phases", str(args.phases)] if args.phases else []
    rank += ["--profile", *args.profile] if args.profile else []
    rank += ["--profile-operators"] if args.profile_operators else []
    return [*lab, "--", *rank, "--paths", *(p for p in args.paths if p not in skipped)]


def run_model(model, args, out, until, first):
    """Runs a model; once more without a path that failed, where time allows. Returns its figures or None."""
    figures = out / f"{model}.json"
    skipped = {}
    while True:
        figures.unlink(missing_ok=True)
        command = command_of(model, args, out, until, first, skipped)
        env = rank_environment(args.rate)
        env["OMP_NUM_THREADS"] = str(args.threads)
        env.update({"CUDA_VISIBLE_DEVICES": ""} if args.smoke else {})
        process = subprocess.Popen(command, env=env)
        try:
            process.wait(max(5.0, until + 25 - time.time()))
        except subprocess.TimeoutExpired:
            print(f"bench: {model} ran past its time", flush=True)
            process.terminate()
            process.wait(20)
        result = json.loads(figures.read_text()) if figures.exists() else None
        failed = _failures(out, model)
        if (result or {}).get("compared"):  # all had their rounds
            break
        if not failed or time.time() + _START > until or set(failed) <= set(skipped):
            break
        skipped.update(failed)
    if result is not None:
        result["failed"] = {**skipped, **failed}
    return result


def _failures(out, model):
    found = {}
    for path in [out / f"{model}.json", *out.glob(f"{model}.failed-*.json")]:
        if path.exists():
            for what, why in json.loads(path.read_text()).get("failed", {}).items():
                # Who saw a rank end says less than that rank does.
                if "PeerLostError" in found.get(what, "PeerLostError"):
                    found[what] = why
    for path in out.glob(f"{model}.failed-*.json"):
        path.unlink()
    return found


def table(results):
    """One line a model and path."""
    head = f"{'model':10} {'path':22}{'ms':>8}{'floor':>8}{'of it':>7}{'of none':>9}"
    head += f"{'wire MB':>9}{'payload':>9}{'cores':>7}{'host ms':>9}{'in hook':>9}{'library':>9}"
    lines = []
    for result in results:
        none = result["paths"].get("none", {}).get("seconds")
        where = f"{result['nodes']}×{result['slots']}"
        trace = result.get("trace", {})
        lines.append(
            f"\n{result['model']} on {where}: {result.get('text', '')}, {result.get('parameters', 0) / 1e6:.1f} M "
            f"parameters; forward {trace.get('forward_s', 0) * 1e3:.1f} ms, backward "
            f"{trace.get('backward_s', 0) * 1e3:.1f}, optimizer {trace.get('optimizer_s', 0) * 1e3:.1f}, "
            f"{len(trace.get('ready_s', []))} buckets; NCCL's algorithm: {result.get('nccl', {}).get('chosen')}"
        )
        lines.append(ready_times(trace))
        lines.append(head)
        for path, f in result["paths"].items():
            floor = f.get("floor")
            cells = f"{f['seconds'] * 1e3:8.1f}"
            cells += f"{floor * 1e3:8.1f}{f['seconds'] / floor:7.3f}" if floor else f"{'-':>8}{'-':>7}"
            cells += f"{none / f['seconds']:9.1%}" if none else f"{'-':>9}"
            cells += f"{f.get('wire', 0) / 1e6:9.2f}{f.get('payload', 0) / 1e6:9.2f}{f['cores']:7.2f}"
            cells += "".join(f"{f[part] * 1e3:9.1f}" for part in ("host", "hook", "library"))
            lines.append(f"{result['model']:10} {path:22}{cells}  ({len(f['rounds'])} rounds of {f['iterations']})")
        lines += train_phases.lines(result)
        lines += against_ddp(result)
        lines += against_the_least(result)
        for path, why in result["failed"].items():
            lines.append(f"{result['model']:10} {path:22} failed: {why.strip().splitlines()[-1]}")
    return "\n".join(lines)


def ready_times(trace):
    """The trace that the floors are made of, in a line: when each bucket is ready, and how large it is.

    Without a step without communication there is no floor: then it is as it was noted, of a step from rest.
    """
    name, ready = "ready", trace.get("floor_ready_s")
    if ready is None:
        name, ready = "ready from rest", trace.get("ready_s", [])
    buckets = zip(ready, trace.get("elements", []))
    return f"{name}, ms:M elements  " + " ".join(f"{at * 1e3:.1f}:{size / 1e6:.3g}" for at, size in buckets)


def against_ddp(result):
    """How long ours take beside DDP, in its rounds one by one: what counts on one node, where both are NCCL."""
    paths = result["paths"]
    if result["nodes"] > 1 or "ddp" not in paths:
        return []
    lines = []
    for path, f in paths.items():
        if path.partition("@")[0] in THEIRS:
            continue
        ratios = [mine / ddp for mine, ddp in zip(f["rounds"], paths["ddp"]["rounds"])]
        text = f"{statistics.median(ratios):.3f} times ddp, in its rounds {min(ratios):.3f} to {max(ratios):.3f}"
        lines.append(f"{result['model']:10} {path:22} {text}")
    return lines


def against_the_least(result):
    """Beside a path without a barrier what no order of its buckets beats: its floor takes the link for always busy."""
    return [
        f"{result['model']:10} {path:22} {f['seconds'] / f['least']:.3f} times what no order beats, "
        f"{f['least'] * 1e3:.1f} ms ({f['least'] / f['floor']:.3f} of the floor)"
        for path, f in result["paths"].items()
        if f.get("least")
    ]


def markdown(results):
    """The same for a page."""
    lines = [
        "| model | nodes × GPUs | path | ms | floor | measured / floor | of no communication "
        "| wire MB | payload MB | cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        none = result["paths"].get("none", {}).get("seconds")
        for path, f in result["paths"].items():
            floor = f.get("floor")
            cells = [result["model"], f"{result['nodes']} × {result['slots']}", path, f"{f['seconds'] * 1e3:.1f}"]
            cells += [f"{floor * 1e3:.1f}", f"{f['seconds'] / floor:.3f}"] if floor else ["–", "–"]
            cells += [f"{none / f['seconds']:.1%}" if none else "–", f"{f.get('wire', 0) / 1e6:.1f}"]
            cells += [f"{f['payload'] / 1e6:.1f}" if f.get("payload") else "–", f"{f['cores']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plan(args):
    """Prints what would run and makes every model, without its memory, where its package is there."""
    import torch

    sys.path.insert(0, str(HERE))
    import train_models

    for model in args.models:
        try:
            with torch.device("meta"):
                workload = train_models.MODELS[model](torch.device("meta"))
            count = sum(p.numel() for p in workload.module.parameters())
            text = f"{workload.text}, {count / 1e6:.1f} M parameters"
        except ImportError as error:
            text = f"not made here: {error}"
        print(f"{model}: {text}\n  paths: {' '.join(args.paths)}")
    command = command_of(args.models[0], args, args.out, time.time() + args.limit, True, {})
    print(f"at most {args.limit:.0f} s, {args.rounds} rounds; the first launch:\n  {' '.join(command)}")


def _path(text):
    """A path, or one with settings of its own after @."""
    name, at, rest = text.partition("@")
    if name not in (*PATHS, *MORE_PATHS):
        raise argparse.ArgumentTypeError(f"{name} is not known; there are {', '.join([*PATHS, *MORE_PATHS])}")
    if at and not all("=" in one for one in rest.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: after @ write NAME=VALUE, several with commas")
    return text


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="GPUs on each node")
    parser.add_argument("--rate", default="25gbit", help="of each node's link, both directions")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help="in order of importance")
    parser.add_argument(
        "--paths",
        nargs="+",
        default=list(PATHS),
        type=_path,
        help="of "
        + ", ".join([*PATHS, *MORE_PATHS])
        + "; topk@PACELINE_LANES=2,…: with settings of its own, fp16-hook@bucket_cap_mb=8: with DDP's arguments",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=520, help="seconds in all")
    parser.add_argument("--ratio", type=float, default=0.01, help="of top-k, for the floor")
    parser.add_argument("--loaders", type=int, default=0, help="busy processes beside each rank, like data loaders")
    parser.add_argument("--stretch", type=float, default=0, help="least seconds of steps timed in a row")
    parser.add_argument("--warm-up", type=int, default=0, help="steps of ours before the first is timed")
    parser.add_argument("--threads", type=int, default=4, help="OMP_NUM_THREADS")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a PACELINE_* setting of ours")
    parser.add_argument(
        "--phases", type=int, default=0, metavar="STEPS", help="by so many steps of each path: where their time goes"
    )
    parser.add_argument(
        "--profile", nargs="+", default=[], metavar="PATH", help="write torch's trace of these paths to OUT, too"
    )
    parser.add_argument("--profile-operators", action="store_true", help="the host's operators too: it is slower then")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-gpu")
    parser.add_argument("--plan", action="store_true", help="print what would run and check the models; run nothing")
    parser.add_argument("--smoke", action="store_true", help="small models on CPUs")
    args = parser.parse_args()
    if "none" not in args.paths:
        parser.error("--paths: none (no communication) is what the others are compared with")
    for path in args.profile:
        if path not in args.paths:
            parser.error(f"--profile: {path} is not among --paths ({', '.join(args.paths)})")
    sys.path.insert(0, str(HERE))
    known = ("resnet50", "vgg16", "gpt2", "bert", "untied", "resnet101", "inception")
    for model in args.models:
        if model not in known:
            parser.error(f"--models: {model} is not known; there are {', '.join(known)}")
    try:
        args.settings = dict(one.split("=", 1) for one in args.set)
    except ValueError:
        parser.error("--set: write NAME=VALUE")
    return args


def main():
    args = arguments()
    if args.plan:
        return plan(args)
    started = time.time()
    output.prepare(args.out, "bench")
    results = []
    for index, model in enumerate(args.models):
        left = started + args.limit - time.time()
        if left < _START:
            print(f"bench: no time left for {', '.join(args.models[index:])}", flush=True)
            break
        # What a model does not need is the next ones'.
        share = min(left, 1.5 * left / (len(args.models) - index))
        result = run_model(model, args, args.out, time.time() + share - 10, index == 0)
        if result is None:
            print(f"bench: {model} left no figures", flush=True)
            continue
        results.append(result)
        figures = json.dumps({"arguments": vars(args), "models": results}, indent=1, default=str)
        output.write(args.out / "train.json", figures, "bench")
        output.write(args.out / "train.txt", table(results) + "\n", "bench")
        output.write(args.out / "train.md", markdown(results) + "\n", "bench")
        print(table(results[-1:]), flush=True)
    print(f"\n{args.out / 'train.json'} ({time.time() - started:.0f} s)")
    return 0 if len(results) == len(args.models) and not any(result["failed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
