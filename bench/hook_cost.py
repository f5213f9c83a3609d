#!/usr/bin/env python3
"""What DDP's hook costs the thread that runs the backward pass, for each bucket: in Python, and in the library.

    python bench/hook_cost.py [--codec fp16] [--buckets 24] [--gpu] [--json FILE]

Two ranks of this machine, a model of 48 blocks, so that milliseconds of other work lie between two hooks: it finds its
code in no cache, as in training. Processor time of the thread, medians of 45 steps. `--gpu`: the CUDA path on a
simulated GPU, whose driver makes the library's part meaningless. A hook that only returns a future costs something too:
the line before is DDP's noop_hook.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "torch"), str(ROOT / "tools" / "demo")]

import output  # noqa: E402

_STEPS, _WARM = 60, 15
clock = time.thread_time


class Count:
    """Seconds and calls since the last reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.seconds, self.calls = 0.0, 0

    def around(self, call, calls=1):
        """The same call, counted as so many."""

        @functools.wraps(call, updated=())
        def counted(*arguments):
            started = clock()
            try:
                return call(*arguments)
            finally:
                self.seconds += clock() - started
                self.calls += calls

        return counted


class CountedLibrary:
    """A ctypes library whose calls are counted."""

    def __init__(self, library, count):
        self._library, self._count = library, count

    def __getattr__(self, name):
        made = self._count.around(getattr(self._library, name))
        setattr(self, name, made)
        return made


def blocks(torch):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(256, 256)
            self.norm = torch.nn.LayerNorm(256)
            self.outer = torch.nn.Linear(256, 256)

        def forward(self, x):
            return x + self.outer(torch.relu(self.inner(self.norm(x))))

    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block() for _ in range(48)])


def measure(torch, model, hook, library):
    """[(microseconds a bucket in the hook without the library, in the library, buckets)] of each step."""
    inputs, steps = torch.randn(16, 256), []
    for _ in range(_STEPS):
        hook.reset()
        library.reset()
        model(inputs).sum().backward()
        steps.append(
            (1e6 * (hook.seconds - library.seconds) / hook.calls, 1e6 * library.seconds / hook.calls, hook.calls)
        )
        model.zero_grad()
    return [statistics.median(step[i] for step in steps[_WARM:]) for i in range(3)]


def rank_main(args) -> None:
    import torch
    import torch.distributed as dist

    import paceline.torch  # noqa: F401
    from paceline import _cuda, _library
    from paceline._torch import cpu_ddp, cuda_ddp, ddp

    hook, library = Count(), Count()
    if args.gpu:
        import simulated_gpu  # makes the process group

        _cuda._loaded = CountedLibrary(_cuda.load(), library)
        wait = Count()  # a join waits there, as CPU tensors are read at once
        complete = cuda_ddp.CudaAttachment._complete

        def completed(attachment):
            before = library.seconds
            wait.reset()
            wait.around(complete)(attachment)
            library.seconds = before
            hook.seconds -= wait.seconds

        cuda_ddp.CudaAttachment._complete = completed
    else:
        dist.init_process_group("gloo")
        counted = CountedLibrary(_library.load(), library)
        _library.load = lambda: counted
        cpu_ddp.CpuAttachment._finish = hook.around(cpu_ddp.CpuAttachment._finish, calls=0)
    lines = []
    os.environ["PACELINE_DISABLE"] = "1"
    plain = torch.nn.parallel.DistributedDataParallel(blocks(torch))
    del os.environ["PACELINE_DISABLE"]
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    plain.register_comm_hook(None, hook.around(noop_hook))
    lines.append(("noop_hook", *measure(torch, plain, hook, library)))
    ddp.paceline_hook = hook.around(ddp.paceline_hook)
    if args.gpu:
        with simulated_gpu.wrapped(blocks(torch)) as (model, _):
            lines.append((f"CUDA, {args.codec}", *measure(torch, model, hook, library)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(blocks(torch))
        lines.append((f"CPU, {args.codec}", *measure(torch, model, hook, library)))
    if dist.get_rank() == 0:
        for name, python, within, buckets in lines:
            print(f"{name:12} {python:6.0f} us a bucket in Python, {within:6.0f} in the library, {buckets:.0f} buckets")
        if args.json:
            keys = ("name", "python_us", "library_us", "buckets")
            output.write(args.json, json.dumps([dict(zip(keys, line)) for line in lines]), "hook_cost", "--json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="fp16", choices=("none", "fp16", "topk"))
    parser.add_argument("--buckets", type=int, default=24)
    parser.add_argument("--gpu", action="store_true", help="the CUDA path, on a simulated GPU")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    program = ROOT / "build" / "bin" / "paceline"
    if not program.exists():
        sys.exit(f"hook_cost: {program} is not built; run ./dev build")
    output.check(args.json, "hook_cost")
    env = {
        **os.environ,
        "PACELINE_CODEC": args.codec,
        "PACELINE_FUSION_BUCKETS": str(args.buckets),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(program), "run", "-np", "2", "--", sys.executable, __file__, *sys.argv[1:]], env=env, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
