"""The CUDA half of the process group, CPU tensors in the GPU's place (cuda_stand_in.py): methods, torch's sharders."""

import copy
import datetime
import time
import warnings

import cuda_stand_in
import torch
import torch.distributed as dist
from checks import check, keep_ports, run
from torch import nn
from words import hear, tell

from paceline._torch import backend

cuda_stand_in.install()
backend.register()
dist.init_process_group("paceline")

import paceline.torch  # noqa: E402
from paceline.errors import InvalidArgumentError, PeerLostError, TimeoutError, UnsupportedError  # noqa: E402

RANK, SIZE = dist.get_rank(), dist.get_world_size()
WORLD = dist.distributed_c10d._get_default_group()
PORTS = keep_ports(2)  # now: a check ends the job
ALL_TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def values(rank, count, dtype=torch.float32, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    return torch.randint(0, 9, (count,), generator=generator).to(dtype)


def everyone(count, dtype=torch.float32, salt=0):
    return [values(r, count, dtype, salt) for r in range(SIZE)]


def raises(kind, part, function):
    try:
        function()
    except kind as error:
        assert part in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def path():
    return cuda_stand_in.path_of(WORLD)


@check
def sums_of_all_dtypes_and_sizes():
    for salt, dtype in enumerate(ALL_TYPES[:-1]):
        for count in (0, 1, 33, 1000):
            tensor = values(RANK, count, dtype, salt)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, sum(everyone(count, dtype, salt), torch.zeros(count, dtype=dtype)))
    assert path().calls[-1][0] == 2  # uint8 was gathered and folded


@check
def every_reduction():
    for op, fold in (
        (dist.ReduceOp.MIN, lambda parts: parts.amin(0)),
        (dist.ReduceOp.MAX, lambda parts: parts.amax(0)),
        (dist.ReduceOp.PRODUCT, lambda parts: parts.prod(0)),
    ):
        for dtype in (torch.float32, torch.float64, torch.int64):
            tensor = values(RANK, 21, dtype)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, fold(torch.stack(everyone(21, dtype)))), op
    for op, fold in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BXOR, torch.bitwise_xor)):
        tensor = values(RANK, 21, torch.int64)
        dist.all_reduce(tensor, op)
        parts = everyone(21, torch.int64)
        total = parts[0]
        for part in parts[1:]:
            total = fold(total, part)
        assert torch.equal(tensor, total)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = values(RANK, 16, dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        exact = torch.stack(everyone(16, dtype)).double().mean(0)
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=0.05)
    tensor = values(RANK, 16, torch.bool)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.stack(everyone(16, torch.bool)).any(0))


@check
def a_factor_before_the_sum():
    premul = getattr(dist, "_make_nccl_premul_sum", None)
    if premul is None:
        return
    for factor in (0.25, torch.tensor([0.25])):
        tensor = values(RANK, 40)
        dist.all_reduce(tensor, premul(factor))
        assert torch.equal(tensor, sum(everyone(40)) * 0.25)
        source, output = values(RANK, 8 * SIZE), torch.empty(8)
        before = source.clone()
        dist.reduce_scatter_tensor(output, source, premul(factor))
        assert torch.equal(output, sum(everyone(8 * SIZE))[8 * RANK : 8 * RANK + 8] * 0.25)
        assert torch.equal(source, before), "the input was changed"


@check
def views_and_strides():
    wide = values(RANK, 60).reshape(6, 10)
    dist.all_reduce(wide.t())
    assert torch.equal(wide, sum(everyone(60)).reshape(6, 10))
    flat = values(RANK, 33, salt=1)
    dist.all_reduce(flat[1:])  # not aligned
    assert torch.equal(flat, torch.cat([values(RANK, 33, salt=1)[:1], sum(everyone(33, salt=1))[1:]]))
    whole = torch.zeros(SIZE, 7)
    dist.all_gather_into_tensor(whole, values(RANK, 14)[::2])
    assert torch.equal(whole, torch.stack([part[::2] for part in everyone(14)]))
    around = values(RANK, SIZE * 28, salt=2).reshape(SIZE * 2, 14)
    before = around.clone()
    dist.broadcast(around[:, ::2], 1)
    assert torch.equal(around[:, ::2], values(1, SIZE * 28, salt=2).reshape(SIZE * 2, 14)[:, ::2])
    assert torch.equal(around[:, 1::2], before[:, 1::2]), "the columns between them stay as they were"


