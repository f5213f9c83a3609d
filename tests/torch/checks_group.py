"""Every collective of the process group on random data; groups, objects, errors."""

import datetime
import functools
import itertools
import time

import torch
import torch.distributed as dist
from checks import check, keep_ports, run
from group_world import (
    BACKENDS,
    FLOATS,
    INTEGERS,
    MODERN,
    RANK,
    SERIAL,
    SIZE,
    assert_same_everywhere,
    assert_sum,
    data,
    everyone,
    raises,
)

import paceline


@check
def sums_of_all_dtypes():
    for dtype, shape in itertools.product(FLOATS + INTEGERS, [(7,), (3, 5), (1000,), ()]):
        salt = next(SERIAL)
        tensor = data(RANK, shape, dtype, salt)
        dist.all_reduce(tensor)
        assert_sum(tensor, everyone(shape, dtype, salt), dtype)
        assert_same_everywhere(tensor)


@check
def complex_sums():
    for dtype in (torch.complex64, torch.complex128):
        salt = next(SERIAL)
        tensor = data(RANK, (9,), dtype, salt)
        dist.all_reduce(tensor)
        assert_sum(tensor, everyone((9,), dtype, salt), dtype)


@check
def averages():
    for dtype in FLOATS:
        salt = next(SERIAL)
        tensor = data(RANK, (33,), dtype, salt)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert_sum(tensor, everyone((33,), dtype, salt), dtype, divide=SIZE)


@check
def minima_maxima_products():
    for dtype in FLOATS + INTEGERS:
        salt = next(SERIAL)
        parts = torch.stack(everyone((21,), dtype, salt)).double()
        for op, exact in ((dist.ReduceOp.MIN, parts.amin(0)), (dist.ReduceOp.MAX, parts.amax(0))):
            tensor = data(RANK, (21,), dtype, salt)
            dist.all_reduce(tensor, op=op)
            assert torch.equal(tensor.double(), exact)
    for dtype in (torch.float64, torch.int64):
        salt = next(SERIAL)
        tensor = data(RANK, (21,), dtype, salt)
        dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT)
        exact = torch.stack(everyone((21,), dtype, salt)).prod(0)
        torch.testing.assert_close(tensor, exact, rtol=1e-14, atol=0)


@check
def booleans():
    some = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    for op, fold in (*((op, torch.logical_or) for op in some), (dist.ReduceOp.MIN, torch.logical_and)):
        salt = next(SERIAL)
        tensor = data(RANK, (40,), torch.bool, salt)
        dist.all_reduce(tensor, op=op)
        parts = everyone((40,), torch.bool, salt)
        exact = parts[0]
        for part in parts[1:]:
            exact = fold(exact, part)
        assert torch.equal(tensor, exact)


@check
def bitwise():
    for op, fold in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        salt = next(SERIAL)
        tensor = data(RANK, (17,), torch.int32, salt)
        dist.all_reduce(tensor, op=op)
        parts = everyone((17,), torch.int32, salt)
        exact = parts[0]
        for part in parts[1:]:
            exact = fold(exact, part)
        assert torch.equal(tensor, exact)
    raises(paceline.UnsupportedError, "integers", lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))


@check
def premultiplied_sum():
    salt = next(SERIAL)
    tensor = data(RANK, (17,), torch.float64, salt)
    op = torch._C._distributed_c10d._make_nccl_premul_sum(0.25)
    if MODERN:
        dist.all_reduce(tensor, op=op)
        torch.testing.assert_close(tensor, sum(everyone((17,), torch.float64, salt)) * 0.25)
    else:  # this torch keeps the factor to itself
        raises(paceline.UnsupportedError, "PREMUL_SUM", lambda: dist.all_reduce(tensor, op=op))


