"""A plain DistributedDataParallel training script: scikit-learn's handwritten digits, a network of 21 M parameters.

Started by torchrun, mpirun, `paceline run` or `paceline lab`. With --paceline its one difference is the import:

    paceline lab --nodes 4 --rate 1gbit -- python tools/demo/train.py --steps 60
    PACELINE_CODEC=topk paceline lab --nodes 4 --rate 1gbit -- python tools/demo/train.py --steps 60 --paceline
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 16  # per rank
WIDTH = 1024
DEPTH = 20
TEST_IMAGES = 500


class Digits:
    """1,797 real 8 × 8 images. The test set is held out, then seen in five positions each: 2,500 samples."""

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images / 8.0 - 0.5, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
        images, labels = images[order], labels[order]
        self.train_x, self.train_y = images[TEST_IMAGES:], labels[TEST_IMAGES:]
        moves = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
        self.test_x = torch.cat([moved(images[:TEST_IMAGES], *m) for m in moves]).flatten(1)
        self.test_y = labels[:TEST_IMAGES].repeat(len(moves))

    def batch(self, step: int, rank: int, seed: int = 0, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        """The same images for the same (step, rank, seed), moved by at most one pixel."""
        source = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4096 + rank)
        index = torch.randint(len(self.train_x), (size,), generator=source)
        dx, dy = (int(v) - 1 for v in torch.randint(3, (2,), generator=source))
        return moved(self.train_x[index], dx, dy).flatten(1), self.train_y[index]


def moved(images: torch.Tensor, dx: int, dy: int) -> torch.Tensor:
    """Images shifted by (dx, dy) pixels; what comes in is empty."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=-0.5)
    return padded[:, 1 + dy : 9 + dy, 1 + dx : 9 + dx].contiguous()


class Block(nn.Module):
    """x + relu(linear(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def build_model(seed: int = 0, depth: int = DEPTH) -> nn.Module:
    """64 → 1024, `depth` residual blocks, → 10: 21.1 M parameters of 20 blocks, 10.6 M of ten."""
    torch.manual_seed(seed)
    blocks = [Block(WIDTH) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.015, fused=True)


def train_step(model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def accuracy(model: nn.Module, data: Digits, rank: int = 0, size: int = 1) -> float:
    """Share of the test samples that are right; ranks look at a part each."""
    with torch.no_grad():
        right = (model(data.test_x[rank::size]).argmax(1) == data.test_y[rank::size]).sum().double()
    if size > 1:
        dist.all_reduce(right)
    return float(right) / len(data.test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paceline", action="store_true", help="import paceline.torch")
    args = parser.parse_args()
    if args.paceline:
        import paceline.torch  # noqa: F401  (the one import)

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = Digits()
    model = DistributedDataParallel(build_model(args.seed), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model)
    started = time.perf_counter()
    for step in range(args.steps):
        loss = train_step(model, optimizer, *data.batch(step, rank, args.seed))
        if rank == 0 and (step + 1) % 10 == 0:
            speed = (step + 1) * BATCH * size / (time.perf_counter() - started)
            print(f"step {step + 1:4}: loss {loss:.4f}, {speed:.0f} samples/s")
    share = accuracy(model.module, data, rank, size)
    if rank == 0:
        print(f"accuracy {share:.4f} on {len(data.test_y)} test samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