@check
def gathers():
    for dtype in [*ALL_TYPES, torch.complex64]:
        output = torch.empty(SIZE * 9, dtype=dtype)
        dist.all_gather_into_tensor(output, values(RANK, 9, dtype))
        assert torch.equal(output, torch.cat(everyone(9, dtype)))
        parts = [torch.empty(9, dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(parts, values(RANK, 9, dtype))
        assert all(torch.equal(a, b) for a, b in zip(parts, everyone(9, dtype)))
    parts = [torch.empty(3 + r) for r in range(SIZE)]
    dist.all_gather(parts, values(RANK, 3 + RANK))
    assert all(torch.equal(part, values(r, 3 + r)) for r, part in enumerate(parts))
    whole = torch.empty(SIZE * 4)
    whole[RANK * 4 : RANK * 4 + 4] = values(RANK, 4)
    dist.all_gather_into_tensor(whole, whole[RANK * 4 : RANK * 4 + 4])
    assert torch.equal(whole, torch.cat(everyone(4)))


@check
def reduce_scatters():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        output = torch.empty(6, dtype=dtype)
        dist.reduce_scatter_tensor(output, values(RANK, 6 * SIZE, dtype))
        wanted = sum(everyone(6 * SIZE, dtype))[6 * RANK : 6 * RANK + 6]
        assert torch.equal(output, wanted)
        dist.reduce_scatter(output, list(values(RANK, 6 * SIZE, dtype).split(6)))
        assert torch.equal(output, wanted)
    sizes = [3 + r for r in range(SIZE)]
    output = torch.empty(sizes[RANK])
    dist.reduce_scatter(output, list(values(RANK, sum(sizes)).split(sizes)))
    assert torch.equal(output, sum(everyone(sum(sizes))).split(sizes)[RANK])
    output = torch.empty(6)
    dist.reduce_scatter_tensor(output, values(RANK, 6 * SIZE), dist.ReduceOp.MAX)
    assert torch.equal(output, torch.stack(everyone(6 * SIZE)).amax(0)[6 * RANK : 6 * RANK + 6])


@check
def from_and_to_one_rank():
    for root in range(SIZE):
        tensor = values(RANK, 12, salt=root)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, values(root, 12, salt=root))
        tensor = values(RANK, 12)
        dist.reduce(tensor, root)
        assert torch.equal(tensor, sum(everyone(12)) if root == RANK else values(RANK, 12))
        parts = [torch.empty(5) for _ in range(SIZE)] if root == RANK else None
        dist.gather(values(RANK, 5), parts, root)
        if root == RANK:
            assert all(torch.equal(a, b) for a, b in zip(parts, everyone(5)))
        output = torch.empty(5)
        dist.scatter(output, everyone(5) if root == RANK else None, root)
        assert torch.equal(output, values(RANK, 5))


@check
def works_and_futures():
    tensor = values(RANK, 10)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    assert torch.equal(future.wait()[0], sum(everyone(10)))
    work.wait()
    assert work.is_completed()
    tensors = [values(RANK, 10, salt=i) for i in range(5)]
    with dist._coalescing_manager() if hasattr(dist, "_coalescing_manager") else warnings.catch_warnings():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(everyone(10, salt=i)))
    outputs = [torch.empty(SIZE * 3) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager():
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, values(RANK, 3, salt=i))
    for i, output in enumerate(outputs):
        assert torch.equal(output, torch.cat(everyone(3, salt=i)))


