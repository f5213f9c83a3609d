"""A codec's share of a step, measured in the rounds of the comparison: a process beside each rank, for that alone.

All ranks encode and decode at the same time, as they do in training, and without any transfer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "bin" / "paceline-codec-alone"


class CodecAlone:
    """codec: "fp16" or "topk"; parameters: of the model. Made and asked by all ranks together."""

    def __init__(self, codec: str, parameters: int) -> None:
        slots = int(os.environ["LOCAL_WORLD_SIZE"])
        words = [codec, str(parameters), str(dist.get_world_size() // slots), str(slots)]
        if not PROGRAM.exists():
            sys.exit(f"demo: {PROGRAM} is not built; run ./dev build")
        self.name = codec
        self._process = subprocess.Popen([PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._seconds: list[float] = []

    def block(self, _data, steps: int, record: bool = True) -> None:
        dist.barrier()
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"demo: measuring the codec {self.name} failed (exit code {self._process.wait()})")
        dist.barrier()
        if record:
            self._seconds.append(float(answer))

    def close(self) -> list[float]:
        """Seconds of a step in each round, the slowest rank's."""
        self._process.communicate()
        slowest = torch.tensor(self._seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()
