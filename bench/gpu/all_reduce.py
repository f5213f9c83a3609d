#!/usr/bin/env python3
"""All-reduce of float32 device memory, 1 KB to 1 GB: Paceline's codecs beside NCCL's sockets, and the floor.

    python bench/gpu/all_reduce.py                               # 2 nodes × 2 GPUs, 25 Gb/s
    python bench/gpu/all_reduce.py --slots 1 --sizes 64KB 16MB    # namespaces may share one GPU

One launch of `paceline lab`; sizes from small to large, paths in turn, medians. The floor is the codec's bytes on a
node's link at 95 % of the line. NCCL has, for each size, the algorithm that is fastest there. Time is the host's, from
the call until the device has the result. Before a size is measured a result of each of our paths is held against
NCCL's; one that differs is named, and measured no more.
"""

from __future__ import annotations

import argparse
import functools
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

SIZES = ("1KB", "4KB", "16KB", "64KB", "256KB", "1MB", "4MB", "16MB", "64MB", "256MB", "1GB")
PATHS = ("nccl", "exact", "fp16", "int8", "topk")


def parse_size(text):
    """Bytes of "64KB"; powers of 1024."""
    units = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
    try:
        return int(text[:-2]) * units[text[-2:]]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write it like 64KB or 16MB") from None


