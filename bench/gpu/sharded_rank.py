"""One rank of the benchmark of sharded models, inside `paceline lab`: all paths interleaved; rank 0 writes JSON."""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from pathlib import Path

import bench_rank
import lab_bytes
import sums
import torch
import torch.distributed as dist
import train_models
import train_paths
import wire_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import paceline.torch

OURS = "cpu:paceline,cuda:paceline"
#: Steps before a path is timed, its first collectives among them.
_WARM_UP = 6
#: Seconds that the steps timed at a stretch should take, and the least of them.
_STRETCH, _LEAST = 1.0, 3


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is sharded and who carries it."""

    text: str
    ours: bool
    hybrid: bool  # sharded in a node, copied over the nodes; else sharded over all ranks
    reduce: int  # bytes of an element of a gradient between the nodes
    compressed: bool = False  # between the nodes alone; in a node sums stay float32
    settings: tuple = ()  # PACELINE_* variables of its own


def way_of(name: str) -> Way:
    """Of "full@PACELINE_LANES=2": a path with settings of its own."""
    name, own = train_paths.parts(name)
    return dataclasses.replace(PATHS[name], settings=tuple(own.items()))


PATHS = {
    "node": Way("no communication between nodes", False, True, 0),
    "full-nccl": Way("sharded over all, NCCL's sockets", False, False, 4),
    "full": Way("sharded over all, Paceline", True, False, 4),
    "full-nccl-bf16": Way("the same, gradients bf16", False, False, 2),
    "full-bf16": Way("the same, gradients bf16", True, False, 2),
    "hybrid-nccl": Way("hybrid, NCCL's sockets", False, True, 4),
    "hybrid": Way("hybrid, Paceline", True, True, 4),
    "hybrid-nccl-bf16": Way("the same, gradients bf16", False, True, 2),
    "hybrid-bf16": Way("the same, bf16 between nodes", True, True, 2, compressed=True),
}


def link_bytes(path: Way, elements: int, gathered_twice: int, nodes: int, mixed: bool = True) -> float:
    """Bytes that a node's link carries in one direction for a step.

    elements: of the model; gathered_twice: of those that the backward pass gathers again. mixed: parameters travel as
    bf16, gradients as the path says; else, on CPUs, all is float32.
    """
    if path.reduce == 0 or nodes == 1:
        return 0.0
    others = (nodes - 1) / nodes
    gather, reduce = (2, path.reduce) if mixed else (4, 4)
    if path.hybrid:
        return 2 * others * reduce * elements
    return others * (gather * (elements + gathered_twice) + reduce * elements)


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The module's stack of layers, each of which is sharded by itself."""
    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    if not stacks:
        raise ValueError(f"{type(module).__name__} has no nn.ModuleList of layers to shard")
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))


class Variant:
    """One path: its sharded model, its optimizer, what was measured."""

    def __init__(self, name, workload, mesh, mixed):
        self.name, self.path = name, way_of(name)
        self.model, self.inputs, self.loss_of = workload.module, workload.inputs, workload.loss
        policy = MixedPrecisionPolicy()
        if mixed:
            low = self.path.reduce == 2 and not self.path.compressed
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if low else torch.float32)
        layers = layers_of(self.model)
        self.elements = sum(p.numel() for p in self.model.parameters())
        self.gathered_twice = sum(p.numel() for p in layers.parameters())
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.rounds = []
        self.iterations = _LEAST
        self.expected = 0.0
        self.losses = []

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.model, self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def shards(self):
        """This rank's part of every parameter."""
        return [p.to_local() for p in self.model.parameters() if p.to_local().numel()]


