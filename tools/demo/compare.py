"""One rank of the comparison: trains the same model with every variant, in interleaved blocks of steps.

All variants live in one launch (the links, the cores and the noise are the same for all), start from equal weights and
see equal batches. A block is a few steps between two barriers; the blocks' order is shuffled anew in every round, and
the codecs alone have blocks of their own among them.
Started by demo.py under `paceline lab`; rank 0 writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import output
import torch
import torch.distributed as dist
import train
from codec_alone import CodecAlone
from lab_bytes import busiest, read_links
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

POWER_RANKS = (1, 2, 4)
CODECS = {"paceline-fp16": "fp16", "paceline-topk": "topk"}
TUNING_BLOCKS = 3  # of each setting, in turn, after one to warm up; the median counts
FP16_BUCKETS_MB = (4, 25)  # as Paceline's, and DDP's default
QUICK = ("no-communication", "paceline-topk", "topk")  # a block takes a second or less; the codec alone too
QUICK_SHARE = 0.2  # of the budget, for more rounds of these alone: their share of one round varies by 3 %
MTU, HEADERS, FRAME = 1500, 52, 14  # IPv4 and TCP with time stamps; Ethernet
ACKNOWLEDGED = 44  # segments in a GSO batch: the receiver sees one large segment and answers once
_HEAP, _HEAP_BLOCK = 384 << 20, 16 << 20  # bytes; of glibc's heap, where demo.py's settings keep all memory


def leave_alone(_state, bucket):
    """A hook that returns at once: DDP without communication."""
    future = Future()
    future.set_result(bucket.buffer())
    return future


def ring_link_bytes(payload: float, ranks: int) -> float:
    """What a flat ring all-reduce of `payload` bytes puts on a node's link, headers and acknowledgements included."""
    sent = 2 * (ranks - 1) / ranks * payload
    packets = sent / (MTU - HEADERS)
    acknowledgements = packets / ACKNOWLEDGED * (HEADERS + FRAME)  # of the ring's other neighbour
    return packets * (MTU + FRAME) + acknowledgements


def power_payload(model: torch.nn.Module, rank: int) -> float:
    """Bytes that PowerSGD reduces a step: factors of matrices, the rest as it is."""
    total = 0
    for p in model.parameters():
        n, m = p.shape[0], p.numel() // p.shape[0]
        total += (n + m) * rank if p.dim() > 1 and (n + m) * rank * 2 < p.numel() else p.numel()
    return 4.0 * total


class Variant:
    """A model with its optimizer and its way of carrying gradients, and what was measured of it."""

    def __init__(self, name: str, seed: int = 0, hook=None, codec: str | None = None, **ddp_arguments) -> None:
        self.name = name
        group = dist.new_group(backend="gloo")
        if codec is not None:  # Paceline reads its settings when the group's communicator is made
            os.environ["PACELINE_CODEC"] = codec
            import paceline.torch  # noqa: F401
        self.model = DistributedDataParallel(
            train.build_model(seed), process_group=group, gradient_as_bucket_view=True, **ddp_arguments
        )
        self.optimizer = train.build_optimizer(self.model)
        if hook is not None:
            hook(self.model, group)
        self.endpoint = None
        if codec is not None:
            from paceline._torch import endpoints

            self.endpoint = endpoints.of(group)
        self.step = 0
        self.step_seconds: list[float] = []
        self.forward_seconds: list[float] = []
        self.step_bytes: list[float] = []
        self.predicted: list[float] = []
        self.losses: list[torch.Tensor] = []

    def predicted_total(self) -> float:
        return 0 if self.endpoint is None else self.endpoint.communicator.stats()["predicted_link_bytes"]

    def block(self, data: train.Digits, steps: int, record: bool = True) -> None:
        rank = dist.get_rank()
        batches = [data.batch(self.step + i, rank) for i in range(steps)]
        dist.barrier()
        links = read_links()
        predicted = self.predicted_total()
        dist.barrier()
        started = time.perf_counter()
        losses = []
        for x, y in batches:
            self.optimizer.zero_grad()
            begin = time.perf_counter()
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            forward = time.perf_counter() - begin
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
            if record:
                self.forward_seconds.append(forward)
        dist.barrier()
        seconds = time.perf_counter() - started
        self.step += steps
        self.losses.append(torch.stack(losses).mean())
        if record:
            self.step_seconds.append(seconds / steps)
            self.step_bytes.append(busiest(links, read_links()) / steps)
            self.predicted.append((self.predicted_total() - predicted) / steps)
        else:
            self.warm_up_seconds = seconds

    def close(self) -> None:
        self.model = self.optimizer = None