@check
def nothing_to_carry_has_ended():
    """Of no tensors there is nothing to wait for; what has no counterpart is named instead of left as it was."""
    backend = WORLD._get_backend(torch.device("cpu"))
    way = backend.paceline_cuda.way(torch.device("cpu"))
    some = [torch.empty(SIZE)]
    for carrier in (way, backend):
        calls = len(path().calls)
        works = [
            carrier.allreduce_coalesced([]),
            carrier.allgather_coalesced([[]] * SIZE, []),
            carrier.all_gather_single_coalesced([], []),
            carrier.reduce_scatter_single_coalesced([], []),
        ]
        for work in works:
            assert work.is_completed() and work.wait() and work.result() == [], carrier
        assert len(path().calls) == calls
        raises(InvalidArgumentError, "got 1 and 0", lambda on=carrier: on.allgather_coalesced([some] * SIZE, []))
        raises(InvalidArgumentError, "got 1 and 0", lambda on=carrier: on.all_gather_single_coalesced(some, []))
        raises(InvalidArgumentError, "got 0 and 1", lambda on=carrier: on.reduce_scatter_single_coalesced([], some))
    tensor = values(RANK, 9)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(everyone(9)))


@check
def memory_is_held_until_someone_waits():
    way = WORLD._get_backend(torch.device("cpu")).paceline_cuda.way(torch.device("cpu"))
    before = way._streams.outlived
    work = way.allreduce([values(RANK, 10)])
    assert len(work._held) == 2
    work.wait()
    assert work._held == ()
    del work
    assert way._streams.outlived == before
    work = way.allreduce([values(RANK, 10)])
    del work
    assert way._streams.outlived == before + 2, "dropped without a wait: the allocator was not told"


@check
def objects_and_barriers():
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": r} for r in range(SIZE)]
    dist.barrier()


@check
def groups_of_ranks():
    for ranks in ([0, SIZE - 1], list(range(SIZE))):
        group = dist.new_group(ranks)
        if RANK not in ranks:
            continue
        tensor = values(RANK, 9)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, sum(values(r, 9) for r in ranks))
        dist.broadcast(tensor, ranks[-1], group=group)
        assert cuda_stand_in.path_of(group).size == len(ranks)


def exchangers(group=WORLD):
    """What was made for exchanges of a group: {its last name in the store: it}."""
    half = group._get_backend(torch.device("cpu")).paceline_cuda
    return half._exchanges._made


def two_talk(group, sender, receiver):
    """By ranks of the job."""
    if sender == RANK:
        dist.send(values(RANK, 7), receiver, group=group, tag=5)
    elif receiver == RANK:
        received = torch.zeros(7)
        dist.recv(received, sender, group=group, tag=5)
        assert torch.equal(received, values(sender, 7))


@check
def two_ranks_talk_and_nobody_else_is_asked():
    """In a group that has carried nothing else, too: its way is decided by all ranks, and only two of them call."""
    group = dist.new_group()
    two_talk(group, SIZE - 1, 0)
    assert sorted(exchangers(group)) == ([f"000000-{SIZE - 1:06}"] if RANK in (0, SIZE - 1) else [])
    two_talk(group, 0, SIZE - 1)
    assert len(exchangers(group)) <= 1, "the way back is another one"
    dist.barrier()
    tensor = values(RANK, 9)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, sum(everyone(9)))


@check
def messages_keep_their_order():
    other = RANK ^ 1
    sent = [values(RANK, 40, dtype, salt) for salt, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64))]
    received = [torch.zeros_like(tensor) for tensor in sent]
    works = [dist.isend(tensor, other) for tensor in sent] + [dist.irecv(tensor, other) for tensor in received]
    for work in works:
        work.wait()
    for salt, tensor in enumerate(received):
        assert torch.equal(tensor, values(other, 40, tensor.dtype, salt))


