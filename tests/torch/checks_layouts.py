"""Reductions other than sums where ranks get a part or one gets all; tensors that do not lie in one piece; meshes."""

import torch
import torch.distributed as dist
from checks import check, run
from group_world import FLOATS, INTEGERS, MODERN, RANK, SERIAL, SIZE, assert_sum, data, everyone

FOLDS = {
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
}
#: Of random numbers below 11 in every type, the product of four fits into these, and is right to the last bits.
OF_PRODUCTS = [torch.float64, torch.int32, torch.int64]


def cases():
    """(type, operation, its fold over stacked parts, tolerance)."""
    for op, fold in FOLDS.items():
        for dtype in OF_PRODUCTS if op == dist.ReduceOp.PRODUCT else FLOATS + INTEGERS:
            yield dtype, op, fold, 1e-14 if op == dist.ReduceOp.PRODUCT and dtype.is_floating_point else 0


def expect(tensor, exact, tolerance):
    torch.testing.assert_close(tensor, exact.to(tensor.dtype), rtol=tolerance, atol=0)


@check
def reduces_to_a_root_by_every_operation():
    for number, (dtype, op, fold, tolerance) in enumerate(cases()):
        salt, root = next(SERIAL), number % SIZE
        tensor = data(RANK, (5, 7), dtype, salt)
        dist.reduce(tensor, root, op=op)
        parts = everyone((5, 7), dtype, salt)
        if root == RANK:
            expect(tensor, fold(torch.stack(parts)), tolerance)
        else:
            assert torch.equal(tensor, parts[RANK])


@check
def reduce_scatters_by_every_operation():
    for dtype, op, fold, tolerance in cases():
        salt = next(SERIAL)
        exact = fold(torch.stack(everyone((3 * SIZE, 2), dtype, salt)))[3 * RANK : 3 * RANK + 3]
        output = torch.zeros(3, 2, dtype=dtype)
        dist.reduce_scatter_tensor(output, data(RANK, (3 * SIZE, 2), dtype, salt), op=op)
        expect(output, exact, tolerance)
        output = torch.zeros(3, 2, dtype=dtype)
        dist.reduce_scatter(output, list(data(RANK, (3 * SIZE, 2), dtype, salt).chunk(SIZE)), op=op)
        expect(output, exact, tolerance)


#: What a tensor of [4, 6] may be in one that is larger: what lies between its elements must stay as it was.
VIEWS = {
    "transposed": ((6, 4), lambda whole: whole.t()),
    "every other column": ((4, 12), lambda whole: whole[:, ::2]),
    "a block": ((8, 9), lambda whole: whole[2:6, 1:7]),
    "every other row, transposed": ((12, 4), lambda whole: whole[::2].t()),
}


class Lying:
    """Tensors of [4, 6], each a view of its own part of one memory (side by side, where it has no gaps) of sevens."""

    def __init__(self, way, dtype=torch.float64):
        shape, self._view = VIEWS[way]
        self._memory = torch.full((3 * SIZE, *shape), 7, dtype=dtype)
        self._used = 0

    def empty(self):
        self._used += 1
        return self._view(self._memory[self._used - 1])

    def of(self, values):
        tensor = self.empty()
        assert not tensor.is_contiguous()
        tensor.copy_(values)
        return tensor

    def assert_nothing_else_was_written(self):
        for whole in self._memory[: self._used]:
            self._view(whole).fill_(7)
        assert bool((self._memory == 7).all())


def numbers(rank, salt, to=0):
    """What `rank` has for the rank `to`."""
    return data(rank, (4, 6), torch.float64, salt + 100 * to)


@check
def what_does_not_lie_in_one_piece_is_scattered_and_gathered():
    for way in VIEWS:
        for root in (0, SIZE - 1):
            salt, lying = next(SERIAL), Lying(way)
            outputs = [lying.empty() for _ in range(SIZE)] if root == RANK else None
            dist.gather(lying.of(numbers(RANK, salt)), outputs, root)
            for rank, output in enumerate(outputs or []):
                assert torch.equal(output, numbers(rank, salt)), way
            received = lying.empty()
            inputs = [lying.of(numbers(root, salt, to)) for to in range(SIZE)] if root == RANK else None
            dist.scatter(received, inputs, root)
            assert torch.equal(received, numbers(root, salt, RANK)), way
            lying.assert_nothing_else_was_written()


