"""One rank of the training benchmark, inside `paceline lab`: one model, all paths interleaved; rank 0 writes JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from pathlib import Path

import bench_rank
import lab_bytes
import sums
import torch
import torch.distributed as dist
import train_floor
import train_host
import train_models
import train_paths
import train_phases
import wire_bytes

import paceline.torch  # noqa: F401

#: Seconds that the iterations timed at a stretch should take, and the least of them.
_STRETCH, _LEAST = 0.6, 3
#: The same without a barrier, where what counts lies between the returns of the first step and the last: what the host
#: happens to be ahead or behind there, some milliseconds, must be little beside.
_STRETCH_OVERLAPPED, _LEAST_OVERLAPPED = 1.8, 12
_WARM_UP = 5
#: The same of our paths: the order of buckets without a barrier, and whether the end of a pass waits, are tried at the
#: beginning; then, for 24 passes, whether the host sleeps.
WARM_UP_OURS = 60
#: What the GPU waits for before a step whose ready times are noted, in times of what the host takes to launch one.
_HEAD_START = 1.5
#: Iterations in a trace.
_PROFILED = 4


class Clock:
    """Marks in the device's order and the seconds between them; wall clock on the CPU."""

    def __init__(self, device):
        self._cuda = device.type == "cuda"

    def mark(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleeper(self):
        """f(seconds): the device does nothing for so long before it goes on with what comes after; none on the CPU."""
        if not self._cuda:
            return lambda seconds: None
        cycles = 10_000_000
        for _ in range(2):  # the first launch loads the kernel
            start = self.mark()
            torch.cuda._sleep(cycles)
            end = self.mark()
            self.settle()
        rate = cycles / self.seconds(start, end)
        return lambda seconds: torch.cuda._sleep(int(seconds * rate))

    def seconds(self, start, end):
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start

    def settle(self):
        if self._cuda:
            torch.cuda.synchronize()


class Variant:
    """One path: its wrapped model, its optimizer, what was measured."""

    def __init__(self, path, model, workload):
        self.path = path
        self.model = model
        self.inputs = workload.inputs
        self.loss = workload.loss
        self.optimizer = train_paths.give_optimizer(path, workload.optimizer(model.module.parameters()), model)
        self.rounds = []
        self.by_rank = []  # seconds a step of every rank, round by round
        self.steps = []  # seconds of each step of this one, round by round
        self.ranks_equal = None  # after the rounds: whether all ranks have the same parameters
        self.iterations = 0
        self.host = {}  # seconds until step() returns, from rest, and of that in the hook and in the library

    def forward(self, device, half):
        """The loss of its batch."""
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return self.loss(self.model, self.inputs)

    def step(self, device, half):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(device, half)
        loss.backward()
        self.optimizer.step()
        return loss


class Bench(bench_rank.BenchRank):
    def __init__(self, args):
        super().__init__(args)
        self.clock = Clock(self.device)
        self.half = self.cuda

    # --- the parts of a run ------------------------------------------------------------------------------------------

    def _workload(self, build):
        """The model, the same on all ranks, and this rank's batch."""
        torch.manual_seed(1)
        return build(self.device, self.rank)

    def prepare(self):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        models = train_models.SMOKE if self.args.smoke else train_models.MODELS
        build = models[self.args.model]
        self.doing("peers: tuning")
        best, self.group, tried = train_paths.fastest_group(self.device, self._all_reduce_seconds)
        self.result["nccl"] = {"chosen": best, "seconds_64MiB": tried}
        self.doing("trace: making")
        workload = self._workload(build)
        self.result["text"] = workload.text
        parameters = [p for p in workload.module.parameters() if p.requires_grad]
        self.result["parameters"] = self.elements = sum(p.numel() for p in parameters)
        self._measure_trace(workload)
        for path in self.args.paths:
            self.doing(f"{path}: making")
            workload = self._workload(build)
            peers = (best, self.group)
            model = train_paths.make(path, workload.module, self.device, peers, self.args.settings, self.nodes)
            variant = Variant(path, model, workload)
            self.variants.append(variant)
            for _ in range(self.args.warm_up if train_paths.is_ours(path) else _WARM_UP):
                variant.step(self.device, self.half)
                self.doing(f"{path}: warming up")
            train_paths.keep_order(model)  # what is worked out anew once in a thousand steps is no part of a stretch
            self.doing(f"{path}: warm")
            self._choose_iterations(variant)

    def _all_reduce_seconds(self, group):
        data = torch.ones(16 << 20, device=self.device)
        seconds = []
        for _ in range(4):
            self.barrier()
            started = time.perf_counter()
            dist.all_reduce(data, group=group)
            self.clock.settle()
            seconds.append(self.largest(time.perf_counter() - started))
        return min(seconds)

    def _measure_trace(self, workload):
        model, trace = train_paths.wrap_trace(workload.module, self.device, self.group, self.clock)
        variant = Variant("trace", model, workload)
        sleep = self.clock.sleeper()
        steps, host = [], []
        for index in range(_WARM_UP + 7):
            self.barrier()
            trace.buckets.clear()
            # On an idle GPU kernels begin when the host has launched them: that would be the host's time, no bound for
            # steps that find the host ahead.
            if index >= _WARM_UP:
                sleep(_HEAD_START * min(host))
            started = time.perf_counter()
            begin = self.clock.mark()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                loss = variant.loss(model, variant.inputs)
            middle = self.clock.mark()
            loss.backward()
            backward = self.clock.mark()
            variant.optimizer.step()
            end = self.clock.mark()
            variant.optimizer.zero_grad(set_to_none=True)
            if index < _WARM_UP:
                host.append(time.perf_counter() - started)
            self.clock.settle()
            self.doing("trace: measuring")
            if index >= _WARM_UP:
                at = [(self.clock.seconds(begin, mark), elements) for mark, elements in trace.buckets]
                spans = [(begin, middle), (middle, backward), (backward, end)]
                steps.append((at, *(self.clock.seconds(a, b) for a, b in spans)))
        ready = [statistics.median(step[0][i][0] for step in steps) for i in range(len(steps[0][0]))]
        elements = [size for _, size in steps[0][0]]
        names = ("forward_s", "backward_s", "optimizer_s")
        self.result["trace"] = {
            "ready_s": [self.largest(r) for r in ready],
            "elements": elements,
            **{name: self.largest(statistics.median(s[i + 1] for s in steps)) for i, name in enumerate(names)},
        }
        del model, variant, workload
        train_paths.release()

    def _choose_iterations(self, variant):
        seconds, host = [], []
        for _ in range(3):
            self.barrier()
            parts = train_host.HostParts()
            with parts.watch(variant):
                started = time.perf_counter()
                variant.step(self.device, self.half)
                host.append((time.perf_counter() - started, parts.hook, parts.library))
            train_paths.settle(variant)
            self.clock.settle()
            seconds.append(time.perf_counter() - started)
        took = self.largest(min(seconds))
        variant.host = dict(zip(("host", "hook", "library"), map(self.largest, min(host))))
        overlapped = train_paths.without_barrier(variant.path)
        stretch, least = (_STRETCH_OVERLAPPED, _LEAST_OVERLAPPED) if overlapped else (_STRETCH, _LEAST)
        stretch = max(stretch, self.args.stretch)
        variant.iterations = max(least, min(50, round(stretch / took)))
        variant.expected = took * (variant.iterations + 1)

    def measure(self):
        """Rounds until there are enough of them or time is up; every round visits every path, in another order."""
        done = 0
        shuffled = random.Random(11)  # alike on all ranks
        while done < self.args.rounds and self._time_for_a_round():
            for variant in shuffled.sample(self.variants, len(self.variants)):
                self.doing(f"{variant.path}: round {done + 1}")
                variant.rounds.append(self._stretch(variant))
            done += 1
            self.summarise()
            self.write()

    def compare(self):
        """After the rounds a path fails whose ranks' parameters differ and must not, or whose bytes are wrong."""
        self.summarise()
        for variant in self.variants:
            if not variant.rounds:
                continue
            self.doing(f"{variant.path}: comparing")
            train_paths.settle(variant)
            self.barrier()
            words = self._all_of_them(sums.checksum(variant.model.module.parameters()))
            variant.ranks_equal = len(set(words)) == 1
            if train_paths.keeps_ranks_equal(variant.path) and not variant.ranks_equal:
                away = [rank for rank, word in enumerate(words) if word != words[0]]
                self.result["failed"][variant.path] = (
                    f"after the rounds rank 0's parameters are not those of ranks {away}"
                )
            elif why := self._wrong_bytes(variant):
                self.result["failed"][variant.path] = why
        self.result["compared"] = True  # so what failed did not keep the others from their rounds
        self.summarise()
        self.write()

    def _wrong_bytes(self, variant):
        """What is wrong with the bytes of a path of ours on a node's link; "" where NCCL carries it, or nothing.

        On CPUs the counters hold what stays in the node, too.
        """
        figures = self.result["paths"][variant.path]
        if not self.cuda or self.nodes < 2 or "wire" not in figures or train_paths.attachment_of(variant.model) is None:
            return ""
        return wire_bytes.complaint(figures["payload"], figures["wire"], self.slots) or wire_bytes.unlike_the_plan(
            figures["payload"], figures.get("predicted")
        )

    def phases(self):
        """After the rounds, where --phases asks for it: of each path with a barrier where a step's time goes."""
        for variant in self.variants:
            if not self.args.phases or not variant.rounds or train_paths.without_barrier(variant.path):
                continue
            self.doing(f"{variant.path}: phases")
            self.barrier()
            mine = train_phases.Phases(variant, self.clock, self.device, self.half).measure(self.args.phases)
            train_paths.settle(variant)
            figures = self.result["paths"][variant.path]["phases"] = {
                "step": self.largest(mine["step"]),
                "threads": mine["threads"],
                "inside": mine["inside"],
            }
            for where in ("device", "host"):
                figures[where] = {name: self.total(s) / self.size for name, s in mine[where].items()}
            self.write()

    def profile(self):
        """After the rounds: some iterations of each path asked for, as torch's profiler sees them on rank 0."""
        for variant in self.variants:
            if variant.path not in self.args.profile:
                continue
            self.doing(f"{variant.path}: profile")
            variant.step(self.device, self.half)
            self.barrier()
            with self._profiler() if self.rank == 0 else contextlib.nullcontext() as profiler:
                for _ in range(_PROFILED):
                    variant.step(self.device, self.half)
                train_paths.settle(variant)
                self.clock.settle()
            if profiler is not None:
                name = f"{self.args.out.stem}.{variant.path}.trace.json.gz"
                profiler.export_chrome_trace(str(self.args.out.with_name(name)))
            self.barrier()

    def _profiler(self):
        """Of the GPU alone unless asked: to note operators slows the host down, and then that is what shows."""
        kind = torch.profiler.ProfilerActivity
        operators = self.args.profile_operators or self.device.type != "cuda"
        activities = ([kind.CPU] if operators else []) + ([kind.CUDA] if self.device.type == "cuda" else [])
        return torch.profiler.profile(activities=activities)

    def _time_for_a_round(self):
        enough = time.time() + sum(v.expected for v in self.variants) < self.args.until
        return self.largest(0.0 if enough else 1.0) == 0.0

    def _stretch(self, variant):
        """Steps in a row, timed from the end of the first, which finds the host no step ahead and an idle link."""
        self.barrier()
        before, used = self._links(), bench_rank.cpu_seconds()
        payload = _payload(variant)
        self.barrier()
        started = time.perf_counter()
        marks, returned = [], []
        for _ in range(variant.iterations + 1):
            variant.step(self.device, self.half)
            marks.append(self.clock.mark())
            returned.append(time.perf_counter() - started)
        train_paths.settle(variant)
        self.clock.settle()
        took = time.perf_counter() - started
        cores = (bench_rank.cpu_seconds() - used) / took
        self.barrier()
        after = self._links()
        step = self.clock.seconds(marks[0], marks[-1]) / variant.iterations
        variant.steps.append([self.clock.seconds(a, b) for a, b in zip(marks, marks[1:])])
        if train_paths.without_barrier(variant.path):
            # The end of a stretch waits for the last gradients: from return to return the same is under way at both
            # ends, and the host, which stands at the layers' gates, is no step ahead.
            step = (returned[-1] - returned[0]) / variant.iterations
        steps = len(returned)
        variant.by_rank.append(self._all_of_them(step))
        one = {
            "seconds": max(variant.by_rank[-1]),
            "cores": self.total(cores) / self.size,
            "payload": self._of_busiest_node(_payload(variant) - payload) / steps,
        }
        variant.returned = [*returned, took]
        if before is not None:
            one["wire"] = lab_bytes.busiest(before, after) / steps
            one["drops"] = lab_bytes.drops(before, after) / steps
        return one

    def _links(self):
        if not os.environ.get("PACELINE_LAB_BYTES"):
            return None
        return lab_bytes.read_links()

    def _all_of_them(self, value):
        """What every rank says, by rank."""
        all_of_them = [None] * self.size
        dist.all_gather_object(all_of_them, value, group=self.control)
        return all_of_them

    def _of_busiest_node(self, value):
        """The largest of the nodes' sums."""
        all_of_them = self._all_of_them(value)
        return max(sum(all_of_them[n * self.slots : (n + 1) * self.slots]) for n in range(self.nodes))

    # --- results --------------------------------------------------------------------------------------------------

    def summarise(self):
        trace = self.result["trace"]
        for variant in self.variants:
            if not variant.rounds:
                continue
            median = {key: statistics.median(r[key] for r in variant.rounds) for key in variant.rounds[0]}
            median["rounds"] = [r["seconds"] for r in variant.rounds]
            if "wire" in median:
                median["beyond_headers"] = median["wire"] - wire_bytes.framed(median["payload"])
            median["steps"] = variant.steps
            median["round_drops"] = [r.get("drops", 0) for r in variant.rounds]
            median["by_rank"] = [statistics.median(seconds) for seconds in zip(*variant.by_rank)]
            median["iterations"] = variant.iterations
            median.update(variant.host)
            median["ranks_equal"] = variant.ranks_equal
            stats = _stats(variant)
            median["by_rows"] = stats.get("rows_bound", 0) > 0
            # What a pass takes whose end waits for the GPU, and one's that does not.
            median["ends"] = [stats.get(f"pass_ns_{way}", 0) / 1e9 for way in ("waiting", "ahead")]
            if train_paths.without_barrier(variant.path):
                median["buckets"] = train_paths.order_of(variant.model)
                median["returned"] = variant.returned  # of the last stretch: when its steps returned, and its end
            self.result["paths"][variant.path] = median
        compute = self.result["paths"].get("none", {}).get("seconds")
        for path, figures in self.result["paths"].items():
            name, _ = train_paths.parts(path)
            codec = train_paths.PATHS[name][1]
            if compute is None or codec is None or not self.line:
                continue
            settings = {**os.environ, **self.args.settings, **train_paths.own_settings(path)}
            topk = train_floor.topk_format(settings, self.args.ratio)
            sizes = [train_floor.bucket_bytes(codec, n, self.nodes, topk) for n in trace["elements"]]
            whole = sum(sizes)
            if name.startswith("none"):
                sizes = [0.0] * len(sizes)
            elif figures["by_rows"]:
                sizes = train_floor.without_zero_rows(sizes, figures["payload"])
            figures["predicted"] = sum(sizes)
            if train_paths.without_barrier(path):
                figures["floor"] = train_floor.floor_without_barrier(sum(sizes), compute, self.line)
                noted = figures["buckets"] or {}
                figures["least"] = train_floor.least_without_barrier(noted, whole, sum(sizes), compute, self.line)
                continue
            traced = sum(trace[part] for part in ("forward_s", "backward_s", "optimizer_s"))
            trace["floor_ready_s"] = train_floor.ready_in_a_stretch(trace["ready_s"], traced, compute)
            ready = list(zip(trace["floor_ready_s"], sizes))
            figures["floor"] = train_floor.floor_seconds(ready, trace["optimizer_s"], compute, self.line)


def _stats(variant):
    """Paceline's counters of this path; empty where it is none of ours."""
    attachment = train_paths.attachment_of(variant.model)
    return {} if attachment is None else attachment.endpoint.communicator.stats()


def _payload(variant):
    """Bytes that Paceline has handed to the wire for this path, without headers."""
    stats = _stats(variant)
    return stats.get("wire_bytes", stats.get("payload_sent", 0))


def _load_the_cores(count):
    """Processes as busy as data loaders: they decode (compress and uncompress) without end."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    for _ in range(count):
        context.Process(target=_decode_for_ever, daemon=True).start()


def _decode_for_ever():
    import zlib

    os.nice(0)
    packed = zlib.compress(os.urandom(1 << 20))
    while os.getppid() != 1:
        zlib.decompress(packed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--paths", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--until", type=float, required=True, help="time.time() after which no round begins")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--stretch", type=float, default=0)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_OURS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--phases", type=int, default=0)
    parser.add_argument("--profile", nargs="*", default=[])
    parser.add_argument("--profile-operators", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={}, help="PACELINE_* variables of our paths")
    args = parser.parse_args()
    bench = Bench(args)
    _load_the_cores(args.loaders)
    bench.run(bench.connect, bench.prepare, bench.measure, bench.compare, bench.phases, bench.profile)


if __name__ == "__main__":
    main()