@check
def a_batch_is_one_launch_for_each_pair():
    """Between neighbours both ways at once, in any order; ranks that the batch does not name stay away."""
    for ranks in (range(SIZE), range(2)):
        if RANK not in ranks:
            continue
        right, left = (RANK + 1) % len(ranks), (RANK - 1) % len(ranks)
        forward, backward = torch.zeros(30), torch.zeros(50)
        operations = [
            dist.P2POp(dist.isend, values(RANK, 30), right),
            dist.P2POp(dist.irecv, backward, right),
            dist.P2POp(dist.isend, values(RANK, 50, salt=1), left),
            dist.P2POp(dist.irecv, forward, left),
        ]
        if RANK % 2:
            operations = operations[2:] + operations[:2]
        before = {name: len(one.launches) for name, one in exchangers().items()}  # a pair begins with one both ways
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(forward, values(left, 30)) and torch.equal(backward, values(right, 50, salt=1))
        if torch.__version__ >= "2":
            pairs = {f"{min(RANK, peer):06}-{max(RANK, peer):06}" for peer in (left, right)}
            new = {name: one.launches[before.get(name, 1) :] for name, one in exchangers().items()}
            assert {name: n for name, n in new.items() if n} == {pair: [4 // len(pairs)] for pair in pairs}, new


@check
def blocks_from_all_to_all():
    even = torch.empty(3 * SIZE)
    dist.all_to_all_single(even, values(RANK, 3 * SIZE))
    assert torch.equal(even, torch.cat([v[3 * RANK : 3 * RANK + 3] for v in everyone(3 * SIZE)]))
    rows = [[(a + 2 * b) % 3 for b in range(SIZE)] for a in range(SIZE)]  # zero rows occur
    outgoing, incoming = rows[RANK], [rows[a][RANK] for a in range(SIZE)]
    output = torch.empty(sum(incoming), 2)
    source = values(RANK, 2 * sum(outgoing)).view(-1, 2)
    work = dist.all_to_all_single(output, source, incoming, outgoing, async_op=True)
    work.wait()
    wanted = [values(a, 2 * sum(rows[a])).view(-1, 2).split(rows[a])[RANK] for a in range(SIZE)]
    assert torch.equal(output, torch.cat(wanted))
    outputs = [torch.empty(4) for _ in range(SIZE)]
    dist.all_to_all(outputs, list(values(RANK, 4 * SIZE).split(4)))
    assert torch.equal(torch.cat(outputs), torch.cat([v[4 * RANK : 4 * RANK + 4] for v in everyone(4 * SIZE)]))
    assert exchangers()["all"].size == SIZE


@check
def what_is_not_offered_is_named():
    backend = WORLD._get_backend(torch.device("cpu"))
    for peer, said in ((RANK, "itself"), (SIZE, f"no rank {SIZE}"), (-1, "no rank -1")):
        raises(
            InvalidArgumentError,
            said,
            lambda peer=peer: backend.paceline_cuda.exchanges().batch([("send", ([torch.ones(1)], peer, 0))]),
        )
    raises(UnsupportedError, "name its source", lambda: dist.recv(torch.empty(3)))
    raises(UnsupportedError, "to_dense", lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    raises(InvalidArgumentError, "× ", lambda: dist.all_gather_into_tensor(torch.empty(SIZE + 1), torch.empty(1)))
    raises(InvalidArgumentError, "× ", lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(2 * SIZE + 1)))
    raises(
        InvalidArgumentError,
        "torch.float32 and torch.float64",
        lambda: dist.all_gather_into_tensor(torch.empty(4 * SIZE), torch.ones(2, dtype=torch.float64)),
    )
    raises(InvalidArgumentError, "codec 'int8'", lambda: paceline.torch.compress(codec="int8"))


@check
def compression_is_for_sums_of_float32_only_where_asked():
    group = dist.new_group()
    tensor = values(RANK, 9)
    dist.all_reduce(tensor, group=group)
    paceline.torch.compress(group, "bf16")
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor.bfloat16(), group=group)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * SIZE), group=group)
    dist.all_gather_into_tensor(torch.empty(9 * SIZE), tensor, group=group)
    paceline.torch.compress(group, "none")
    dist.all_reduce(tensor, group=group)
    assert [call[3] for call in cuda_stand_in.path_of(group).calls] == [0, 2, 0, 2, 0, 0]