class Bench(bench_rank.BenchRank):
    def __init__(self, args):
        super().__init__(args)
        self._made = {}

    # --- the parts of a run ------------------------------------------------------------------------------------------

    def mesh(self, path):
        """The path's mesh: of all ranks, of this node's, or of nodes × ranks; ours and torch's have groups apart."""
        kind = self.device.type
        grid = torch.arange(self.size).view(self.nodes, self.slots)
        backend = OURS if path.ours else None
        extra = (path.compressed, path.settings)
        if not path.hybrid:
            return DeviceMesh.from_group(self._group(backend, range(self.size), extra), kind)
        shard = [self._group(backend, row, extra) for row in grid.tolist()][self.rank // self.slots]
        if path.reduce == 0:
            return DeviceMesh.from_group(shard, kind)
        replicate = [self._group(backend, row, extra) for row in grid.t().tolist()][self.rank % self.slots]
        if path.compressed:
            paceline.torch.compress(replicate, "bf16")
        return DeviceMesh.from_group([replicate, shard], kind, grid, mesh_dim_names=("replicate", "shard"))

    def _group(self, backend, ranks, extra):
        key = (backend, tuple(ranks), extra)
        if key not in self._made:
            self._made[key] = dist.new_group(list(ranks), backend=backend)
        return self._made[key]

    def prepare(self):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        build = (train_models.SMOKE if self.args.smoke else train_models.MODELS)[self.args.model]
        for name in self.args.paths:
            self.doing(f"{name}: making")
            torch.manual_seed(1)
            workload = build(self.device, self.rank)
            self.result["text"] = workload.text
            with train_paths.environment(**dict(way_of(name).settings)):  # read at a group's first collective
                variant = Variant(name, workload, self.mesh(way_of(name)), self.cuda)
                self.variants.append(variant)
                for step in range(_WARM_UP):
                    self.doing(f"{name}: step {step + 1}")
                    variant.losses.append(self.total(variant.step()) / self.size)
            self.barrier()
            started = time.perf_counter()
            variant.step()
            self.barrier()
            took = self.largest(time.perf_counter() - started)
            variant.iterations = max(_LEAST, min(30, round(_STRETCH / took)))
            variant.expected = took * (variant.iterations + 1)
            if variant.path.reduce == 0:
                self._measure_phases(variant)

    def _measure_phases(self, variant):
        """What no link can hide behind: a hybrid's first gradient follows the forward pass, the update the last one."""
        parts = []
        for _ in range(5):
            self.barrier()
            marks = [time.perf_counter()]
            variant.optimizer.zero_grad(set_to_none=True)
            loss = variant.loss_of(variant.model, variant.inputs)
            self.barrier()
            marks.append(time.perf_counter())
            loss.backward()
            self.barrier()
            marks.append(time.perf_counter())
            variant.optimizer.step()
            self.barrier()
            marks.append(time.perf_counter())
            parts.append([b - a for a, b in zip(marks, marks[1:])])
        names = ("forward_s", "backward_s", "optimizer_s")
        for name, column in zip(names, zip(*parts)):
            self.result[name] = self.largest(statistics.median(column))

    def measure(self):
        """Rounds until there are enough of them or time is up; every round visits every path, in another order."""
        shuffled = random.Random(11)  # alike on all ranks
        for index in range(self.args.rounds):
            late = time.time() + sum(v.expected for v in self.variants) > self.args.until
            if self.largest(late):
                break
            for variant in shuffled.sample(self.variants, len(self.variants)):
                self.doing(f"{variant.name}: round {index + 1}")
                variant.rounds.append(self._stretch(variant))
            self.summarise()
            self.write()

    def profile(self):
        """After the rounds: two steps of each path asked for, as torch's profiler sees the GPU on rank 0."""
        for variant in self.variants:
            if variant.name not in self.args.profile:
                continue
            self.doing(f"{variant.name}: profile")
            variant.step()
            self.barrier()
            kind = torch.profiler.ProfilerActivity
            with torch.profiler.profile(activities=[kind.CUDA if self.cuda else kind.CPU]) as profiler:
                for _ in range(2):
                    variant.step()
                self.barrier()
            if self.rank == 0:
                profiler.export_chrome_trace(str(self.args.out.with_name(f"sharded.{variant.name}.trace.json.gz")))

    def _stretch(self, variant):
        variant.step()
        self.barrier()
        before, used = lab_bytes.read_links(), bench_rank.cpu_seconds()
        self.barrier()
        started = time.perf_counter()
        for _ in range(variant.iterations):
            variant.step()
        self.settle()
        took = time.perf_counter() - started
        cores = (bench_rank.cpu_seconds() - used) / took
        self.barrier()
        wire = lab_bytes.busiest(before, lab_bytes.read_links())
        return {
            "seconds": self.largest(took) / variant.iterations,
            "cores": self.total(cores) / self.size,
            "wire": wire / variant.iterations,
        }

    def compare(self):
        """A hybrid's shard has a copy on every node, of the same bits. Our bytes must be those of the formula."""
        for variant in self.variants:
            self.doing(f"{variant.name}: comparing")
            words = [None] * self.size
            dist.all_gather_object(words, sums.checksum(variant.shards()), group=self.control)
            if variant.path.hybrid and variant.path.reduce:
                away = [rank for rank, word in enumerate(words) if word != words[rank % self.slots]]
                if away:
                    why = f"after the rounds ranks {away} have other parameters than their copies on node 0"
                    self.result["failed"][variant.name] = why
            figures = self.result["paths"].get(variant.name)
            chosen = "PACELINE_CUDA_PATH" in dict(variant.path.settings)  # perhaps NCCL, whose bytes are others
            if figures and variant.path.ours and self.nodes > 1 and not chosen:
                why = wire_bytes.complaint(figures["predicted"], figures["wire"], self.slots)
                self.result["failed"].update({variant.name: why} if why else {})
        self.write()

    # --- results -----------------------------------------------------------------------------------------------------

    def summarise(self):
        node = next((v for v in self.variants if v.path.reduce == 0 and v.rounds), None)
        compute = statistics.median(r["seconds"] for r in node.rounds) if node else 0.0
        for variant in self.variants:
            if not variant.rounds:
                continue
            figures = {key: statistics.median(r[key] for r in variant.rounds) for key in variant.rounds[0]}
            size = link_bytes(variant.path, variant.elements, variant.gathered_twice, self.nodes, self.cuda)
            figures.update(
                text=variant.path.text,
                rounds=[r["seconds"] for r in variant.rounds],
                iterations=variant.iterations,
                predicted=size,
                floor=self._floor(variant.path, size, compute) if self.line and compute else None,
                losses=variant.losses,
            )
            self.result["paths"][variant.name] = figures
            self.result["parameters"] = variant.elements

    def _floor(self, path, size, compute):
        """Seconds: computing, or the bytes, before which a hybrid has its forward pass and after which all update."""
        update = self.result["optimizer_s"] / (1 if path.hybrid else self.nodes)  # of a smaller shard
        return max(compute, size / self.line + update + (self.result["forward_s"] if path.hybrid else 0.0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--paths", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="time.time() after which no round begins")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--profile", nargs="*", default=[])
    args = parser.parse_args()
    bench = Bench(args)
    with train_paths.environment(PACELINE_CUDA_PATH="paceline"):  # what is measured, whatever a trial would choose
        bench.run(bench.connect, bench.prepare, bench.measure, bench.compare, bench.profile)


if __name__ == "__main__":
    main()
