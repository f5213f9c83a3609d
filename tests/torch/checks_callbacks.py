"""What callbacks of futures may do: wait for other operations, as hooks of DDP do."""

import threading

import torch
import torch.distributed as dist
from checks import check, run
from group_world import MODERN, RANK, SIZE

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
        tensor = torch.full((size,), float(RANK))
        result = waited_for(dist.all_reduce(tensor, async_op=True).get_future().then(again))
        assert torch.equal(result, torch.full((size,), float(sum(range(SIZE)) * SIZE * SIZE)))


@check
def callbacks_wait_for_what_was_started_before():
    """The second message comes once the callback of the first waits for it, or is about to."""
    if RANK == 0:
        received, begun = torch.zeros(3), threading.Event()
        first = dist.irecv(torch.zeros(1), 1, tag=8).get_future()
        second = dist.irecv(received, 1, tag=9).get_future()
        both = first.then(lambda _: (begun.set(), second.wait()))
        dist.barrier()
        assert begun.wait(SECONDS)
        dist.barrier()
        waited_for(both)
        assert received.tolist() == [5, 5, 5]
    else:
        for tag, size in ((8, 1), (9, 3)):
            dist.barrier()
            if RANK == 1:
                dist.send(torch.full((size,), 5.0), 0, tag=tag)


@check
def callbacks_end_before_the_communicator_does():
    group = dist.new_group(list(range(SIZE)))
    for _ in range(5):
        futures = [dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future() for _ in range(4)]
        assert [waited_for(future.then(lambda f: f.value()[0][0].item())) for future in futures] == [SIZE] * 4
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