@check
def non_contiguous_tensors():
    salt = next(SERIAL)
    parts = everyone((6, 8), torch.float64, salt)
    for view in (lambda t: t.t(), lambda t: t[::2, 1:5], lambda t: t[:, 3]):
        tensor = view(parts[RANK].clone())
        dist.all_reduce(tensor)
        torch.testing.assert_close(tensor, view(sum(parts)))
        tensor = view(parts[RANK].clone())
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, view(parts[1]))
        outputs = [view(torch.zeros(6, 8, dtype=torch.float64)) for _ in range(SIZE)]
        dist.all_gather(outputs, view(parts[RANK].clone()))
        for output, part in zip(outputs, parts):
            assert torch.equal(output, view(part))
    whole = parts[RANK].clone()
    dist.all_reduce(whole[:, 2])  # the columns beside it stay as they were
    assert torch.equal(whole[:, :2], parts[RANK][:, :2]) and torch.equal(whole[:, 3:], parts[RANK][:, 3:])


@check
def views_that_need_grad():
    salt = next(SERIAL)
    tensor = data(RANK, (3,), salt=salt).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(tensor)
    assert tensor.requires_grad
    assert_sum(tensor.detach(), everyone((3,), salt=salt), torch.float32)


@check
def empty_tensors():
    tensor = torch.empty(0)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    outputs = [torch.empty(0, 3) for _ in range(SIZE)]
    dist.all_gather(outputs, torch.empty(0, 3))
    dist.all_to_all_single(torch.empty(0), torch.empty(0), [0] * SIZE, [0] * SIZE)
    assert tensor.numel() == 0


@check
def large_tensors():
    salt = next(SERIAL)
    tensor = data(RANK, (700_001,), torch.float32, salt)
    dist.all_reduce(tensor)
    assert_sum(tensor, everyone((700_001,), torch.float32, salt), torch.float32)


@check
def broadcasts_of_any_dtype():
    dtypes = FLOATS + INTEGERS + [torch.bool, torch.complex64]
    for root, dtype in itertools.product((0, SIZE - 1), dtypes):
        salt = next(SERIAL)
        tensor = data(RANK, (4, 3), dtype, salt)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, data(root, (4, 3), dtype, salt))


@check
def gathers_with_uneven_sizes():
    for dtype in (torch.float32, torch.float16, torch.bool, torch.complex64, torch.int64):
        salt = next(SERIAL)
        outputs = [torch.zeros((r, 2), dtype=dtype) for r in range(SIZE)]
        dist.all_gather(outputs, data(RANK, (RANK, 2), dtype, salt))
        for r, output in enumerate(outputs):
            assert torch.equal(output, data(r, (r, 2), dtype, salt))


@check
def gathers_into_one_tensor():
    salt = next(SERIAL)
    output = torch.zeros(SIZE * 3, 2)
    dist.all_gather_into_tensor(output, data(RANK, (3, 2), salt=salt))
    assert torch.equal(output, torch.cat(everyone((3, 2), salt=salt)))
    stacked = torch.zeros(SIZE, 3, 2)
    dist.all_gather_into_tensor(stacked, data(RANK, (3, 2), salt=salt))
    assert torch.equal(stacked, torch.stack(everyone((3, 2), salt=salt)))


@check
def reduces_to_a_root():
    for root in range(SIZE):
        salt = next(SERIAL)
        tensor = data(RANK, (13,), torch.float64, salt)
        before = tensor.clone()
        dist.reduce(tensor, root)
        if root == RANK:
            assert_sum(tensor, everyone((13,), torch.float64, salt), torch.float64)
        else:
            assert torch.equal(tensor, before)


@check
def reduce_scatters():
    salt = next(SERIAL)
    inputs = [data(RANK, (r + 1, 2), torch.float64, salt + 100 * r) for r in range(SIZE)]
    output = torch.zeros(RANK + 1, 2, dtype=torch.float64)
    dist.reduce_scatter(output, inputs)
    exact = sum(data(r, (RANK + 1, 2), torch.float64, salt + 100 * RANK) for r in range(SIZE))
    torch.testing.assert_close(output, exact)
    salt = next(SERIAL)
    output = torch.zeros(5, dtype=torch.float64)
    dist.reduce_scatter_tensor(output, data(RANK, (5 * SIZE,), torch.float64, salt), op=dist.ReduceOp.AVG)
    exact = sum(everyone((5 * SIZE,), torch.float64, salt))[5 * RANK : 5 * RANK + 5] / SIZE
    torch.testing.assert_close(output, exact)


