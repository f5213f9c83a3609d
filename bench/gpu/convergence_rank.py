"""One rank of the convergence benchmark, inside `paceline lab`: one task, run after run; rank 0 writes JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import convergence_tasks
import torch
import torch.distributed as dist
import train_paths

import paceline.torch  # noqa: F401

_MOMENTUM = 0.9
_HUNG = 90.0


def settings_of(codec):
    """(PACELINE_CODEC, other settings, the optimizer's own momentum)"""
    if codec == "topk-momentum":
        return "topk", {"PACELINE_TOPK_MOMENTUM": str(_MOMENTUM)}, 0.0
    return codec, {}, _MOMENTUM


def make_optimizer(name, parameters, rate, momentum):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


class Runs:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.nodes = int(os.environ["PACELINE_LAB_NODES"])
        cuda = torch.cuda.is_available() and not args.smoke
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": self.device} if cuda else {}))
        self.control = dist.new_group(backend="gloo")
        self.task = convergence_tasks.TASKS[args.task](self.device, args.smoke)
        self.result = {"task": args.task, "text": self.task.text, "metric": self.task.metric, "runs": []}
        self.result.update(ranks=dist.get_world_size(), steps=args.steps, lower_is_better=self.task.lower_is_better)
        self.alive = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while time.monotonic() - self.alive < _HUNG:
            time.sleep(1)
        print(f"convergence: rank {self.rank}: nothing for {_HUNG:.0f} s", file=sys.stderr, flush=True)
        os._exit(3)

    def run(self, codec, optimizer_name, seed):
        """Trains once; returns scores and losses over steps and seconds."""
        torch.manual_seed(seed)
        module = self.task.model()
        codec_name, settings, momentum = settings_of(codec)
        model = train_paths.wrap_ours(module, self.device, codec_name, settings, self.nodes)
        rate = self.task.rates[optimizer_name]
        optimizer = make_optimizer(optimizer_name, model.parameters(), rate, momentum)
        warm = max(1, self.args.steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda s: min((s + 1) / warm, 0.5 * (1 + math.cos(math.pi * s / self.args.steps))),
        )
        points, losses, seconds = [], [], 0.0
        every = max(1, self.args.steps // 10)
        started = time.perf_counter()
        for step in range(self.args.steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.task.loss(model, step, self.rank, seed)
            loss.backward()
            if self.task.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.task.clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            if (step + 1) % every == 0 or step + 1 == self.args.steps:
                train_loss = float(torch.stack(losses).mean())  # waits for the device
                seconds += time.perf_counter() - started
                losses.clear()
                points.append([step + 1, seconds, train_loss, self._score(model.module)])
                self.alive = time.monotonic()
                started = time.perf_counter()
        parameters = sum(p.numel() for p in model.parameters())
        del model, optimizer, module
        train_paths.release()
        return {"codec": codec, "optimizer": optimizer_name, "seed": seed, "parameters": parameters, "points": points}

    def _score(self, module):
        """Rank 0's, for all: ranks are bit-equal but for batch normalisation's own statistics."""
        score = torch.zeros(1, dtype=torch.float64)
        if self.rank == 0:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                score += self.task.score(module)
        dist.broadcast(score, 0, group=self.control)
        return float(score)

    def time_is_up(self, next_takes):
        over = torch.tensor([float(time.time() + next_takes > self.args.until)])
        dist.broadcast(over, 0, group=self.control)
        return bool(over)

    def all(self):
        longest = 0.0
        for codec, optimizer, seed in self.args.runs:
            if self.time_is_up(longest):
                self.result["cut"] = True
                break
            began = time.time()
            one = self.run(codec, optimizer, seed)
            longest = max(longest, time.time() - began)
            self.result["runs"].append(one)
            self.write()
            if self.rank == 0:
                step, seconds, _, score = one["points"][-1]
                where = f"{codec:14} {optimizer:6} seed {seed}"
                print(f"{where}: {score:.4f} after {step} steps, {seconds:.1f} s", flush=True)

    def write(self):
        if self.rank == 0:
            temporary = self.args.out.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.result, indent=1))
            temporary.replace(self.args.out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True, choices=convergence_tasks.TASKS)
    parser.add_argument("--runs", type=json.loads, required=True, help="[[codec, optimizer, seed], …]")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    os.environ["NCCL_HOSTID"] = f"node{int(os.environ['RANK']) // int(os.environ.get('PACELINE_LAB_SLOTS', '1'))}"
    if args.smoke:  # on loopback: every gradient is to pass the codec all the same
        os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"
    code = 0
    try:
        Runs(args).all()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # groups by the dozen: nothing is left to wait for


if __name__ == "__main__":
    main()
