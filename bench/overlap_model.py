#!/usr/bin/env python3
"""What orders of buckets make of a step without a barrier between iterations: a model of the path, without a network.

    python bench/overlap_model.py                      # three models, exact and fp16, 2 nodes at 25 Gb/s
    python bench/overlap_model.py --rate 50 --link 0.9 # a link that carries nine tenths of what was measured

Buckets go one after the other through the stages of a path for GPUs (docs/gpu.md): reduce-scatter in the node; per
piece encoding and copy out, the link, copy in and combination; all-gather; the host's part; the update. The link is the
nodes'. Times of models are those of an H200 (the untied one: an H100), spread over the layers; what the stages
take are guesses (Way).

Printed, in milliseconds. floor: max(computing, bytes / line). least: what no order of whole gradients can beat, even if
they could be cut at will and nothing but the link took time. Then the model's steps: in the order in which buckets get
ready; in the one of the rate of a single all-reduce; and in best_order() (paceline/_torch/schedule.py) by what the
model of the path shows to its measurements. Last, how long the link stands still between a step's first byte and its
last in these three.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench" / "gpu")]

from train_floor import TCP_SHARE, link_bytes  # noqa: E402

from paceline._torch import buckets, schedule  # noqa: E402

MIB = 2**20
VALUE = {"exact": 4, "fp16": 2}


@dataclasses.dataclass
class Layer:
    """Elements of its parameters in the forward pass's order, and milliseconds."""

    sizes: list[int]
    forward: float
    backward: float


@dataclasses.dataclass
class Model:
    """layers: as the forward pass goes."""

    name: str
    layers: list[Layer]


