#!/usr/bin/env python3
"""A training step without a barrier between iterations, beside one with it and plain DDP, on shaped links.

    python bench/overlap.py                                # 2 nodes × 1 rank, 1 and 4 Gb/s
    python bench/overlap.py --rates 2gbit --codecs fp16 --batch 128
    python bench/overlap.py --json build/overlap.json

Each rate is one `paceline lab` launch: links are calibrated, then all paths run in turn in the same processes, each a
DDP wrapper over its own copy of the demo's model at half its depth (10.6 M parameters); medians of the rounds count. A
stretch of steps begins and ends with nothing under way, so the paths with overlap are charged for their last gradients
too. Those called unordered send their buckets as they come: what the order is worth.

Floors: without a barrier max(compute, W / line); with one, the maximum over buckets of the time at which the bucket is
ready plus what is left to send from there on, plus the optimizer. W: bytes on a node's link; line: 95 % of the rate;
compute: a step whose hook sends nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools" / "demo"), str(ROOT / "bench" / "gpu")]

import output  # noqa: E402
from train_floor import TCP_SHARE, floor_seconds, floor_without_barrier, link_bytes  # noqa: E402

_DEPTH = 10  # of the demo's model
_WARM_UP = 30  # the order of buckets is worked out and tried before


class Path_:
    """One way of training: its model, its optimizer, and what was measured."""

    def __init__(self, name: str, codec: str | None, batch: int) -> None:
        import torch.distributed as dist
        import train
        from torch.nn.parallel import DistributedDataParallel

        import paceline.torch
        from paceline._torch.ddp import attachment_of

        self.name, self.codec, self.batch = name, codec, batch
        self.rounds: list[dict[str, float]] = []
        os.environ["PACELINE_CODEC"] = {"exact": "none", None: "none"}.get(codec, codec)
        if name == "ddp":
            os.environ["PACELINE_DISABLE"] = "1"
        self.model = DistributedDataParallel(
            train.build_model(depth=_DEPTH), process_group=dist.new_group(), gradient_as_bucket_view=True
        )
        os.environ.pop("PACELINE_DISABLE", None)
        self.optimizer = train.build_optimizer(self.model)
        if self.overlaps:
            paceline.torch.DistributedOptimizer(self.optimizer, model=self.model, overlap="forward")
        if name.endswith("unordered"):
            attachment_of(self.model).overlap.order.learns = False
        self.data = train.Digits()
        self._step = train.train_step

    @property
    def overlaps(self) -> bool:
        return self.name.endswith(("overlap", "unordered"))

    def step(self, index: int, rank: int) -> None:
        self._step(self.model, self.optimizer, *self.data.batch(index % 50, rank, size=self.batch))

    def buckets(self) -> dict | None:
        """In which order they are sent, and why; see BucketOrder.report()."""
        from train_paths import order_of

        return order_of(self.model) if self.overlaps else None

    def settle(self) -> None:
        if self.overlaps:
            self.optimizer.synchronize()


class Trace:
    """When the buckets of a path that sends nothing get ready, and how long forward and optimizer take."""

    def __init__(self, path: Path_) -> None:
        self._path = path
        self._buckets: list[tuple[float, int]] = []
        path.model.register_comm_hook(None, self._hook())

    def _hook(self):
        from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

        def trace_hook(state, bucket):
            self._buckets.append((time.perf_counter(), bucket.buffer().numel()))
            return debugging_hooks.noop_hook(state, bucket)

        return trace_hook

    def measure(self, rank: int, steps: int = 15) -> dict:
        import torch

        path, ready, optimizer = self._path, [], []
        for index in range(_WARM_UP + steps):
            x, y = path.data.batch(index % 50, rank, size=path.batch)
            self._buckets.clear()
            started = time.perf_counter()
            path.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(path.model(x), y).backward()
            before = time.perf_counter()
            path.optimizer.step()
            optimizer.append(time.perf_counter() - before)
            ready.append([at - started for at, _ in self._buckets])
        ready = ready[_WARM_UP:]
        return {
            "ready_s": [statistics.median(one[i] for one in ready) for i in range(len(ready[0]))],
            "elements": [elements for _, elements in self._buckets],
            "optimizer_s": statistics.median(optimizer[_WARM_UP:]),
        }


def rank_main(args: argparse.Namespace) -> None:
    """One rank inside the lab; rank 0 writes what was measured."""
    import torch
    import torch.distributed as dist
    from lab_bytes import busiest, read_links

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    none = Path_("none", None, args.batch)
    trace = Trace(none).measure(rank)
    paths = [none, Path_("ddp", "exact", args.batch)]
    for codec in args.codecs:
        paths.append(Path_(codec, codec, args.batch))
        paths += [Path_(f"{codec}-{kind}", codec, args.batch) for kind in ("overlap", "unordered")]

    def largest(value: float) -> float:
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return word.item()

    def stretch(path: Path_) -> dict[str, float]:
        dist.barrier()
        links = read_links()
        dist.barrier()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        for index in range(args.steps):
            path.step(index, rank)
        path.settle()
        took = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        dist.barrier()
        cores = (after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime) / took
        moved = busiest(links, read_links()) / args.steps
        return {"seconds": largest(took) / args.steps, "cores": largest(cores), "wire": moved}

    for path in paths:
        for index in range(_WARM_UP if path.overlaps else 5):
            path.step(index, rank)
        path.settle()
    for turn in range(args.rounds):
        for path in paths[turn % len(paths) :] + paths[: turn % len(paths)]:
            path.rounds.append(stretch(path))
    if rank == 0:
        medians = {
            p.name: {k: statistics.median(r[k] for r in p.rounds) for k in p.rounds[0]}
            | {"codec": p.codec, "rounds": [r["seconds"] for r in p.rounds], "buckets": p.buckets()}
            for p in paths
        }
        Path(args.rank).write_text(
            json.dumps(
                {"trace": trace, "paths": medians, "ranks": size, "rate_bps": float(os.environ["PACELINE_LAB_RATE"])}
            )
        )
    dist.destroy_process_group()


def run_rate(rate: str, args: argparse.Namespace) -> dict:
    out, lab = ROOT / "build" / "overlap-ranks.json", ROOT / "build" / "overlap-lab.json"
    out.unlink(missing_ok=True)
    command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--quiet", "--nodes", str(args.nodes)]
    command += ["--rate", rate, "--json", str(lab), "--", sys.executable, str(Path(__file__).resolve())]
    command += ["--rank", str(out), "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--batch", str(args.batch), "--threads", str(args.threads), "--codecs", *args.codecs]
    env = {**os.environ, "PACELINE_QUIET": "1", "OMP_NUM_THREADS": str(args.threads)}
    try:
        subprocess.run(command, check=True, timeout=args.limit, env=env)
    except subprocess.TimeoutExpired:
        sys.exit(f"overlap: {rate} was not done after {args.limit:g} s; give a larger --limit, or fewer --rounds")
    said = json.loads(out.read_text())
    line = said["rate_bps"] / 8 * TCP_SHARE
    compute = said["paths"]["none"]["seconds"]
    trace = said["trace"]
    for name, figures in said["paths"].items():
        if name == "none":
            continue
        sizes = [link_bytes(figures["codec"], n, args.nodes) for n in trace["elements"]]
        if figures["buckets"] is not None:
            figures["floor"] = floor_without_barrier(sum(sizes), compute, line)
        else:
            ready = list(zip(trace["ready_s"], sizes))
            figures["floor"] = floor_seconds(ready, trace["optimizer_s"], compute, line)
        figures["predicted"] = sum(sizes)
    return {"rate": rate, "nodes": args.nodes, "batch": args.batch, "line_bytes_per_s": line, **said}


def print_rate(result: dict) -> None:
    none = result["paths"]["none"]["seconds"]
    last = result["trace"]["ready_s"][-1] * 1e3
    print(
        f"{result['rate']}, {result['nodes']} nodes × 1 rank, batch {result['batch']}: compute {none * 1e3:.1f} ms, "
        f"last of {len(result['trace']['ready_s'])} buckets ready at {last:.1f} ms"
    )
    print(f"{'path':16}{'ms':>8}{'floor':>8}{'of it':>8}{'of none':>9}{'MB on link':>12}{'predicted':>11}{'cores':>7}")
    for name, f in result["paths"].items():
        floor = f"{f['floor'] * 1e3:8.1f}{f['seconds'] / f['floor']:8.3f}" if "floor" in f else f"{'-':>8}{'-':>8}"
        print(
            f"{name:16}{f['seconds'] * 1e3:8.1f}{floor}{none / f['seconds']:9.1%}{f['wire'] / 1e6:12.2f}"
            f"{f.get('predicted', 0) / 1e6:11.2f}{f['cores']:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "4gbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=["exact", "fp16"], choices=["exact", "fp16", "bf16"])
    parser.add_argument("--batch", type=int, default=64, help="per rank")
    parser.add_argument("--steps", type=int, default=20, help="in a stretch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="torch's, per rank")
    parser.add_argument("--limit", type=float, default=280, help="seconds a rate may take")
    parser.add_argument("--json", type=Path, help="write one JSON object a rate to this file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank_main(args)
    output.check(args.json, "overlap")
    results = []
    for rate in args.rates:
        results.append(run_rate(rate, args))
        print_rate(results[-1])
    if args.json:
        output.write(args.json, "".join(json.dumps(r) + "\n" for r in results), "overlap", "--json")


if __name__ == "__main__":
    main()