@check
def what_does_not_lie_in_one_piece_is_reduced_and_scattered():
    for way in VIEWS:
        salt, lying = next(SERIAL), Lying(way)
        output = lying.empty()
        dist.reduce_scatter(output, [lying.of(numbers(RANK, salt, to)) for to in range(SIZE)])
        assert_sum(output, [numbers(rank, salt, RANK) for rank in range(SIZE)], torch.float64)
        output = lying.empty()
        whole = torch.cat([numbers(RANK, salt, to) for to in range(SIZE)])
        dist.reduce_scatter_tensor(output, torch.stack([whole, whole], -1)[..., 1])
        assert_sum(output, [numbers(rank, salt, RANK) for rank in range(SIZE)], torch.float64)
        lying.assert_nothing_else_was_written()


@check
def what_does_not_lie_in_one_piece_goes_from_all_to_all():
    for way in VIEWS:
        salt, lying = next(SERIAL), Lying(way)
        outputs = [lying.empty() for _ in range(SIZE)]
        dist.all_to_all(outputs, [lying.of(numbers(RANK, salt, to)) for to in range(SIZE)])
        for rank, output in enumerate(outputs):
            assert torch.equal(output, numbers(rank, salt, RANK)), way
        lying.assert_nothing_else_was_written()
    salt = next(SERIAL)
    whole = torch.full((2 * SIZE, 6), 7.0, dtype=torch.float64)
    columns = torch.stack([data(RANK, (2 * SIZE, 3), torch.float64, salt)] * 2, -1)[..., 0]
    assert not columns.is_contiguous()
    dist.all_to_all_single(whole[:, ::2], columns)
    parts = [part[2 * RANK : 2 * RANK + 2] for part in everyone((2 * SIZE, 3), torch.float64, salt)]
    assert torch.equal(whole[:, ::2], torch.cat(parts)) and bool((whole[:, 1::2] == 7).all())


@check
def what_does_not_lie_in_one_piece_is_reduced_to_a_root():
    for way in VIEWS:
        salt, lying = next(SERIAL), Lying(way)
        tensor = lying.of(numbers(RANK, salt))
        dist.reduce(tensor, SIZE - 1)
        if RANK == SIZE - 1:
            assert_sum(tensor, [numbers(rank, salt) for rank in range(SIZE)], torch.float64)
        else:
            assert torch.equal(tensor, numbers(RANK, salt))
        lying.assert_nothing_else_was_written()


@check
def lists_of_objects_from_one_to_another():
    sent = [{"from": 0, "numbers": list(range(5000))}, "ä" * 300, None, (RANK,)]
    if not hasattr(dist, "send_object_list"):  # older than torch 2.5
        return
    if RANK == 0:
        dist.send_object_list(sent, 1)
    elif RANK == 1:
        received = [None] * 4
        assert dist.recv_object_list(received, 0) == 0
        assert received == [*sent[:3], (0,)]
    received = ["what was there"]
    if RANK == SIZE - 1:
        dist.send_object_list([RANK], 0)
    elif RANK == 0:
        dist.recv_object_list(received, SIZE - 1)
        assert received == [SIZE - 1]


@check
def each_dimension_of_a_mesh():
    if not MODERN:
        return
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("row", "column"))
    row, column = divmod(RANK, SIZE // 2)
    lines = {"row": [column, column + SIZE // 2], "column": list(range(row * (SIZE // 2), (row + 1) * (SIZE // 2)))}
    for name, members in lines.items():
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == members
        assert "paceline" in dist.get_backend(group)
        salt = next(SERIAL)
        tensor = data(RANK, (1000,), salt=salt)
        dist.all_reduce(tensor, group=group)
        assert_sum(tensor, [data(rank, (1000,), salt=salt) for rank in members], torch.float32)
        work = dist.all_reduce(whole := data(RANK, (30,), torch.float64, salt), group=group, async_op=True)
        work.wait()
        assert_sum(whole, [data(rank, (30,), torch.float64, salt) for rank in members], torch.float64)
    # One after the other they are the whole world's.
    salt = next(SERIAL)
    tensor = data(RANK, (64,), torch.int64, salt)
    for name in lines:
        dist.all_reduce(tensor, group=mesh.get_group(name))
    assert_sum(tensor, everyone((64,), torch.int64, salt), torch.int64)


if __name__ == "__main__":
    run()