def network(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 5))


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(977 * step + rank)
    return torch.randn(6, 13, generator=generator).to(dtype)


def loss_of(model, data):
    return (model(data) ** 2).mean()


def reference(steps=6, optimizer=torch.optim.SGD, **arguments):
    """One process in float64."""
    model = network().double()
    stepper = optimizer(model.parameters(), **arguments)
    for step in range(steps):
        stepper.zero_grad()
        for rank in range(SIZE):
            (loss_of(model, batch(step, rank, torch.float64)) / SIZE).backward()
        stepper.step()
    return model


def train(model, stepper, steps=6):
    for step in range(steps):
        stepper.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        stepper.step()


def assert_near(parameters, model):
    for (name, wanted), got in zip(model.named_parameters(), parameters):
        error = (got.double() - wanted).abs().max().item()
        assert error < 2e-5, (name, error)


@check
def fully_shard_in_one_and_two_dimensions():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wanted = reference(lr=0.1, momentum=0.9)
    meshes = [init_device_mesh("cpu", (SIZE,))]
    if SIZE % 2 == 0:
        meshes.append(init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        model = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert_near([p.full_tensor() for p in model.parameters()], wanted)


@check
def the_optimizers_own_shards():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wanted = reference(optimizer=torch.optim.Adam, lr=1e-2)
    model = DistributedDataParallel(network())
    stepper = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    train(model, stepper)
    assert_near(model.module.parameters(), wanted)


@check
def a_fault_keeps_the_parameters():
    model = copy.deepcopy(network())
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    loss_of(model, batch(0, RANK)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    dist.barrier()  # the first to fail ends the others
    cuda_stand_in.path_of(group).error = PeerLostError("rank 9 is gone")
    raises(PeerLostError, "rank 9 is gone", stepper.step)
    for was, now in zip(before, model.parameters()):
        assert torch.equal(was, now)
    raises(PeerLostError, "rank 9 is gone", lambda: dist.all_reduce(torch.ones(3), group=group))


@check
def a_wait_for_a_barrier_names_whom_it_waits_for():
    """And may be gone on with."""
    dist.barrier()
    if RANK == 1:
        hear(f"rank 0 of {SIZE} has waited for the barrier")
    work = dist.barrier(async_op=True)
    if RANK == 0:
        patience = datetime.timedelta(seconds=0.3)
        raises(TimeoutError, "within the 0.3 s given to wait(): barrier", lambda: work.wait(patience))
        whom = " waits for rank 1 " if SIZE == 2 else ", which may wait for others"
        raises(TimeoutError, whom, lambda: work.wait(patience))
        tell(f"rank 0 of {SIZE} has waited for the barrier")
    work.wait()


@check
def a_barrier_names_who_does_not_come():
    """Within its own deadline. It ends the job."""
    dist.barrier()
    if RANK == 1:
        time.sleep(5)
    started = time.monotonic()
    deadline = datetime.timedelta(seconds=2)
    raises(TimeoutError, "timed out after 2 s: rank 1 ", lambda: dist.barrier(timeout=deadline))
    assert time.monotonic() - started < 5


@check
def ended_and_made_again():
    for _ in range(2):
        dist.destroy_process_group()
        next(PORTS)
        dist.init_process_group("paceline")
        tensor = values(RANK, 10)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(everyone(10)))
        halves = dist.new_group(list(range(SIZE)))
        dist.all_reduce(tensor, group=halves)
    dist.destroy_process_group()


run()