@check
def reduce_scatters_with_a_factor():
    if not MODERN:  # this torch keeps the factor to itself
        return
    premultiplied = torch._C._distributed_c10d._make_nccl_premul_sum
    for dtype, factor in ((torch.float64, 0.5), (torch.bfloat16, torch.tensor([0.5])), (torch.complex64, 0.5)):
        # Small whole numbers, whose halves and sums every one of these types has.
        salt = next(SERIAL)
        whole = data(RANK, (4 * SIZE,), torch.int64, salt).to(dtype)
        exact = (sum(everyone((4 * SIZE,), torch.int64, salt)).double() / 2).to(dtype)[4 * RANK : 4 * RANK + 4]
        for parts in (list(whole.chunk(SIZE)), [part.clone() for part in whole.chunk(SIZE)]):
            output = torch.zeros(4, dtype=dtype)
            dist.reduce_scatter(output, parts, op=premultiplied(factor))
            assert torch.equal(output, exact), (dtype, output)
        memory = torch.zeros(12, dtype=dtype)
        dist.reduce_scatter_tensor(memory[4:8], whole, op=premultiplied(factor))
        assert torch.equal(memory, torch.cat([torch.zeros(4, dtype=dtype), exact, torch.zeros(4, dtype=dtype)]))
    tensor, op = torch.ones(SIZE, dtype=torch.int64), premultiplied(0.5)
    output = tensor[:1].clone()
    raises(paceline.UnsupportedError, "PREMUL_SUM", lambda: dist.reduce_scatter_tensor(output, tensor, op=op))
    raises(paceline.UnsupportedError, "PREMUL_SUM", lambda: dist.all_reduce(tensor, op=op))
    raises(paceline.UnsupportedError, "PREMUL_SUM", lambda: dist.reduce(tensor, 0, op=op))


@check
def complex_numbers_have_sums_only():
    salt = next(SERIAL)
    tensor, output = data(RANK, (2 * SIZE,), torch.complex64, salt), torch.zeros(2, dtype=torch.complex64)
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        refused = functools.partial(raises, paceline.UnsupportedError, "complex64")
        refused(functools.partial(dist.reduce, tensor, 0, op=op))
        refused(functools.partial(dist.reduce_scatter_tensor, output, tensor, op=op))
        refused(functools.partial(dist.reduce_scatter, output, [output] * SIZE, op=op))
    dist.reduce_scatter_tensor(output, tensor)
    parts = everyone((2 * SIZE,), torch.complex64, salt)
    assert_sum(output, [part[2 * RANK : 2 * RANK + 2] for part in parts], torch.complex64)


@check
def negated_views_travel_as_they_read():
    """torch marks imag of a conj(): the memory holds the numbers from before."""
    if BACKENDS:  # what torch hands to those it has resolved
        return

    def marked():
        return torch._neg_view(torch.tensor([2.0, -1.0]) * (RANK + 1))

    exact = [-torch.tensor([2.0, -1.0]) * (r + 1) for r in range(SIZE)]
    tensor = marked()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(exact))
    for root in (0, 1):
        tensor = marked()
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, exact[root])
    outputs = [marked() for _ in range(SIZE)]
    dist.all_gather(outputs, marked())
    for output, part in zip(outputs, exact):
        assert torch.equal(output, part)
    tensor = marked()
    dist.reduce(tensor, 0)
    assert torch.equal(tensor, sum(exact) if RANK == 0 else exact[RANK])
    if RANK == 0:
        dist.send(marked(), 1)
    elif RANK == 1:
        tensor = marked()
        dist.recv(tensor, 0)
        assert torch.equal(tensor, exact[0])


