#!/usr/bin/env python3
"""Plain PyTorch DistributedDataParallel on scikit-learn's handwritten digits; the first import is all that was added.

torchrun --nproc_per_node 2 examples/pytorch_native_ddp_demo.py
PACELINE_DISABLE=1 torchrun --nproc_per_node 2 examples/pytorch_native_ddp_demo.py     # without Paceline
"""

import paceline.torch  # noqa: F401, I001

import argparse
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits():
    """1,797 images of 8 × 8 pixels, split into 1,437 for training and 360 for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this demo's data comes with scikit-learn: pip install scikit-learn")
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    train, test = digits()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=arguments.batch_size, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            images, labels = test.tensors
            with torch.no_grad():
                accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
            seconds = time.perf_counter() - started
            print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy:.1%}, {seconds:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
