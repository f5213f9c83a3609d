"""Training under top-k: resumed.py FOLDER WAY.

WAY "unbroken": all steps in one go; FOLDER/RANK.half holds a checkpoint from the middle, FOLDER/RANK.end the parameters
and residuals of the end. WAY "resumed": from FOLDER/RANK.half to the end, in processes of their own.
"""

import os
import sys
from pathlib import Path

os.environ["PACELINE_NODE_ID"] = "node " + os.environ["RANK"]

import torch
import torch.distributed as dist
from models import batch, mlp
from torch.nn.parallel import DistributedDataParallel

import paceline.torch

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]
HALF, STEPS = 4, 9

dist.init_process_group("gloo")
RANK = dist.get_rank()
network = mlp(5 if WAY == "unbroken" else 6, torch.float32, (6, 60, 90, 40, 3))
model = DistributedDataParallel(network, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(step):
    optimizer.zero_grad()
    (model(batch(step, 8, 6, dtype=torch.float32)) ** 2).mean().backward()


def train(steps):
    for step in steps:
        backward(step)
        optimizer.step()


def state():
    residuals = paceline.torch.residual_state_dict(model)
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "residuals": residuals}


def tensors(part):
    """In the order of their names."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, dict):
        return [tensor for key in sorted(part, key=str) for tensor in tensors(part[key])]
    return []


if WAY == "unbroken":
    train(range(HALF))
    torch.save(state(), FOLDER / f"{RANK}.half")
    train(range(HALF, STEPS))
    torch.save(state(), FOLDER / f"{RANK}.end")
else:
    # torch arranges its buckets after the first pass, and what each of them sends depends on what it holds.
    backward(0)
    backward(0)
    kept = torch.load(FOLDER / f"{RANK}.half")
    network.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    paceline.torch.load_residual_state_dict(model, kept["residuals"])
    train(range(HALF, STEPS))
    ours, theirs = tensors(state()), tensors(torch.load(FOLDER / f"{RANK}.end"))
    same = [torch.equal(one, other) for one, other in zip(ours, theirs)]
    assert len(ours) == len(theirs) > 16 and all(same), same
    assert any(bool(residual.any()) for residual in tensors(kept["residuals"]))
    print("the same bits", flush=True)
dist.destroy_process_group()