def power_hook(matrix_rank: int):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def register(model, group):
        state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def fp16_hook(model, group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def fastest(data: train.Digits, candidates: dict) -> tuple[int, dict[int, float]]:
    """The quickest of a peer's settings, alike on all ranks, and a step's seconds with each.

    candidates: functions that make a Variant, by setting.
    """
    variants = {setting: make() for setting, make in candidates.items()}
    for _ in range(1 + TUNING_BLOCKS):
        for v in variants.values():
            v.block(data, 3, record=v.step > 0)
    times = {setting: statistics.median(v.step_seconds) for setting, v in variants.items()}
    chosen = torch.tensor(min(times, key=times.get))
    dist.broadcast(chosen, 0)
    for v in variants.values():
        v.close()
    return int(chosen), times


def power(name: str, matrix_rank: int) -> Variant:
    """DDP's single bucket is what PowerSGD's hook needs on Gloo."""
    return Variant(name, hook=power_hook(matrix_rank), bucket_cap_mb=1000)


def tuned_peers(names: list[str], data: train.Digits) -> dict:
    """What torch's hooks are fastest with here: PowerSGD's rank, the size of the fp16 hook's buckets."""
    peers = {"power_rank": 1, "power_step_s": {}, "fp16_bucket_mb": FP16_BUCKETS_MB[0], "fp16_step_s": {}}
    if "gloo-powersgd" in names:
        made = {rank: functools.partial(power, f"power-{rank}", rank) for rank in POWER_RANKS}
        peers["power_rank"], peers["power_step_s"] = fastest(data, made)
    if "gloo-fp16" in names:
        made = {
            size: functools.partial(Variant, f"fp16-{size}", hook=fp16_hook, bucket_cap_mb=size)
            for size in FP16_BUCKETS_MB
        }
        peers["fp16_bucket_mb"], peers["fp16_step_s"] = fastest(data, made)
    return peers


def make_variants(names: list[str], peers: dict) -> list[Variant]:
    """Plain DDP first: the import gives every model made after it Paceline's way."""
    makers = {
        "no-communication": lambda n: Variant(n, hook=lambda m, _: m.register_comm_hook(None, leave_alone)),
        "gloo": Variant,
        "gloo-fp16": lambda n: Variant(n, hook=fp16_hook, bucket_cap_mb=peers["fp16_bucket_mb"]),
        "gloo-powersgd": lambda n: power(n, peers["power_rank"]),
        "paceline-exact": lambda n: Variant(n, codec="none"),
        "paceline-fp16": lambda n: Variant(n, codec="fp16"),
        "paceline-topk": lambda n: Variant(n, codec="topk"),
    }
    return [makers[name](name) for name in makers if name in names]


def average(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values / dist.get_world_size()


def maximum(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def predicted_bytes(v: Variant, power_rank: int) -> float:
    """Paceline's own prediction, the busiest node's; for the others a ring's arithmetic."""
    if v.endpoint is not None:
        return maximum(statistics.median(v.predicted))
    size = dist.get_world_size()
    parameters = sum(p.numel() for p in v.model.parameters())
    payload = {
        "no-communication": 0.0,
        "gloo": 4.0 * parameters,
        "gloo-fp16": 2.0 * parameters,
        "gloo-powersgd": power_payload(v.model, power_rank),
    }[v.name]
    return ring_link_bytes(payload, size)


def out_of_time(deadline: float) -> bool:
    """Rank 0's clock decides for all."""
    over = torch.tensor(float(time.monotonic() > deadline))
    dist.broadcast(over, 0)
    return bool(over)


def touch_heap() -> None:
    """Memory that the heap takes as it grows is written to once, before anything is timed.

    Gradients of one size, freed and taken anew, leave holes in glibc's heap that only a little less fits into, and for
    a hundred steps the heap grows by some MiB a step, in one process and not in another. A page that a virtual machine
    never touched takes its host ten microseconds and more: in such processes up to a tenth of a step, of any variant.
    """
    blocks = [torch.ones(_HEAP_BLOCK, dtype=torch.uint8) for _ in range(_HEAP // _HEAP_BLOCK)]
    del blocks


def what_was_learned(v: Variant, data: train.Digits) -> dict:
    """Asked of all variants after equal steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        "block_loss": average(torch.stack(v.losses)).tolist(),
        "final_accuracy": train.accuracy(v.model.module, data, rank, size),
        "steps": v.step,
    }


def more_of_the_quick(everything: list, data: train.Digits, steps: int, shuffled: random.Random, began: float) -> None:
    """Rounds of what takes a second a block, until they are QUICK_SHARE of the time since `began`."""
    quick = [v for v in everything if v.name in QUICK]
    deadline = time.monotonic() + (time.monotonic() - began) * QUICK_SHARE / (1 - QUICK_SHARE)
    while not out_of_time(deadline):
        for v in shuffled.sample(quick, len(quick)):
            v.block(data, steps)


def measure(args) -> dict:
    """This rank's figures; times of a step are the slowest rank's, losses and accuracy those of all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    deadline = time.monotonic() + args.budget * (1 - QUICK_SHARE)
    data = train.Digits()
    peers = tuned_peers(args.variants, data)
    variants = make_variants(args.variants, peers)
    parameters = sum(p.numel() for p in variants[0].model.parameters())
    codecs = {v.name: CodecAlone(CODECS[v.name], parameters) for v in variants if v.name in CODECS}
    everything = [*variants, *codecs.values()]
    for v in everything:
        v.block(data, 2, record=False)  # buckets are rebuilt after the first step; PowerSGD begins at the third
    touch_heap()
    shuffled = random.Random(7)
    began = time.monotonic()
    rounds = 0
    while rounds < args.rounds and (rounds < 3 or not out_of_time(deadline)):
        for v in shuffled.sample(everything, len(everything)):
            v.block(data, args.steps)
        rounds += 1
        if rank == 0:
            print(f"round {rounds} of {args.rounds}", flush=True)
    trained = [what_was_learned(v, data) for v in variants]
    more_of_the_quick(everything, data, args.steps, shuffled, began)
    runs = []
    for v, learned in zip(variants, trained, strict=True):
        run = {
            "name": v.name,
            "ranks": size,
            "step_s": maximum(statistics.median(v.step_seconds[:rounds])),
            "forward_s": maximum(statistics.median(v.forward_seconds[: rounds * args.steps])),
            "round_s": v.step_seconds,
            "codec_round_s": codecs[v.name].close() if v.name in codecs else [],
            "block_s": [v.warm_up_seconds] + [s * args.steps for s in v.step_seconds[:rounds]],
            "bytes_measured": statistics.median(v.step_bytes),
            "bytes_predicted": predicted_bytes(v, peers["power_rank"]),
            **learned,
        }
        runs.append(run)
    return {
        "runs": runs,
        "batch": train.BATCH,
        "parameters": parameters,
        "test_samples": len(data.test_y),
        **peers,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file for rank 0's figures")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="in a block")
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--budget", type=float, default=240, help="seconds after which no new round begins")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = measure(args)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:  # after the others' end: what goes wrong here is no failure of theirs
        output.write(args.out, json.dumps(result))


if __name__ == "__main__":
    main()
