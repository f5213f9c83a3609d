"""What a rank of a GPU benchmark inside `paceline lab` needs, whatever it measures: rank 0 writes JSON as it goes."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
import train_floor

#: Seconds without doing() after which a path counts as hung.
_HUNG = 60.0


class BenchRank:
    """Its device, torch's groups, what all ranks agree on, the result. args: model, out (JSON), smoke (on CPUs)."""

    def __init__(self, args):
        self.args = args
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.slots = int(os.environ.get("PACELINE_LAB_SLOTS", "1"))
        self.nodes = self.size // self.slots
        os.environ["NCCL_HOSTID"] = f"node{self.rank // self.slots}"
        self.line = float(os.environ.get("PACELINE_LAB_RATE", "0")) / 8 * train_floor.TCP_SHARE
        self.device = self._device()
        self.cuda = self.device.type == "cuda"
        self.result = {"model": args.model, "nodes": self.nodes, "slots": self.slots, "paths": {}, "failed": {}}
        self.variants = []
        self._alive = time.monotonic()
        self._doing = "start"
        threading.Thread(target=self._watch, daemon=True).start()

    def _device(self):
        if self.args.smoke or not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def connect(self):
        if self.cuda:
            dist.init_process_group("nccl", device_id=self.device)
        else:
            dist.init_process_group("gloo")
        self.control = dist.new_group(backend="gloo")

    def run(self, *parts):
        """Calls one after the other and ends the process; what one of them raises is written down."""
        try:
            for part in parts:
                part()
        except Exception:
            self.fail(traceback.format_exc())
        self.doing("end")
        self.write()
        sys.stdout.flush()
        os._exit(0)  # groups by the dozen: nothing is left to wait for

    # --- what all ranks agree on, beside the device --------------------------------------------------------------

    def largest(self, value):
        word = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self.control)
        return word.item()

    def total(self, value):
        word = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(word, group=self.control)
        return word.item()

    def settle(self):
        if self.cuda:
            torch.cuda.synchronize()

    def barrier(self):
        self.settle()
        dist.barrier(group=self.control)

    # --- what becomes of it ----------------------------------------------------------------------------------------

    def doing(self, what):
        """what: "path: part of it"; also a sign of life."""
        self._doing, self._alive = what, time.monotonic()

    def _watch(self):
        while time.monotonic() - self._alive < _HUNG:
            time.sleep(0.5)
        self.fail(f"{self._doing}: nothing for {_HUNG:.0f} s")

    def fail(self, why):
        """Keeps what was measured and ends this rank; the lab then ends the others."""
        path = self._doing.split(":")[0]
        self.result["failed"][path] = why
        print(f"bench: {self.args.model}, {path}: {why}", file=sys.stderr, flush=True)
        self.write()
        os._exit(3)

    def write(self):
        if self.rank == 0 or self.result["failed"]:
            name = self.args.out if self.rank == 0 else self.args.out.with_suffix(f".failed-{self.rank}.json")
            temporary = name.with_suffix(f".{self.rank}.tmp")
            temporary.write_text(json.dumps(self.result, indent=1))
            temporary.replace(name)


def cpu_seconds():
    """That this process has used, all its threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