@check
def all_to_all_of_lists():
    salt = next(SERIAL)
    inputs = [data(RANK, (r + 1, 2), torch.float32, salt + 100 * r) for r in range(SIZE)]
    outputs = [torch.zeros(RANK + 1, 2) for _ in range(SIZE)]
    dist.all_to_all(outputs, inputs)
    for r, output in enumerate(outputs):
        assert torch.equal(output, data(r, (RANK + 1, 2), torch.float32, salt + 100 * RANK))


@check
def all_to_all_with_uneven_splits():
    """Rank a sends (a + 2 b) % 3 rows to rank b; zero rows occur."""
    salt = next(SERIAL)

    def rows(a, b):
        return (a + 2 * b) % 3

    def part(a, b):
        return data(a, (rows(a, b), 3), torch.int64, salt + 100 * b)

    send, receive = [rows(RANK, b) for b in range(SIZE)], [rows(a, RANK) for a in range(SIZE)]
    output = torch.zeros(sum(receive), 3, dtype=torch.int64)
    dist.all_to_all_single(output, torch.cat([part(RANK, b) for b in range(SIZE)]), receive, send)
    assert torch.equal(output, torch.cat([part(a, RANK) for a in range(SIZE)]))
    even = torch.zeros(SIZE * 2)
    dist.all_to_all_single(even, torch.arange(SIZE * 2.0) + 100 * RANK)
    exact = torch.cat([torch.arange(SIZE * 2.0)[2 * RANK : 2 * RANK + 2] + 100 * a for a in range(SIZE)])
    assert torch.equal(even, exact)


@check
def gather_and_scatter():
    for root in (0, SIZE - 1):
        salt = next(SERIAL)
        outputs = [torch.zeros(3, 2) for _ in range(SIZE)] if root == RANK else None
        dist.gather(data(RANK, (3, 2), salt=salt), outputs, root)
        if root == RANK:
            for output, part in zip(outputs, everyone((3, 2), salt=salt)):
                assert torch.equal(output, part)
        received = torch.zeros(3, 2)
        dist.scatter(received, everyone((3, 2), salt=salt) if root == RANK else None, root)
        assert torch.equal(received, data(RANK, (3, 2), salt=salt))


@check
def barriers():
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    store, key = dist.distributed_c10d._get_default_store(), f"barrier {next(SERIAL)}"
    if RANK == SIZE - 1:
        time.sleep(0.1)  # the others would be past a barrier that is none
        store.add(key, 1)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    assert store.add(key, 0) == 1


@check
def asynchronous_operations():
    salt = next(SERIAL)
    tensors = [data(RANK, (50 + i,), torch.float64, salt + i) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success()
    for i, tensor in enumerate(tensors):
        torch.testing.assert_close(tensor, sum(everyone((50 + i,), torch.float64, salt + i)))


@check
def futures_and_callbacks():
    salt = next(SERIAL)
    tensor = data(RANK, (50,), torch.float64, salt)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    exact = sum(everyone((50,), torch.float64, salt))
    torch.testing.assert_close(doubled.wait(), 2 * exact)
    work.wait()
    torch.testing.assert_close(tensor, exact)


@check
def work_that_nobody_waits_for():
    import gc

    for _ in range(10):
        dist.all_reduce(torch.randn(10_000), async_op=True)
    gc.collect()
    dist.barrier()


@check
def objects():
    gathered = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK, "text": "ä" * RANK})
    assert gathered == [{"rank": r, "text": "ä" * r} for r in range(SIZE)]
    sent = [{"from": 1}, (1, 2), None] if RANK == 1 else [None] * 3
    dist.broadcast_object_list(sent, 1)
    assert sent == [{"from": 1}, (1, 2), None]
    collected = [None] * SIZE if RANK == 0 else None
    dist.gather_object("x" * (RANK + 1), collected, 0)
    assert RANK or collected == ["x" * (r + 1) for r in range(SIZE)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(SIZE)] if RANK == 0 else None, 0)
    assert mine == [f"for {RANK}"]


