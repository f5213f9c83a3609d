#!/usr/bin/env python3
"""Memory that gradients' way takes: of one all-reduce, and of a training step under DDP.

    python bench/memory.py [--mib 64] [--ddp [--steps N]] [--json FILE]

Four ranks on this machine, as four nodes of one rank and as two of two; codecs exact, fp16, top-k.

An all-reduce: each rank resets its peak of resident memory, runs three all-reduces in place and reads the peak;
residuals (two planes of what a rank encodes) are taken off. Held to: at most 2 × the buffer.

--ddp: steps of a model whose buckets are alike (eight of --mib), of one that has a bucket four times as large beside
them, and of one that is a single bucket, each path in a process of its own: no communication (a hook that leaves
gradients alone), plain DDP over Gloo, Paceline. A rank's memory is what it has to itself and its share of what a
node's ranks share (Pss without the pages of files, of which the machine's other processes have their shares too),
sampled up to 50 times a second, and the peak of its resident memory, which counts a neighbour's pages as well and
misses nothing. Both from where a small model has trained, so that libraries and connections are there ("fixed" says
what they took), less the same of no communication and the residuals. Held to: at most 2 × the largest bucket. The
first two steps are left out: torch may have the whole model in one bucket, until it cuts it as the second begins.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools" / "demo")]

import output  # noqa: E402

CODECS = {"exact": 0, "fp16": 1, "topk": 3}
PATHS = ("no-communication", "gloo", *CODECS)
BUCKETS = {"alike": [1] * 8, "one large": [1] * 4 + [4] + [1] * 4, "single": [1]}  # in --mib
CLUSTERS = ((4, 1), (2, 2))
SMALL_STEPS = 6
GOAL = 2.0
MIB = 1 << 20


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def proportional(pids: list[int]) -> int:
    """This process's own memory, and of what a node's ranks share the mean of their shares: pages that one of them has
    mapped a moment before the other count half for each."""
    shared = sum(rolled_up(pid, "Pss_Shmem:") for pid in pids)
    return rolled_up("self", "Pss_Anon:") + shared // len(pids)


def rolled_up(pid: int | str, field: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Peaks:
    """Of what is run inside its block: .pss sampled by a thread, .rss as the kernel keeps it; growth from its begin."""

    def __init__(self, pids: list[int]):
        self._pids = pids

    def __enter__(self) -> Peaks:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
        self.fixed = proportional(self._pids)
        self._rss, self._most, self._ends = resident("VmRSS"), self.fixed, threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def begin_anew(self) -> None:
        """What came so far does not count."""
        with self._lock:
            Path("/proc/self/clear_refs").write_text("5")
            self._most = proportional(self._pids)

    def _sample(self) -> None:
        while not self._ends.wait(0.02):
            with self._lock:
                self._most = max(self._most, proportional(self._pids))

    def __exit__(self, *_) -> None:
        self._ends.set()
        self._thread.join()
        self.pss = self._most - self.fixed
        self.rss = resident("VmHWM") - self._rss


def all_reduce_rank(bytes_: int, slots: int, out: str) -> None:
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
        Path("/proc/self/clear_refs").write_text("5")
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


def ddp_ranks(bytes_: int, steps: int, out: str) -> None:
    """A process for each model and path, forked from one that has imported torch."""
    import torch
    import torch._dynamo  # an optimizer's first step would, two seconds in each process

    torch.set_num_threads(1)
    for buckets in BUCKETS:
        for path in PATHS:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    ddp_rank(bytes_, steps, path, buckets, f"{out}.{buckets}.{path}".replace(" ", "-"))
                    code = 0
                except Exception:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
            if os.waitpid(child, 0)[1] != 0:
                sys.exit(f"memory: {path} failed with buckets {buckets}")


def ddp_rank(bytes_: int, steps: int, path: str, buckets: str, out: str) -> None:
    if path in CODECS:
        os.environ["PACELINE_CODEC"] = "none" if path == "exact" else path
        import paceline.torch  # noqa: F401
    import torch
    import torch.distributed as dist

    def leave_alone(_state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrapped(rows: list[int]):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, n, bias=False) for n in rows]
        model = torch.nn.ModuleList(layers)
        model.forward = lambda x: sum(layer(x).mean() for layer in layers)
        # A bucket for each layer, whichever way the gradients go.
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bytes_ / MIB / 2)
        if path == "no-communication":
            ddp.register_comm_hook(None, leave_alone)
        return ddp

    def train(ddp, steps: int) -> None:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(2, 512)).backward()
            optimizer.step()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=size)
    train(wrapped([8, 8]), SMALL_STEPS)
    dist.barrier()
    rows = bytes_ // (4 * 512)
    pids = [None] * size
    dist.all_gather_object(pids, (os.environ["PACELINE_NODE_ID"], os.getpid()))
    with Peaks([pid for node, pid in pids if node == os.environ["PACELINE_NODE_ID"]]) as peaks:
        ddp = wrapped([rows * share for share in BUCKETS[buckets]])
        train(ddp, 2)
        peaks.begin_anew()
        train(ddp, steps)
        dist.barrier()
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    said = {"pss": peaks.pss, "rss": peaks.rss, "fixed": peaks.fixed, "residuals": 0, "scratch": 0}
    said["largest"] = max(int(size) for size in str(sizes).split(","))
    if path in CODECS:
        from paceline._torch.ddp import attachment_of

        stats = attachment_of(ddp).endpoint.communicator.stats()  # raises where it is not ours
        said["residuals"], said["scratch"] = stats["residual_bytes"], stats["scratch_bytes"]
    Path(f"{out}.{rank}").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def launch(mib: int, slots: int, out: Path, *steps: int) -> None:
    """Four ranks of this program."""
    command = [str(ROOT / "build" / "bin" / "paceline"), "lab", "--loopback", "--quiet", "--nodes", "4", "--"]
    command += [sys.executable, str(Path(__file__).resolve()), "--mib", str(mib)]
    command += ["--rank", str(slots), str(out), *map(str, steps)]
    # malloc gives back what is freed: the holes that gradients leave in its heap are a matter of luck, on every path.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    subprocess.run(command, check=True, timeout=1500, env=env)


def said_by(prefix: str) -> list[dict]:
    return [json.loads(Path(f"{prefix}.{rank}").read_text()) for rank in range(4)]


def all_reduces(mib: int) -> list[dict]:
    rows = []
    for nodes, slots in CLUSTERS:
        with tempfile.TemporaryDirectory(prefix="paceline-memory-") as folder:
            launch(mib, slots, Path(folder, "rank"))
            said = said_by(f"{folder}/rank")
        for codec in CODECS:
            worst = max(s[codec] for s in said) / (mib * MIB)
            rows.append({"nodes": nodes, "slots": slots, "codec": codec, "mib": mib, "buffers": worst})
            print(f"{nodes} × {slots}  {codec:6} {worst:5.2f} × the buffer of {mib} MiB")
    return rows


def ddp_steps(mib: int, steps: int) -> list[dict]:
    print("MiB of the rank that took the most       Pss / bound      resident  residuals  scratch  fixed")
    rows = []
    for nodes, slots in CLUSTERS:
        with tempfile.TemporaryDirectory(prefix="paceline-memory-") as folder:
            launch(mib, slots, Path(folder, "rank"), steps)
            for buckets in BUCKETS:
                said = {path: said_by(f"{folder}/rank.{buckets}.{path}".replace(" ", "-")) for path in PATHS}
                for path in PATHS[1:]:
                    taken = [beyond(*pair) for pair in zip(said[path], said[PATHS[0]], strict=True)]
                    worst = {key: max(t[key] for t in taken) / MIB for key in taken[0]}
                    bound = GOAL * worst.pop("largest")
                    row = {"nodes": nodes, "slots": slots, "buckets": buckets, "path": path, "bound": bound}
                    rows.append({**row, **worst})
                    print(
                        f"{nodes} × {slots}  {buckets:9}  {path:16} {worst['pss']:6.1f} / {bound:<6.1f} = "
                        f"{worst['pss'] / bound:5.2f}  {worst['rss']:8.1f} {worst['residuals']:9.1f} "
                        f"{worst['scratch']:9.1f} {worst['fixed']:6.1f}",
                        flush=True,
                    )
    return rows


def beyond(rank: dict, without: dict) -> dict:
    """What a rank took beyond the same rank without communication, and beyond its residuals."""
    less = {key: rank[key] - without[key] for key in ("pss", "rss", "fixed")}
    return {**rank, **less, "pss": less["pss"] - rank["residuals"], "rss": less["rss"] - rank["residuals"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="of the buffer; of a bucket with --ddp")
    parser.add_argument("--ddp", action="store_true", help="steps of DDP instead of all-reduces")
    parser.add_argument("--steps", type=int, help="of --ddp, measured (200 MiB of gradients a bucket)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps is {args.steps}: one or more")
    if args.rank:
        slots, out, *steps = args.rank
        os.environ["PACELINE_NODE_ID"] = f"node{int(os.environ['RANK']) // int(slots)}"
        if steps:
            ddp_ranks(args.mib * MIB, int(steps[0]), out)
        else:
            all_reduce_rank(args.mib * MIB, int(slots), out)
        return 0
    output.check(args.json, "memory")
    if args.ddp:
        rows = ddp_steps(args.mib, args.steps or max(6, 200 // args.mib))
        kept = all(row["pss"] <= row["bound"] for row in rows if row["path"] in CODECS)
    else:
        rows = all_reduces(args.mib)
        kept = all(row["buffers"] <= GOAL for row in rows)
    if args.json:
        output.write(args.json, "".join(json.dumps(row) + "\n" for row in rows), "memory", "--json")
    print("within" if kept else "NOT within", f"{GOAL:g} × the {'largest bucket' if args.ddp else 'buffer'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
