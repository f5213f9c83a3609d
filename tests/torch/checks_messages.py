"""Messages between two ranks of the process group, one by one and in batches."""

import torch
import torch.distributed as dist
from checks import check, run
from group_world import MODERN, RANK, SERIAL, SIZE, assert_sum, data, everyone, raises

import paceline


@check
def point_to_point():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    salt = next(SERIAL)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor, received = data(RANK, (5, 2), dtype, salt), torch.zeros(5, 2, dtype=dtype)
        send, receive = dist.isend(tensor, right), dist.irecv(received, left)
        receive.wait()
        send.wait()
        assert torch.equal(received, data(left, (5, 2), dtype, salt))
    if RANK == 0:
        dist.send(torch.arange(6.0).view(2, 3).t(), 1)
    elif RANK == 1:
        whole = torch.zeros(3, 4)
        dist.recv(whole[:, ::2], 0)
        assert torch.equal(whole[:, ::2], torch.arange(6.0).view(2, 3).t())


@check
def tags_keep_messages_apart():
    salt = next(SERIAL)
    if RANK == 0:
        works = [dist.isend(data(RANK, (3,), salt=salt + tag), 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    elif RANK == 1:
        for tag in (7, 5, 6):
            received = torch.zeros(3)
            dist.recv(received, 0, tag=tag)
            assert torch.equal(received, data(0, (3,), salt=salt + tag))


@check
def batches_of_point_to_point():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    received, salt = torch.zeros(4), next(SERIAL)
    operations = [
        dist.P2POp(dist.isend, data(RANK, (4,), salt=salt), right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, data(left, (4,), salt=salt))


@check
def works_of_a_batch_wait_for_it():
    """Each Work of a batch can be waited for, in any order; one dropped in it does not disturb the others."""
    backend = _backend_of_world()
    opts = torch._C._distributed_c10d.AllreduceOptions()
    several = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    for way in ("wait", "get_future", "whole"):
        salts = [next(SERIAL) for _ in range(5)]
        tensors = [data(RANK, (50,), salt=salt) for salt in salts]
        backend.start_coalescing()
        first = backend.allreduce(tensors[:1], opts)
        backend.allreduce(tensors[1:2], opts)
        pair = backend.allreduce_coalesced(tensors[2:4], several)
        last = backend.allreduce(tensors[4:], opts)
        whole = backend.end_coalescing()
        if way == "wait":
            for work in (last, pair, first):
                work.wait()
                assert work.is_completed() and work.is_success() and work.exception() is None
        elif way == "get_future":
            assert first.get_future().wait()[0].data_ptr() == tensors[0].data_ptr()
            assert len(pair.get_future().wait()) == 2
        else:
            whole.wait()
        for salt, tensor in zip(salts, tensors):
            assert_sum(tensor, everyone((50,), salt=salt), torch.float32)


def _backend_of_world():
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")) if MODERN else group


@check
def large_batches_of_point_to_point():
    """Beyond what travels eagerly: every Work must have been waited for itself, whatever the order."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    salt = next(SERIAL)
    sent = [data(RANK, (200_000 + i,), salt=salt + i) for i in range(3)]
    received = [torch.zeros(200_000 + i) for i in range(3)]
    operations = [dist.P2POp(dist.irecv, t, left, tag=i) for i, t in enumerate(received)]
    operations += [dist.P2POp(dist.isend, t, right, tag=i) for i, t in enumerate(sent)]
    for work in reversed(dist.batch_isend_irecv(operations)):
        work.wait()
    for i, tensor in enumerate(received):
        assert torch.equal(tensor, data(left, (200_000 + i,), salt=salt + i))


@check
def receiving_from_anyone_is_a_named_error():
    raises(paceline.UnsupportedError, "name the source", lambda: dist.recv(torch.zeros(1)))


if __name__ == "__main__":
    run()
