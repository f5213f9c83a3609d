#!/usr/bin/env python3
"""Throughput of plain DistributedDataParallel on random images, with the field's usual arguments and output lines.

torchrun --nproc_per_node 2 examples/pytorch_ddp_benchmark.py --model mlp
PACELINE_CODEC=fp16 torchrun --nproc_per_node 2 examples/pytorch_ddp_benchmark.py
"""

import paceline.torch  # noqa: F401, I001

import argparse
import statistics
import sys
import timeit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def mlp():
    """9.8 million parameters, hardly any computing: communication shows."""
    layers = [torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2048), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 1500), torch.nn.ReLU(), torch.nn.Linear(1500, 1000)), 32


def conv():
    layers = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64 * 16, 1000)), 32


def make_model(name):
    """(model, side of its images): one of the two above, or any of torchvision's where that is installed."""
    if name in ("mlp", "conv"):
        return {"mlp": mlp, "conv": conv}[name]()
    try:
        from torchvision import models
    except ImportError:
        sys.exit(f"model '{name}' comes with torchvision, which is not installed; built in are mlp and conv")
    return getattr(models, name)(), 224


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="mlp", help="mlp, conv, or a model of torchvision")
    parser.add_argument("--batch-size", type=int, default=32, help="input batch size")
    parser.add_argument("--num-warmup-batches", type=int, default=2, help="batches that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="batches per measured iteration")
    parser.add_argument("--num-iters", type=int, default=5, help="measured iterations")
    parser.add_argument("--no-cuda", action="store_true", default=True, help="CPU only (the default here)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, side = make_model(arguments.model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(arguments.batch_size, 3, side, side)
    target = torch.randint(1000, (arguments.batch_size,))

    def say(text):
        if rank == 0:
            print(text, flush=True)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    say(f"Model: {arguments.model}")
    say(f"Batch size: {arguments.batch_size}")
    say(f"Number of CPUs: {size}")
    say("Running warmup...")
    timeit.timeit(step, number=arguments.num_warmup_batches)
    say("Running benchmark...")
    rates = []
    for i in range(arguments.num_iters):
        seconds = timeit.timeit(step, number=arguments.num_batches_per_iter)
        rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
        say(f"Iter #{i}: {rates[-1]:.1f} img/sec per CPU")
    mean = statistics.fmean(rates)
    spread = 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per CPU: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {size} CPU(s): {size * mean:.1f} +-{size * spread:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
