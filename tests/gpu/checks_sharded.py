"""Sharded training on backend "cpu:paceline,cuda:paceline": every collective, FSDP 1 and 2, ZeRO, against float64."""

import time

import torch
import torch.distributed as dist
from checks import check, keep_ports, run
from gpu_world import DEVICE, NODES, RANK, SIZE, SLOTS, assert_same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paceline.torch
from paceline._torch.cuda_collectives import CudaCollectives

STEPS = 10
SIZES = [1, 33, 4097, 300_007, 3_000_001]


def values(rank, count, dtype=torch.float32, salt=0):
    """Small integers, whose sums every dtype here holds exactly."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 9, (count,), generator=generator).to(dtype)


def mine(count, dtype=torch.float32, salt=0):
    return values(RANK, count, dtype, salt).to(DEVICE)


def everyone(count, dtype=torch.float32, salt=0):
    return [values(rank, count, dtype, salt) for rank in range(SIZE)]


def half_of(group=None):
    """The CUDA half of a process group's backend."""
    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).paceline_cuda


def assert_is(tensor, wanted):
    assert torch.equal(tensor.cpu(), wanted), (tensor.cpu().double() - wanted.double()).abs().max()


@check
def the_groups_tensors_travel_through_paceline():
    dist.all_reduce(torch.ones(8, device=DEVICE))
    way = half_of().way(DEVICE)
    assert isinstance(way, CudaCollectives), type(way)
    way.arrive()  # bytes count when they are sent
    dist.barrier()
    before = way.path.stats()["wire_bytes"]
    count = 1 << 20
    dist.all_gather_into_tensor(torch.empty(SIZE * count, device=DEVICE), mine(count))
    torch.cuda.synchronize()
    dist.barrier()
    sent = way.path.stats()["wire_bytes"] - before
    assert sent == 4 * count * (NODES - 1), sent


@check
def captured_collectives_are_refused_by_name():
    """The capture itself is none the worse for it, and neither is the group."""
    tensor, output = mine(1000), torch.zeros(SIZE * 1000, device=DEVICE)
    replays, said = torch.zeros(1, device=DEVICE), []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replays += 1
        for call in (lambda: dist.all_reduce(tensor), lambda: dist.all_gather_into_tensor(output, tensor)):
            try:
                call()
            except paceline.UnsupportedError as error:
                said.append(str(error))
    assert len(said) == 2, said
    for text, kind in zip(said, ("all-reduce 'all_reduce", "all-gather 'all_gather")):
        assert kind in text and "its stream is being captured into a CUDA graph" in text, said
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert replays.item() == 3
    assert_is(tensor, values(RANK, 1000))
    assert not output.any(), "something of a collective was captured"
    dist.all_reduce(tensor)
    assert_is(tensor, sum(everyone(1000)))


@check
def every_collective_at_every_size():
    for salt, count in enumerate(SIZES):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor = mine(count, dtype, salt)
            dist.all_reduce(tensor)
            assert_is(tensor, sum(everyone(count, dtype, salt)))
            output = torch.empty(count, dtype=dtype, device=DEVICE)
            source = mine(count * SIZE, dtype, salt)
            dist.reduce_scatter_tensor(output, source)
            assert_is(output, sum(everyone(count * SIZE, dtype, salt))[RANK * count : (RANK + 1) * count])
            assert_is(source, values(RANK, count * SIZE, dtype, salt))
        for dtype in (torch.float32, torch.int64, torch.uint8):
            output = torch.empty(SIZE * count, dtype=dtype, device=DEVICE)
            dist.all_gather_into_tensor(output, mine(count, dtype, salt))
            assert_is(output, torch.cat(everyone(count, dtype, salt)))
            root = salt % SIZE
            tensor = mine(count, dtype, salt)
            dist.broadcast(tensor, root)
            assert_is(tensor, values(root, count, dtype, salt))


@check
def other_reductions_views_and_lists():
    for op, fold in ((dist.ReduceOp.MAX, lambda p: p.amax(0)), (dist.ReduceOp.MIN, lambda p: p.amin(0))):
        for dtype in (torch.float32, torch.int64):
            tensor = mine(1001, dtype)
            dist.all_reduce(tensor, op)
            assert_is(tensor, fold(torch.stack(everyone(1001, dtype))))
    tensor = mine(1001, torch.float64)
    dist.all_reduce(tensor)
    assert_is(tensor, sum(everyone(1001, torch.float64)))
    flat = mine(5001)
    dist.all_reduce(flat[1:])  # not aligned
    assert_is(flat[1:], sum(everyone(5001))[1:])
    parts = [torch.empty(3 + rank, device=DEVICE) for rank in range(SIZE)]
    dist.all_gather(parts, mine(3 + RANK))
    for rank, part in enumerate(parts):
        assert_is(part, values(rank, 3 + rank))
    output = torch.empty(7, device=DEVICE)
    dist.reduce_scatter(output, list(mine(7 * SIZE).split(7)))
    assert_is(output, sum(everyone(7 * SIZE))[7 * RANK : 7 * RANK + 7])
    premul = dist._make_nccl_premul_sum(0.25)
    dist.reduce_scatter_tensor(output, mine(7 * SIZE), premul)
    assert_is(output, sum(everyone(7 * SIZE))[7 * RANK : 7 * RANK + 7] * 0.25)
    found = [None] * SIZE
    dist.all_gather_object(found, RANK)
    assert found == list(range(SIZE))


