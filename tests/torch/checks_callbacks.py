"""What callbacks of futures may do: wait for other operations, as hooks of DDP do."""

import threading

import torch
import torch.distributed as dist
from checks import check, run
from group_world import MODERN, RANK, SERIAL, SIZE, assert_sum, data, everyone

SECONDS = 40  # for what takes one


def waited_for(future):
    """The future's value; a callback that waits in vain is a failure here, not a hang of all that follows."""
    values = []
    waiting = threading.Thread(target=lambda: values.append(future.wait()), daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    assert values, "it waits for ever"
    return values[0]


@check
def callbacks_wait_for_what_they_start():
    def again(future):
        (tensor,) = future.value()
        return dist.all_reduce(tensor, async_op=True).get_future().then(once_more).wait()

    def once_more(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    for size in (3, 300_000):
        salt = next(SERIAL)
        tensor = data(RANK, (size,), salt=salt)
        result = waited_for(dist.all_reduce(tensor, async_op=True).get_future().then(again))
        exact = sum(part.double() for part in everyone((size,), salt=salt)) * SIZE * SIZE
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


@check
def callbacks_wait_for_what_was_started_before():
    """The second message comes once the callback of the first waits for it, or is about to."""
    salt = next(SERIAL)
    if RANK == 0:
        received, begun = torch.zeros(3), threading.Event()
        first = dist.irecv(torch.zeros(1), 1, tag=8).get_future()
        second = dist.irecv(received, 1, tag=9).get_future()
        both = first.then(lambda _: (begun.set(), second.wait()))
        dist.barrier()
        assert begun.wait(SECONDS)
        dist.barrier()
        waited_for(both)
        assert torch.equal(received, data(1, (3,), salt=salt))
    else:
        for tag, size in ((8, 1), (9, 3)):
            dist.barrier()
            if RANK == 1:
                dist.send(data(RANK, (size,), salt=salt), 0, tag=tag)


@check
def callbacks_end_before_the_communicator_does():
    group = dist.new_group(list(range(SIZE)))
    for _ in range(5):
        salts = [next(SERIAL) for _ in range(4)]
        works = [dist.all_reduce(data(RANK, (10,), salt=salt), group=group, async_op=True) for salt in salts]
        futures = [work.get_future() for work in works]
        for salt, future in zip(salts, futures):
            result = waited_for(future.then(lambda f: f.value()[0].clone()))
            assert_sum(result, everyone((10,), salt=salt), torch.float32)
    dist.destroy_process_group(group)


@check
def powersgd_trains():
    if not MODERN:  # its hook's tensors grow between passes there, with any backend
        return
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.ReLU(), torch.nn.Linear(60, 60))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)
    ddp.register_comm_hook(
        hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), hook.powerSGD_hook
    )
    torch.manual_seed(RANK)

    def steps():
        for _ in range(5):
            ddp(torch.randn(4, 60)).square().mean().backward()
        return True

    done = []
    training = threading.Thread(target=lambda: done.append(steps()), daemon=True)
    training.start()
    training.join(SECONDS)
    assert done, "it waits for ever"
    sums = [None] * SIZE
    dist.all_gather_object(sums, [parameter.grad.sum().item() for parameter in model.parameters()])
    assert all(other == sums[0] for other in sums)


if __name__ == "__main__":
    run()
