#!/usr/bin/env python3
"""All-reduce of float32 device memory between two nodes on a machine with one GPU, and when its bytes are on the link.

    python bench/gpu/one_gpu.py                                  # 64 KB to 16 MB, exact, 25 Gb/s
    python bench/gpu/one_gpu.py --sizes 1MB 4MB --codec fp16 --rounds 200

Processes take turns on a GPU, a millisecond each. So both ranks are threads of one process here, each in a network
namespace of its own; the other rank's process looks at the interface of its node meanwhile. The link and the threads on
the wire are what two machines have; the copies to and from the device share one GPU.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from all_reduce import ROOT, parse_size

SHARES = (0.02, 0.10, 0.50, 0.90, 0.97, 0.99)
CLONE_NEWNET = 0x40000000
LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
WARM_UP = 5


class Store:
    """The key-value store in which the two threads meet."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def put(self, key, value):
        with self._lock:
            self._values[key] = bytes(value)

    def get(self, key):
        with self._lock:
            return self._values.get(key)


class Shelf:
    """Files by which the two processes tell each other something, each written once."""

    def __init__(self, directory):
        self._directory = Path(directory)

    def put(self, name, value):
        part = self._directory / f"{name}.part"
        part.write_text(json.dumps(value))
        part.rename(self._directory / name)

    def has(self, name):
        return (self._directory / name).exists()

    def wait(self, name):
        while not self.has(name):
            time.sleep(0.01)
        return json.loads((self._directory / name).read_text())


def enter_network_of(process):
    """For this thread alone."""
    space = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"the network namespace of process {process}")
    os.close(space)