@check
def groups():
    evens, odds = dist.new_group(list(range(0, SIZE, 2))), dist.new_group(list(range(1, SIZE, 2)))
    mine, members = (odds, range(1, SIZE, 2)) if RANK % 2 else (evens, range(0, SIZE, 2))
    for _ in range(3):
        salt = next(SERIAL)
        tensor = data(RANK, (8,), torch.float64, salt)
        dist.all_reduce(tensor, group=mine)
        torch.testing.assert_close(tensor, sum(data(r, (8,), torch.float64, salt) for r in members))
    root = max(members)
    salt = next(SERIAL)
    tensor = data(RANK, (20,), salt=salt)
    dist.broadcast(tensor, root, group=mine)
    assert torch.equal(tensor, data(root, (20,), salt=salt))
    assert dist.get_rank(mine) == list(members).index(RANK)
    gathered = [None] * len(members)
    dist.all_gather_object(gathered, RANK, group=mine)
    assert gathered == list(members)
    everyone_again = dist.new_group(list(range(SIZE)))
    salt = next(SERIAL)
    tensor = data(RANK, (20,), salt=salt)
    dist.all_reduce(tensor, group=everyone_again)
    assert_sum(tensor, everyone((20,), salt=salt), torch.float32)
    dist.destroy_process_group(everyone_again)


@check
def operations_on_two_groups_interleave():
    first, second = dist.new_group(list(range(SIZE))), dist.new_group(list(range(SIZE)))
    salts = [next(SERIAL) for _ in range(8)]
    tensors = [data(RANK, (100,), salt=salt) for salt in salts]
    mine = {}
    for i in range(0, 8, 2):  # each group's operations come in one order on all ranks; the groups' orders differ
        pair = [(first, i), (second, i + 1)]
        for group, j in pair if RANK % 2 else reversed(pair):
            mine[j] = dist.all_reduce(tensors[j], group=group, async_op=True)
    for work in mine.values():
        work.wait()
    for salt, tensor in zip(salts, tensors):
        assert_sum(tensor, everyone((100,), salt=salt), torch.float32)


@check
def a_group_in_a_job_whose_ranks_have_a_device():
    """As in `init_process_group("nccl", device_id=…)`, from where on torch asks every backend what it can do."""
    if not MODERN:
        return
    group = dist.new_group(backend="cpu:paceline,cuda:paceline", device_id=torch.device("cuda", 0))
    salt = next(SERIAL)
    tensor = data(RANK, (100,), salt=salt)
    dist.all_reduce(tensor, group=group)
    assert_sum(tensor, everyone((100,), salt=salt), torch.float32)