@check
def messages_and_blocks_from_all_to_all():
    """By NCCL, beside what Paceline carries; two ranks may be the first to use their group."""
    group = dist.new_group()
    if RANK == 0:
        dist.send(mine(7), SIZE - 1, group=group)
    elif RANK == SIZE - 1:
        received = torch.zeros(7, device=DEVICE)
        dist.recv(received, 0, group=group)
        assert_is(received, values(0, 7))
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for salt, count in enumerate((1, 4097, 300_007)):
        sums = [mine(count, salt=salt) for _ in range(2)]
        works = [dist.all_reduce(sums[0], async_op=True)]
        forward, backward = (torch.zeros(count, device=DEVICE) for _ in range(2))
        operations = [
            dist.P2POp(dist.isend, mine(count, salt=salt), right),
            dist.P2POp(dist.irecv, backward, right),
            dist.P2POp(dist.isend, mine(count, salt=salt + 10), left),
            dist.P2POp(dist.irecv, forward, left),
        ]
        works += dist.batch_isend_irecv(operations[2:] + operations[:2] if RANK % 2 else operations)
        works.append(dist.all_reduce(sums[1], async_op=True))
        for work in works:
            work.wait()
        assert_is(forward, values(left, count, salt=salt))
        assert_is(backward, values(right, count, salt=salt + 10))
        for tensor in sums:
            assert_is(tensor, sum(everyone(count, salt=salt)))
        even = torch.empty(count * SIZE, device=DEVICE)
        dist.all_to_all_single(even, mine(count * SIZE, salt=salt))
        assert_is(even, torch.cat([v.split(count)[RANK] for v in everyone(count * SIZE, salt=salt)]))
    rows = [[(a + 2 * b) % 3 for b in range(SIZE)] for a in range(SIZE)]  # zero rows occur
    incoming = [rows[a][RANK] for a in range(SIZE)]
    output = torch.empty(sum(incoming), device=DEVICE)
    dist.all_to_all_single(output, mine(sum(rows[RANK])), incoming, rows[RANK])
    assert_is(output, torch.cat([values(a, sum(rows[a])).split(rows[a])[RANK] for a in range(SIZE)]))
    dist.barrier()


@check
def the_host_goes_on_while_another_rank_is_late():
    dist.all_reduce(torch.ones(8, device=DEVICE))
    torch.cuda.synchronize()
    dist.barrier()
    if RANK == SIZE - 1:
        time.sleep(1.0)
    started = time.monotonic()
    tensor = mine(100_000)
    dist.all_reduce(tensor)
    output = torch.empty(SIZE * 100_000, device=DEVICE)
    dist.all_gather_into_tensor(output, tensor)
    enqueued = time.monotonic() - started
    assert_is(tensor, sum(everyone(100_000)))
    assert enqueued < 0.5, f"the host was blocked for {enqueued:.2f} s"


@check
def many_in_flight_and_dropped():
    """Works that nobody waits for, and memory that is given back at once, which others then fill.

    What is given back is written over as soon as the allocator hands it out: a sum that was read too late is wrong, and
    what the path writes into such memory spoils what is there.
    """
    count, kept, others = 50_000, [], []
    ours, theirs = float(RANK + 1), [float(rank + 1) for rank in range(SIZE)]
    for turn in range(200):
        if turn % 4 < 2:
            tensor = torch.full((count,), turn * ours, device=DEVICE)
            work = dist.all_reduce(tensor, async_op=True)
            if turn % 4 == 0:
                kept.append((tensor, turn * torch.tensor([sum(theirs)])))
        elif turn % 4 == 2:
            tensor, output = torch.full((count,), turn * ours, device=DEVICE), torch.empty(SIZE, count, device=DEVICE)
            work = dist.all_gather_into_tensor(output.view(-1), tensor, async_op=True)
            kept.append((output, turn * torch.tensor(theirs)[:, None]))
        else:
            tensor, output = torch.full((SIZE * count,), turn * ours, device=DEVICE), torch.empty(count, device=DEVICE)
            work = dist.reduce_scatter_tensor(output, tensor, async_op=True)
            kept.append((output, turn * torch.tensor([sum(theirs)])))
        if turn % 5 == 0:
            work.wait()
        size = tensor.numel()
        del tensor, work
        others.append(torch.full((size,), -1.0, device=DEVICE))
    torch.cuda.synchronize()
    for index, (result, wanted) in enumerate(kept):
        assert (result == wanted.to(DEVICE)).all(), (index, result[..., 0].tolist(), wanted.tolist())
    for index, other in enumerate(others):
        assert (other == -1).all(), index
    last = mine(10)
    dist.all_reduce(last)
    assert_is(last, sum(everyone(10)))


