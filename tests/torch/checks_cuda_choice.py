"""Which way a CUDA model takes, asked where there may be no GPU. CHECKS_NODES: every rank is a node of its own."""

import os

import torch
import torch.distributed as dist
from checks import check, run

import paceline.torch
from paceline._torch import cuda

if os.environ.get("CHECKS_NODES"):
    os.environ["PACELINE_NODE_ID"] = f"node{os.environ['RANK']}"
dist.init_process_group("gloo")
RANK = dist.get_rank()
WORLD = dist.distributed_c10d._get_default_group()


@check
def the_choice():
    error = None
    try:
        endpoint = cuda.endpoint_of(WORLD, torch.device("cuda", 0))
    except paceline.UnsupportedError as raised:
        endpoint, error = None, str(raised)
    if os.environ.get("PACELINE_CUDA_PATH") == "paceline":
        assert error is not None and "PACELINE_CUDA_PATH=paceline" in error, error
        print("reason:", error, flush=True)
    else:
        assert endpoint is None and error is None, (endpoint, error)
    again = torch.ones(1)
    dist.all_reduce(again)  # the ranks still agree about what comes next
    assert again.item() == dist.get_world_size()


@check
def it_ends_in_order():
    dist.destroy_process_group()
    assert not cuda._chosen


run()