class Pair:
    """Both ranks. spans: (bytes, beginning, end) of every all-reduce that counts."""

    def __init__(self, args, shelf):
        import torch

        self.torch, self.args, self.shelf = torch, args, shelf
        self.line = float(os.environ["PACELINE_LAB_RATE"]) / 8 * 0.95
        self.store, self.turn = Store(), threading.Barrier(2)
        self.took = [None, None]
        self.spans = []
        self.failure = None

    def run(self):
        other = self.shelf.wait("process")
        for name in LAUNCHER:  # both ranks say who they are
            os.environ.pop(name, None)
        threads = [threading.Thread(target=self._play, args=(rank, other)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.shelf.put("spans", self.spans)
        if self.failure is not None:
            raise self.failure

    def _play(self, rank, other):
        try:
            if rank == 1:
                enter_network_of(other)
            self._reduce(rank)
        except BaseException as error:
            self.failure = self.failure or error
            self.turn.abort()

    def _reduce(self, rank):
        from paceline import _cuda
        from paceline import communicator as core

        torch, sizes = self.torch, self.args.sizes
        torch.cuda.set_device(0)
        below = core.Communicator(rank=rank, size=2, store=self.store, prefix="one-gpu")
        made = _cuda.CudaCommunicator(below, 0)
        made.reserve(2 * sum(sizes), max(sizes))
        if rank == 0:
            print(made.describe(), flush=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for size in sizes:
                data = torch.randn(size // 4, device="cuda")
                segments = core.segment_array([(data.numel(), 0, data.numel())])
                call = made.prepare(data.data_ptr(), data.numel(), 0, segments=segments, name=b"curve", prompt=True)
                parts = [self._once(rank, made, call, data, stream, size, i) for i in range(self.args.rounds + WARM_UP)]
                if rank == 0:
                    self._print(size, parts[WARM_UP:])
        made.close()
        below.close()

    def _once(self, rank, made, call, data, stream, size, index):
        """One all-reduce; seconds until it was submitted, joined, and arrived from the network, and its end."""
        data.normal_()
        stream.synchronize()
        self.turn.wait()
        started = time.perf_counter()
        operation = made.submit(call, stream.cuda_stream)
        submitted = time.perf_counter()
        made.join(operation, stream.cuda_stream)
        joined = time.perf_counter()
        while not made.arrived(operation):
            pass
        arrived = time.perf_counter()
        stream.synchronize()
        made.wait_arrival()  # raises where something was lost
        self.took[rank] = (started, time.perf_counter())
        self.turn.wait()
        begin = max(started for started, _ in self.took)
        end = max(end for _, end in self.took)
        if rank == 0 and index >= WARM_UP:
            self.spans.append((size, begin, end))
        self.turn.wait()
        return end - begin, submitted - started, joined - started, arrived - started

    def _print(self, size, parts):
        whole, submitted, joined, arrived = (statistics.median(column) * 1e3 for column in zip(*parts, strict=True))
        floor = size / self.line * 1e3
        print(
            f"{size >> 10:>7} KiB: {whole:.3f} ms, exact's floor {floor:.3f} ({floor / whole:.0%});"
            f" submitted {submitted:.3f}, joined {joined:.3f}, all here {arrived:.3f}",
            flush=True,
        )


class Watch:
    """Bytes that an interface has sent and received, by time."""

    def __init__(self, interface):
        self._mark = f"{interface}:".encode()
        self._file = os.open("/proc/self/net/dev", os.O_RDONLY)
        self.times, self.out, self.into = [], [], []

    def look(self):
        text = os.pread(self._file, 4096, 0)
        fields = text[text.index(self._mark) + len(self._mark) :].split(None, 9)
        self.times.append(time.perf_counter())
        self.into.append(int(fields[0]))
        self.out.append(int(fields[8]))

    def shares(self, begin, end):
        """Milliseconds until SHARES of the bytes had left, then until they had come; None: seen too seldom."""
        first = max(bisect.bisect_left(self.times, begin), 1)
        last = min(bisect.bisect_left(self.times, end), len(self.times) - 1)
        if last - first < 5:
            return None
        return [when for series in (self.out, self.into) for when in self._shares_of(series, first, last, begin)]

    def _shares_of(self, series, first, last, begin):
        base = series[first - 1]
        whole = series[last] - base
        for share in SHARES:
            at = bisect.bisect_left(series, base + share * whole, first, last)
            yield (self.times[at] - begin) * 1e3


def watch(shelf):
    """The other rank's process."""
    seen = Watch("eth0")
    shelf.put("process", os.getpid())
    asked = 0.0
    while True:
        seen.look()
        if seen.times[-1] - asked > 0.2:
            asked = seen.times[-1]
            if shelf.has("spans"):
                break
    by_size = {}
    for size, begin, end in shelf.wait("spans"):
        row = seen.shares(begin, end)
        if row is not None:
            by_size.setdefault(size, []).append(row)
    names = "/".join(f"{share:.0%}".rstrip("%") for share in SHARES)
    for size, rows in by_size.items():
        medians = [f"{statistics.median(column):.3f}" for column in zip(*rows, strict=True)]
        half = len(SHARES)
        print(
            f"{size >> 10:>7} KiB: {names} % of the bytes have left after {' '.join(medians[:half])} ms,"
            f" have come after {' '.join(medians[half:])}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="25gbit")
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, default=[parse_size(s) for s in ("64KB", "1MB", "4MB", "16MB")]
    )
    parser.add_argument("--codec", default="exact", choices=("exact", "fp16", "bf16", "int8", "topk"))
    parser.add_argument("--rounds", type=int, default=60, help="all-reduces of each size")
    parser.add_argument("--limit", type=float, default=60, help="seconds in all")
    args = parser.parse_args()
    if "ONE_GPU_SHELF" in os.environ:
        shelf = Shelf(os.environ["ONE_GPU_SHELF"])
        return watch(shelf) if os.environ["RANK"] == "1" else Pair(args, shelf).run()
    from train import link_rate

    program = str(ROOT / "build" / "bin" / "paceline")
    command = [program, "lab", "--nodes", "2", "--rate", args.rate, "--no-calibration", "--quiet", "--"]
    with tempfile.TemporaryDirectory() as shelf:
        # As all_reduce.py. Streams of both ranks that wait must not hold each other up in a queue of the one GPU.
        env = {
            "PACELINE_ZERO_COPY": "1",
            "PACELINE_LINK_RATE": link_rate(args.rate),
            "PACELINE_TIMEOUT": "20",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            **os.environ,
            "PACELINE_CODEC": re.sub("^exact$", "none", args.codec),
            "ONE_GPU_SHELF": shelf,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
        }
        return subprocess.run(
            [*command, sys.executable, *sys.argv], env=env, timeout=args.limit, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