def resnet50() -> Model:
    """torchvision's, batch 256: 25 ms forward, 30 ms backward; early stages take more than their operations' share."""

    def convolution(inside, outside, side):
        return [inside * outside * side * side, outside, outside]  # and its normalisation

    blocks = [[convolution(3, 64, 7)]]
    inside = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stage = []
        for index in range(count):
            block = convolution(inside, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            stage.append(block + (convolution(inside, 4 * width, 1) if index == 0 else []))
            inside = 4 * width
        blocks.append(stage)
    blocks.append([[2048 * 1000, 1000]])
    layers = []
    for share, stage in zip((0.12, 0.27, 0.25, 0.23, 0.12, 0.01), blocks):
        layers += [Layer(sizes, 25 * share / len(stage), 30 * share / len(stage)) for sizes in stage]
    return Model("ResNet-50", layers)


def transformer_block(width: int) -> list[int]:
    attention = [width * 3 * width, 3 * width, width * width, width]
    feed_forward = [width * 4 * width, 4 * width, 4 * width * width, width]
    return [width, width, *attention, width, width, *feed_forward]


def gpt2() -> Model:
    """GPT-2 medium, 8 × 512: 22 ms forward, 45 ms backward, the tied head takes as long as four layers."""
    width = 1024
    layers = [Layer([50257 * width, 1024 * width], 0.1, 0.3)]
    layers += [Layer(transformer_block(width), 0.78, 1.6) for _ in range(24)]
    # The last normalisation. The head's matrix is the first layer's, whose gradient is there when both are.
    layers.append(Layer([width, width], 3.2, 6.3))
    return Model("GPT-2 medium", layers)


#: Of 50,257, that a batch of 4,096 random tokens looks up: the rows of the embedding's gradient that travel.
ROWS = 3930


def untied() -> Model:
    """bench/gpu's transformer with a head of its own, 8 × 512, as measured: 5 + 6 ms forward, 8 + 11 ms backward."""
    width = 1024
    layers = [Layer([ROWS * width, 512 * width], 0.05, 0.25)]
    layers += [Layer(transformer_block(width), 5.15 / 12, 10.97 / 12) for _ in range(12)]
    layers.append(Layer([width, width, 50257 * width], 6.03, 7.96))  # with the loss
    return Model("untied transformer", layers)


MODELS = (resnet50, gpt2, untied)


@dataclasses.dataclass
class Bucket:
    elements: int
    ready: float  # seconds after the backward pass's begin
    wanted: int  # layer


def bucketed(model: Model, shrinking: bool) -> list[Bucket]:
    """The buckets as buckets.py makes them, or of one size as torch without a list of sizes does."""
    gradients, now = [], 0.0  # (bytes, ready, layer) in the order in which they get ready
    for index in reversed(range(len(model.layers))):
        layer = model.layers[index]
        left = sum(layer.sizes)
        for size in reversed(layer.sizes):
            now += layer.backward / 1e3 * size / left
            gradients.append((4 * size, now, index))
    sizes = [size for size, _, _ in gradients]
    cap = min(max(sum(sizes) // buckets._BUCKETS, buckets._LEAST), buckets._MOST)
    caps = buckets.plan(sizes, cap, buckets._LEAST, buckets._LAST) if shrinking else [cap]
    made, held = [], []
    for one in gradients:
        held.append(one)
        if sum(size for size, _, _ in held) >= caps[min(len(made), len(caps) - 1)] or one is gradients[-1]:
            made.append(Bucket(sum(size for size, _, _ in held) // 4, one[1], min(layer for _, _, layer in held)))
            held = []
    return made


@dataclasses.dataclass
class Way:
    """A path's stages, in seconds and bytes per second. line: of a node's link, both ranks together."""

    line: float
    value: int
    ranks: int = 2
    node: float = 60e9  # reduce-scatter and all-gather, a rank's bytes, with few blocks and beside computation
    copy: float = 45e9  # device to pinned memory and back
    start: float = 40e-6  # of a stage of the node, and of what the host does for a bucket on its way in
    turn: float = 100e-6  # from one node's memory to the other's, beside the bytes
    host: float = 300e-6  # from arrival to the first kernel that reads the parameters: waking up, update, launch
    piece: int = 4 * MIB  # of a rank's encoding

    def pieces(self, elements: int) -> list[int]:
        """Bytes of the node's link for each."""
        left, size = elements * self.value, self.piece * self.ranks
        return [min(size, left - at) for at in range(0, left, size)]

    def arrivals(self, order: list[int], made: list[Bucket]) -> tuple[dict[int, float], float]:
        """When parameters may be used, and for how long the link stood still between the first byte and the last."""
        handed = node = out = free = back = busy = 0.0
        first, there = None, {}
        for i in order:
            handed = max(handed, made[i].ready)
            across = made[i].elements * 4 / self.ranks / self.node
            node = max(node, handed) + self.start + across
            out, last = max(out, node), 0.0
            for piece in self.pieces(made[i].elements):
                out += piece / self.ranks / self.copy
                begin = max(free, out + self.turn / 2)
                first = begin if first is None else first
                free = begin + piece / self.line
                busy += piece / self.line
                last = free + self.turn / 2 + 2 * piece / self.ranks / self.copy
            back = max(back, last + self.start) + self.start + across
            there[i] = back + self.host
        return there, (free - (first or 0.0)) - busy

    def alone(self, elements: int, count: int = 1) -> float:
        """Seconds of `count` all-reduces handed over at once, without the update: what a measurement sees."""
        made = [Bucket(elements, 0.0, 0)] * count
        return max(self.arrivals(list(range(count)), made)[0].values()) - self.host + self.start


def step_seconds(model: Model, order: list[int], made: list[Bucket], way: Way) -> tuple[float, float]:
    """(a step, the link's idle seconds in it), from one backward pass's begin to the next one's."""
    there, idle = way.arrivals(order, made)
    now = sum(layer.backward for layer in model.layers) / 1e3
    for index, layer in enumerate(model.layers):
        for i, bucket in enumerate(made):
            if bucket.wanted == index:
                now = max(now, there[i])
        now += layer.forward / 1e3
    return now, idle


def tails(model: Model, made: list[Bucket]) -> list[float]:
    """See schedule.Step; up to the next backward pass's begin."""
    return [sum(layer.forward for layer in model.layers[bucket.wanted :]) / 1e3 for bucket in made]


def by_one_all_reduce(model: Model, made: list[Bucket], way: Way) -> list[int]:
    """The order of the rate at which the largest bucket travels alone, as if nothing but the link took time."""
    largest = max(bucket.elements for bucket in made)
    rate = largest / way.alone(largest)
    length = [bucket.elements / rate for bucket in made]
    return schedule.by_jackson([bucket.ready for bucket in made], length, tails(model, made))


def as_measured(model: Model, made: list[Bucket], way: Way) -> schedule.Step:
    """What measurements show to best_order(): see bucket_order.py."""
    return schedule.measured(
        [bucket.ready for bucket in made], [bucket.elements for bucket in made], tails(model, made), way.alone
    )


def least(model: Model, made: list[Bucket], way: Way) -> float:
    length = [sum(way.pieces(bucket.elements)) / way.line for bucket in made]
    nothing = [0.0] * len(made)
    step = schedule.Step([bucket.ready for bucket in made], length, tails(model, made), nothing, nothing)
    computing = sum(layer.forward + layer.backward for layer in model.layers) / 1e3
    return max(computing, schedule.least_seconds(step))


def compare(model: Model, codec: str, shrinking: bool, rate: float, link: float) -> dict[str, float]:
    """link: what the link carries in the steps, of what it carried when it was measured."""
    made = bucketed(model, shrinking)
    way = Way(rate * 1e9 / 8 * TCP_SHARE, VALUE[codec])
    slower = dataclasses.replace(way, line=way.line * link)
    computing = sum(layer.forward + layer.backward for layer in model.layers) / 1e3
    elements = sum(bucket.elements for bucket in made)
    orders = {
        "as ready": list(range(len(made))),
        "before": by_one_all_reduce(model, made, way),
        "now": schedule.best_order(as_measured(model, made, way)),
    }
    result = {
        "floor": max(computing, link_bytes(codec, elements, 2) / slower.line),
        "least": least(model, made, slower),
    }
    for name, order in orders.items():
        result[name], result[f"{name}, idle"] = step_seconds(model, order, made, slower)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=25, help="Gb/s")
    parser.add_argument("--link", type=float, default=1, help="of the measured link, while steps are made")
    args = parser.parse_args()
    print(f"{'ms, and of the floor':43}{'floor':>8}{'least':>15}{'as ready':>15}{'before':>15}{'now':>15}   idle link")
    for model in (make() for make in MODELS):
        for codec in ("exact", "fp16"):
            for shrinking in (False, True):
                result = compare(model, codec, shrinking, args.rate, args.link)
                cells = "".join(
                    f"{result[name] * 1e3:8.1f} {result[name] / result['floor']:6.3f}"
                    for name in ("least", "as ready", "before", "now")
                )
                title = f"{model.name}, {codec}, {'shrinking' if shrinking else 'equal'} buckets"
                idle = " ".join(f"{result[f'{name}, idle'] * 1e3:.1f}" for name in ("as ready", "before", "now"))
                print(f"{title:43}{result['floor'] * 1e3:8.1f}{cells}   {idle}")


if __name__ == "__main__":
    main()