def network(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 511), nn.Tanh(), nn.Linear(511, 511), nn.Tanh(), nn.Linear(511, 10))


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(977 * step + rank)
    return torch.randn(16, 64, generator=generator).to(dtype)


def loss_of(model, data):
    return (model(data) ** 2).mean()


def reference(optimizer=torch.optim.SGD, **arguments):
    """One process in float64."""
    model = network().double()
    stepper = optimizer(model.parameters(), **arguments)
    for step in range(STEPS):
        stepper.zero_grad()
        for rank in range(SIZE):
            (loss_of(model, batch(step, rank, torch.float64)) / SIZE).backward()
        stepper.step()
    return dict(model.named_parameters())


def train(model, stepper):
    for step in range(STEPS):
        stepper.zero_grad()
        loss_of(model, batch(step, RANK).to(DEVICE)).backward()
        stepper.step()


def assert_near(parameters, wanted, bound=2e-5):
    for name, got in parameters.items():
        error = (got.detach().cpu().double() - wanted[name]).abs().max().item()
        assert error < bound, (name, error)


def meshes():
    yield init_device_mesh("cuda", (SIZE,))
    if SLOTS > 1:
        yield init_device_mesh("cuda", (NODES, SLOTS), mesh_dim_names=("replicate", "shard"))
    else:
        yield init_device_mesh("cuda", (NODES, 1), mesh_dim_names=("replicate", "shard"))


@check
def fully_shard_in_one_and_two_dimensions():
    from torch.distributed.fsdp import fully_shard

    wanted = reference(lr=0.1, momentum=0.9)
    for mesh in meshes():
        model = network().to(DEVICE)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert_near(whole, wanted)
        for name, parameter in whole.items():
            assert_same_bits(parameter, name)
        if mesh.ndim == 2 and SLOTS > 1:
            assert not isinstance(half_of(mesh.get_group("shard"))._way, CudaCollectives), "NCCL joins a node"
            assert isinstance(half_of(mesh.get_group("replicate"))._way, CudaCollectives)


@check
def gradients_travel_as_16_bits_where_asked():
    """By compress() alone: PACELINE_CODEC, which one of the launches has, says nothing to these groups."""
    from torch.distributed.fsdp import fully_shard

    wanted = reference(lr=0.1, momentum=0.9)
    mesh = list(meshes())[-1]
    group = mesh.get_group("replicate")
    way = half_of(group).way(DEVICE)
    for codec, bytes_each, bound in (("none", 4, 2e-5), ("bf16", 2, 2e-2), ("fp16", 2, 2e-3), ("none", 4, 2e-5)):
        paceline.torch.compress(group, codec)
        model = network().to(DEVICE)
        fully_shard(model, mesh=mesh)
        before = way.path.stats()["wire_bytes"]
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        way.arrive()
        dist.barrier()  # all have all: so this rank has sent all
        sent = way.path.stats()["wire_bytes"] - before
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert_near(whole, wanted, bound)
        elements = sum(p.numel() for p in whole.values()) / SLOTS * 2 * (NODES - 1) / NODES
        assert abs(sent / (STEPS * elements * bytes_each) - 1) < 0.03, (codec, sent, STEPS * elements * bytes_each)


@check
def fsdp_of_one_and_of_hybrid_shards():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wanted = reference(lr=0.1, momentum=0.9)
    flat, grid = list(meshes())
    ways = [(ShardingStrategy.FULL_SHARD, flat), (ShardingStrategy.SHARD_GRAD_OP, flat)]
    if SLOTS > 1:
        ways.append((ShardingStrategy.HYBRID_SHARD, grid))
    for strategy, mesh in ways:
        model = FullyShardedDataParallel(
            network().to(DEVICE),
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=DEVICE,
            use_orig_params=True,
        )
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        with FullyShardedDataParallel.summon_full_params(model):
            found = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        assert_near({name.replace("_fsdp_wrapped_module.", ""): p for name, p in found.items()}, wanted)


@check
def the_optimizers_own_shards():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wanted = reference(optimizer=torch.optim.Adam, lr=1e-2)
    model = DistributedDataParallel(network().to(DEVICE), device_ids=[DEVICE.index])
    stepper = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    train(model, stepper)
    assert_near(dict(model.module.named_parameters()), wanted, 2e-4)


@check
def clipping_and_a_loss_scale():
    from torch.distributed.fsdp import fully_shard

    model = network().to(DEVICE)
    fully_shard(model)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    for step in range(4):
        stepper.zero_grad()
        scaler.scale(loss_of(model, batch(step, RANK).to(DEVICE))).backward()
        scaler.unscale_(stepper)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm.full_tensor())
        scaler.step(stepper)
        scaler.update()
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.full_tensor(), name)


@check
def ended_and_made_again():
    ports = keep_ports(2)
    for _ in range(2):
        dist.destroy_process_group()
        next(ports)
        dist.init_process_group("cpu:paceline,cuda:paceline")
        tensor = mine(100)
        dist.all_reduce(tensor)
        assert_is(tensor, sum(everyone(100)))


run()