class Rank:
    """One rank: its GPU, NCCL's groups by algorithm, a communicator of Paceline's for each codec."""

    def __init__(self, args):
        import torch
        import torch.distributed as dist
        import train_paths

        self.torch, self.dist, self.args = torch, dist, args
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.slots = int(os.environ.get("PACELINE_LAB_SLOTS", "1"))
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.control = dist.new_group(backend="gloo")
        warm_up = torch.ones(1024, device=self.device)
        self.groups = train_paths.nccl_groups(lambda group: dist.all_reduce(warm_up, group=group))
        self.line = float(os.environ["PACELINE_LAB_RATE"]) / 8 * 0.95
        self.made = {path: self._communicator(path) for path in args.paths if path != "nccl"}

    def _communicator(self, path):
        import train_paths

        import paceline.torch  # noqa: F401
        from paceline import _cuda
        from paceline import communicator as core
        from paceline._torch.stores import TorchStore

        store = TorchStore(self.dist.distributed_c10d._get_default_store())
        with train_paths.environment(PACELINE_CODEC="none" if path == "exact" else path):
            below = core.Communicator(rank=self.rank, size=self.size, store=store, prefix=f"curve/{path}")
            made = _cuda.CudaCommunicator(below, self.device.index)
        largest = max(self.args.sizes)
        made.reserve(2 * sum(self.args.sizes), largest)  # every size has residuals of its own
        if self.rank == 0:
            print(f"{path}: {made.describe()}", flush=True)
        return made

    def _fastest_algorithm(self, data):
        """NCCL's for this size; times are the slowest rank's, so all ranks choose the same."""
        actions = {name: functools.partial(self._all_reduce_nccl, data, name) for name in self.groups}
        seconds = {name: [] for name in actions}
        for _ in range(4):  # the median of four leaves out the first, in which NCCL may connect
            for name, action in actions.items():
                seconds[name].append(self._timed(action))
        return min(seconds, key=lambda name: statistics.median(seconds[name]))

    def _all_reduce_nccl(self, data, algorithm):
        # The average, as ours: sums of sums would leave fp16's range within a few rounds.
        self.dist.all_reduce(data, self.dist.ReduceOp.AVG, group=self.groups[algorithm])

    def _timed(self, action):
        self.torch.cuda.synchronize()
        self.dist.barrier(group=self.control)
        started = time.perf_counter()
        action()
        self.torch.cuda.synchronize()
        word = self.torch.tensor([time.perf_counter() - started], dtype=self.torch.float64)
        self.dist.all_reduce(word, self.dist.ReduceOp.MAX, group=self.control)
        return word.item()

    def _action(self, path, data):
        from paceline import communicator as core

        if path == "nccl":
            return functools.partial(self._all_reduce_nccl, data, self._fastest_algorithm(data))
        made = self.made[path]
        stream = self.torch.cuda.current_stream().cuda_stream
        segments = core.segment_array([(data.numel(), 0, data.numel())])
        call = made.prepare(data.data_ptr(), data.numel(), 0, segments=segments, name=b"curve", prompt=True)

        def reduce():
            made.join(made.submit(call, stream), stream)
            self.torch.cuda.synchronize()
            made.wait_arrival()  # raises where something was lost

        return reduce

    def _agreed(self, value):
        """The largest of the ranks' values."""
        word = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(word, self.dist.ReduceOp.MAX, group=self.control)
        return word.item()

    def _differences(self, actions, data):
        """{path: why} for those of ours whose result is not NCCL's, as closely as their codecs let it be."""
        import sums

        source = self.torch.randn_like(data)
        expected, magnitudes = source.clone(), source.abs()
        peak = self._agreed(magnitudes.max().item())
        for total in (expected, magnitudes):
            self.dist.all_reduce(total, group=self.groups["unset"])
        found = {}
        for path, action in actions.items():
            if path == "nccl":
                continue
            for _ in range(2):  # the first brings what an earlier call of another magnitude has left
                data.copy_(source)
                action()
            result = data * self.size  # ours is the average
            wrong = self._agreed(sums.wrong_elements(path, result, expected, magnitudes, self.size, peak))
            words = [None] * self.size
            self.dist.all_gather_object(words, sums.checksum([data]), group=self.control)
            where = f"all-reduce of {data.numel() * 4} bytes"
            if wrong:
                found[path] = f"{where}: {wrong:.0f} elements are further from NCCL's sum than the codec lets them be"
            elif len(set(words)) > 1:
                found[path] = f"{where}: the ranks' results differ"
            elif words[0] == (0, 0):
                found[path] = f"{where}: the result is zero"
        return found

    def run(self):
        import train_floor

        rows, failed = [], {}
        for size in self.args.sizes:
            data = self.torch.randn(size // 4, device=self.device)
            actions = {path: self._action(path, data) for path in self.args.paths if path not in failed}
            for action in actions.values():
                for _ in range(3):
                    took = self._timed(action)
            different = self._differences(actions, data)
            failed.update(different)
            actions = {path: action for path, action in actions.items() if path not in different}
            if self.rank == 0:
                for path, why in different.items():
                    print(f"{path} failed: {why}", file=sys.stderr, flush=True)
                self._write(rows, failed)
            if not actions:
                break
            seconds = {path: [] for path in actions}
            rounds = max(5, min(40, int(self.args.seconds / max(took, 1e-4) / len(actions))))
            for _ in range(rounds):
                for path, action in actions.items():
                    data.normal_()
                    seconds[path].append(self._timed(action))
            for path, taken in seconds.items():
                codec = "exact" if path == "nccl" else path
                floor = train_floor.link_bytes(codec, size // 4, self.size // self.slots) / self.line
                row = {"bytes": size, "path": path, "seconds": statistics.median(taken), "floor": floor}
                if path == "nccl":
                    row["algorithm"] = actions[path].args[-1]
                rows.append(row)
            if self.rank == 0:
                self._write(rows, failed)
                print(line_of(rows[-len(actions) :]), flush=True)
        for made in self.made.values():
            made.close()
        sys.stdout.flush()
        os._exit(1 if failed else 0)

    def _write(self, rows, failed):
        result = {"rows": rows, "failed": failed}
        output.write(self.args.out, json.dumps(result, indent=1), "all_reduce")


def line_of(rows):
    cells = [
        f"{r['path']}{'/' + r['algorithm'] if 'algorithm' in r else ''} {r['seconds'] * 1e6:9.0f} us "
        f"({r['floor'] / r['seconds']:4.0%})"
        for r in rows
    ]
    return f"{rows[0]['bytes']:>11}: " + "  ".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="GPUs on each node")
    parser.add_argument("--rate", default="25gbit")
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(s) for s in SIZES])
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each size")
    parser.add_argument("--limit", type=float, default=150, help="seconds in all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-gpu" / "all_reduce.json")
    args = parser.parse_args()
    if "RANK" in os.environ and "PACELINE_LAB_RATE" in os.environ:
        os.environ["NCCL_HOSTID"] = f"node{int(os.environ['RANK']) // int(os.environ['PACELINE_LAB_SLOTS'])}"
        return Rank(args).run()
    from train import rank_environment

    output.prepare(args.out.parent, "all_reduce")
    output.check(args.out, "all_reduce", "--out")
    program = str(ROOT / "build" / "bin" / "paceline")
    command = [program, "lab", "--nodes", str(args.nodes), "--slots", str(args.slots), "--rate", args.rate, "--"]
    env = rank_environment(args.rate)
    return subprocess.run([*command, sys.executable, *sys.argv], env=env, timeout=args.limit, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