@check
def coalesced_operations():
    salt, shapes = next(SERIAL), ((3,), (2, 2))
    tensors = [data(RANK, shape, salt=salt) for shape in shapes]
    dist.all_reduce_coalesced(tensors)
    for tensor, shape in zip(tensors, shapes):
        assert_sum(tensor, everyone(shape, salt=salt), torch.float32)
    rows = [[torch.zeros(2), torch.zeros(3)] for _ in range(SIZE)]
    dist.all_gather_coalesced(rows, [data(RANK, (2,), salt=salt), data(RANK, (3,), salt=salt)])
    for r, row in enumerate(rows):
        assert all(torch.equal(part, data(r, part.shape, salt=salt)) for part in row)
    raises(RuntimeError, "got 2 and 1", lambda: dist.all_gather_coalesced(rows, [torch.zeros(2)]))
    if not MODERN:
        return
    tensors = [data(RANK, shape, salt=salt) for shape in shapes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, shape in zip(tensors, shapes):
        assert_sum(tensor, everyone(shape, salt=salt), torch.float32)
    outputs = [torch.zeros(SIZE * 2), torch.zeros(SIZE * 3)]
    with dist._coalescing_manager():
        for n, output in zip((2, 3), outputs):
            dist.all_gather_into_tensor(output, data(RANK, (n,), salt=salt))
    for n, output in zip((2, 3), outputs):
        assert torch.equal(output, torch.cat(everyone((n,), salt=salt)))
    scattered = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for output in scattered:
            dist.reduce_scatter_tensor(output, data(RANK, (output.numel() * SIZE,), salt=salt))
    for n, output in zip((2, 3), scattered):
        parts = [part[n * RANK : n * RANK + n] for part in everyone((n * SIZE,), salt=salt)]
        assert_sum(output, parts, torch.float32)


@check
def wrong_sizes_are_refused_here():
    raises(
        paceline.InvalidArgumentError,
        f"all_gather's output list has {SIZE - 1} tensors, the group {SIZE} ranks",
        lambda: dist.all_gather([torch.zeros(2)] * (SIZE - 1), torch.zeros(2)),
    )
    group = dist.distributed_c10d._get_default_group()
    opts = torch._C._distributed_c10d.AllToAllOptions()
    wrong = [1] * SIZE
    method = getattr(group, "all_to_all_single", None) or group.alltoall_base
    raises(
        paceline.InvalidArgumentError,
        "split sizes",
        lambda: method(torch.zeros(SIZE), torch.zeros(SIZE + 1), wrong, wrong, opts),
    )
    # Rows of other lengths: what a rank sends itself would not fit.
    raises(
        paceline.InvalidArgumentError,
        "sends itself 3 elements and expects 2",
        lambda: dist.all_to_all_single(torch.zeros(SIZE, 2), torch.zeros(SIZE, 3)),
    )


@check
def dtypes_that_dont_reduce_are_named():
    if hasattr(torch, "float8_e4m3fn"):
        eight = torch.ones(4).to(torch.float8_e4m3fn)
        raises(paceline.UnsupportedError, "float8", lambda: dist.all_reduce(eight))
        dist.broadcast(eight, 0)  # moving them is fine


@check
def sparse_sums():
    salt = next(SERIAL)

    def of(rank):
        indices = torch.tensor([[rank, rank + 1, 0]])
        return torch.sparse_coo_tensor(indices, data(rank, (3, 2), salt=salt), (SIZE + 1, 2))

    sparse = of(RANK)
    dist.all_reduce(sparse)
    exact = sum(of(r).double().to_dense() for r in range(SIZE))
    torch.testing.assert_close(sparse.to_dense().double(), exact, rtol=1e-5, atol=1e-5)


@check
def a_rank_without_the_gpu_path_says_so():
    from paceline._torch.dtypes import require_cpu

    raises(paceline.UnsupportedError, "cpu:paceline,meta:nccl", lambda: require_cpu([torch.empty(1, device="meta")]))


@check
def coalesced_into_tensor_forms_stand_ready():
    """1.13 has none: its Python front end never calls them."""
    group = dist.distributed_c10d._get_default_group()
    if not MODERN:
        salt = next(SERIAL)
        outputs = [torch.zeros(SIZE), torch.zeros(2 * SIZE)]
        opts = torch._C._distributed_c10d.AllgatherOptions()
        inputs = [data(RANK, (n,), salt=salt) for n in (1, 2)]
        group.allgather_into_tensor_coalesced(outputs, inputs, opts).wait()
        assert all(torch.equal(outputs[n - 1], torch.cat(everyone((n,), salt=salt))) for n in (1, 2))


@check
def destroyed_and_made_again():
    ports = keep_ports(1)
    dist.destroy_process_group()
    next(ports)
    dist.init_process_group("paceline", timeout=datetime.timedelta(seconds=60))
    salt = next(SERIAL)
    tensor = data(RANK, (20,), salt=salt)
    dist.all_reduce(tensor)
    assert_sum(tensor, everyone((20,), salt=salt), torch.float32)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
