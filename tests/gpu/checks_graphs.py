"""CUDA graphs and DDP: what can't be captured is refused by name, and training goes on outside of the capture."""

import copy
import functools

import torch
import torch.distributed as dist
from checks import check, run
from gpu_world import DEVICE, RANK, assert_same_bits, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline.torch
from paceline._torch.ddp import attachment_of, paceline_hook

#: DDP times its first passes, and every hundredth one, by events that a capture can't have.
WARM_UP = 12


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)).to(DEVICE)


def wrap(module, codec, process_group=None):
    """process_group: another model's, whose path goes on; else a new one, with a path of this codec."""
    with settings(codec=codec, topk_threshold=0, topk_ratio=0.02):
        group = process_group or dist.new_group()
        return DistributedDataParallel(module, device_ids=[DEVICE.index], process_group=group)


def loss_and_backward(model, data):
    (model(data) ** 2).mean().backward()


def backward(model, step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    loss_and_backward(model, torch.randn(16, 64, generator=generator).to(DEVICE))


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def held(model):
    return [p.detach().clone() for p in model.parameters()]


def is_as(model, before):
    return all(torch.equal(was, p) for was, p in zip(before, model.parameters()))


def assert_goes_on(model, optimizer):
    """All ranks' parameters change, alike."""
    before = held(model)
    train(model, optimizer, 3)
    assert not is_as(model, before)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, name)


def noted(buckets, all_reduce, bucket):
    buckets.append(bucket)
    return all_reduce(bucket)


def refused(call, **capture):
    """What an UnsupportedError said under capture. The capture is none the worse for it, and is replayed."""
    replays, said = torch.zeros(1, device=DEVICE), ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **capture):
        replays += 1
        try:
            call()
        except paceline.UnsupportedError as error:
            said = str(error)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert replays.item() == 2
    return said


@check
def a_captured_step_of_the_optimizer_is_refused_by_name():
    ways = ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"capturable": True}))
    for kind, arguments in ways:
        for codec in ("none", "topk"):
            model = wrap(network(), codec)
            optimizer = kind(model.parameters(), lr=1e-3, foreach=True, **arguments)
            train(model, optimizer, 3)
            optimizer.zero_grad()
            backward(model, 3)
            before = held(model)
            said = refused(optimizer.step)
            assert f"{kind.__name__}.step() is being captured into a CUDA graph" in said, said
            assert is_as(model, before)
            optimizer.step()  # with the same gradients
            assert not is_as(model, before)
            assert_goes_on(model, optimizer)


@check
def a_captured_step_of_other_parameters_is_none_of_ours():
    model = wrap(network(), "none")
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), 1)
    other = nn.Parameter(torch.ones(1000, device=DEVICE))
    other.grad = torch.ones_like(other)
    assert refused(torch.optim.SGD([other], lr=0.25, foreach=True).step) == ""
    assert (other == 0.5).all(), other


def with_graphed_middle(graphed):
    """Its middle's forward and backward passes are graphs, made before DDP has the model, as torch asks for."""
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(512, 512), nn.Tanh()).to(DEVICE)
    ends = [nn.Linear(64, 512).to(DEVICE), nn.Tanh(), nn.Linear(512, 10).to(DEVICE)]
    if graphed:
        middle = torch.cuda.make_graphed_callables(middle, (torch.randn(16, 512, device=DEVICE, requires_grad=True),))
    return nn.Sequential(ends[0], ends[1], middle, ends[2])


@check
def passes_that_are_graphs_train_as_others():
    for codec in ("none", "topk"):
        for overlap in (False, True):
            ends = []
            for graphed in (True, False):
                model = wrap(with_graphed_middle(graphed), codec)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
                if overlap:
                    paceline.torch.DistributedOptimizer(optimizer, model=model, overlap="forward")
                train(model, optimizer, 10)
                if overlap:
                    optimizer.synchronize()
                ends.append(held(model))
                for name, parameter in model.named_parameters():
                    assert_same_bits(parameter, name)
            start = held(with_graphed_middle(False))
            for graph, plain, was in zip(*ends, start):
                # cuBLAS may choose other kernels under capture; top-k then sends other elements, once in a while.
                off = (graph - plain).norm() / (plain - was).norm()
                assert off < (1e-4 if codec == "none" else 0.05), (codec, overlap, off.item())


@check
def a_hook_under_capture_is_refused_by_name():
    """Without the pass around it, so that the same model goes on: nothing counts as under way."""
    for codec in ("none", "topk"):
        model = wrap(network(), codec)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        attachment, buckets = attachment_of(model), []
        attachment.all_reduce = functools.partial(noted, buckets, attachment.all_reduce)
        train(model, optimizer, 3)
        first = next(bucket for bucket in reversed(buckets) if bucket.index() == 0)
        kept = first.buffer().clone()
        for _ in range(2):
            said = refused(functools.partial(paceline_hook, attachment, first))
            assert "all-reduce 'bucket 0 of model" in said and "being captured into a CUDA graph" in said, said
            assert not attachment.endpoint.steps.under_way
        assert torch.equal(first.buffer(), kept), "something of the all-reduce was captured"
        assert_goes_on(model, optimizer)


@check
def a_captured_backward_pass_is_refused_by_name():
    """All on one stream from the beginning, as torch asks of DDP in a graph: else the pass forks to where it was made.

    torch's DDP can't go on after a pass that raised, without Paceline neither; a new one over the same path does.
    """
    for codec in ("none", "topk"):
        stream = torch.cuda.Stream(DEVICE)
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(stream):
            model = wrap(network(), codec)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            train(model, optimizer, WARM_UP)
            optimizer.zero_grad()
            data = torch.randn(16, 64, device=DEVICE)
        torch.cuda.synchronize()
        before = held(model)
        said = refused(
            functools.partial(loss_and_backward, model, data),
            stream=stream,
            capture_error_mode="thread_local",  # the pass runs on another thread, which may ask how events are
        )
        assert "all-reduce 'bucket 0 of model" in said and "being captured into a CUDA graph" in said, said
        assert not attachment_of(model).endpoint.steps.under_way
        assert is_as(model, before)
        again = wrap(copy.deepcopy(model.module), codec, model.process_group)
        assert attachment_of(again).endpoint is attachment_of(model).endpoint
        assert_goes_on(again, torch.optim.SGD(again.parameters(), lr=1e-3))


run()
