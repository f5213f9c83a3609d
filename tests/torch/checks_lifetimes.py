"""What a Work, its tensors and its errors are good for, longer than the call: waits in vain, refusals, pickles."""

import datetime
import gc
import pickle
import resource
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from checks import check, run
from group_world import RANK, SERIAL, SIZE, assert_sum, data, everyone, raises
from words import hear, tell

from paceline.errors import InvalidArgumentError
from paceline.errors import TimeoutError as PacelineTimeoutError

SHORT = datetime.timedelta(milliseconds=100)


def late_sum(shape, salt):
    """An all-reduce that rank 0 has waited for in vain, and its tensor."""
    tensor = data(RANK, shape, salt=salt)
    if RANK != 0:
        hear(f"waited in vain {salt}")
    work = dist.all_reduce(tensor, async_op=True)
    if RANK == 0:
        raises(RuntimeError, "not ended", lambda: work.wait(SHORT))
        assert not work.is_completed(), "it goes on"
        tell(f"waited in vain {salt}")
    return work, tensor


@check
def a_wait_in_vain_is_no_end():
    for shape in ((3,), (300_000,)):
        salt = next(SERIAL)
        work, tensor = late_sum(shape, salt)
        work.wait()
        assert work.is_completed()
        assert_sum(tensor, everyone(shape, salt=salt), torch.float32)


@check
def results_are_copied_out_after_a_wait_in_vain():
    salt = next(SERIAL)
    parts = [torch.zeros(2, 3).t() for _ in range(SIZE)]  # results come to other memory first
    if RANK != 0:
        hear(f"waited in vain {salt}")
    work = dist.all_gather(parts, data(RANK, (3, 2), salt=salt), async_op=True)
    if RANK == 0:
        raises(RuntimeError, "not ended", lambda: work.wait(SHORT))
        tell(f"waited in vain {salt}")
    work.wait()
    for part, exact in zip(parts, everyone((3, 2), salt=salt)):
        assert torch.equal(part, exact)


@check
def memory_outlives_a_wait_in_vain():
    work, tensor = late_sum((200_000,), next(SERIAL))
    if RANK == 0:
        del work, tensor
        gc.collect()
        others = [torch.full((200_000,), 7.0) for _ in range(30)]
        dist.barrier()
        assert all(bool((other == 7).all()) for other in others), "somebody else's memory was written to"
    else:
        work.wait()
        dist.barrier()


@check
def an_operations_own_deadline_is_its_end():
    salt = next(SERIAL)
    if RANK == 0:
        received = torch.zeros(3)
        work = dist.irecv(received, 1, tag=77)
        raises(RuntimeError, "not ended", lambda: work.wait(SHORT))
    dist.barrier()
    if RANK == 1:
        dist.send(data(RANK, (3,), salt=salt), 0, tag=77)
    elif RANK == 0:
        assert work.wait()
        assert work.is_success()
        assert torch.equal(received, data(1, (3,), salt=salt))


def is_within(thread, file):
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_filename.endswith(file)


@check
def others_may_ask_while_a_thread_waits():
    """The message comes once all questions have been answered."""
    ways = {"in vain": next(SERIAL), "to the end": next(SERIAL)}
    if RANK == 0:
        received = torch.zeros(3)
        for how, salt in ways.items():
            work = dist.irecv(received, 1, tag=79)
            errors = []

            def wait(work=work, how=how, errors=errors):
                try:
                    work.wait(SHORT * 20) if how == "in vain" else work.wait()
                except RuntimeError as error:
                    errors.append(error)

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            while waiting.is_alive() and not is_within(waiting, "communicator.py"):
                pass
            assert not work.is_completed()
            raises(RuntimeError, "not ended", lambda work=work: work.wait(SHORT))
            doubled = work.get_future().then(lambda future: future.value()[0] * 2)
            if how == "in vain":
                waiting.join()
                assert "not ended" in str(errors[0])
            dist.barrier()
            assert work.wait()
            assert torch.equal(doubled.wait(), received * 2)
            assert torch.equal(received, data(1, (3,), salt=salt))
            waiting.join()
            assert work.is_completed() and work.is_success()
    else:
        for salt in ways.values():
            dist.barrier()
            if RANK == 1:
                dist.send(data(RANK, (3,), salt=salt), 0, tag=79)


@check
def bitwise_reductions_wait_for_nobody():
    """What a rank does between beginning one and waiting for it may be what another needs before it begins its own."""
    for reduce in (dist.all_reduce, lambda tensor, **how: dist.reduce(tensor, 1, **how)):
        tensor = torch.tensor([[7, 1 << RANK], [6, 3]]).t()
        if RANK == 0:
            work = reduce(tensor, op=dist.ReduceOp.BOR, async_op=True)
            dist.send(torch.ones(1), 1, tag=80)
            work.wait()
        else:
            if RANK == 1:
                dist.recv(torch.zeros(1), 0, tag=80)
            reduce(tensor, op=dist.ReduceOp.BOR)
        if RANK == 1 or reduce is dist.all_reduce:
            assert torch.equal(tensor, torch.tensor([[7, (1 << SIZE) - 1], [6, 3]]).t())


@check
def who_polls_needs_no_wait():
    """Nothing of an operation is kept once it was seen to have ended."""
    for round in range(60):
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        while not work.is_completed():
            pass
        if round == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 50 * 4096 / 2, f"{grown} KiB more"


@check
def types_that_differ_are_refused():
    memory = torch.zeros(8 * SIZE)
    wide = torch.ones(4, dtype=torch.float64)
    raises(
        InvalidArgumentError,
        "torch.float32 and torch.float64",
        lambda: dist.all_gather_into_tensor(memory[: 4 * SIZE], wide),
    )
    raises(
        InvalidArgumentError,
        "torch.float32 and torch.float64",
        lambda: dist.reduce_scatter_tensor(wide, torch.ones(4 * SIZE)),
    )
    assert not memory.any()
    dist.barrier()


@check
def what_the_source_broadcasts_is_not_written():
    weight = torch.ones(3, 4, requires_grad=True)
    result = torch.exp(weight).t()  # not contiguous, and needed by the backward pass
    before = result._version
    dist.broadcast(result.detach(), 0)
    assert RANK != 0 or result._version == before
    if RANK == 0:
        result.sum().backward()
    salt = next(SERIAL)
    spread = data(0, (3, 1), salt=salt).expand(3, 4) if RANK == 0 else torch.zeros(3, 4)
    dist.broadcast(spread, 0)
    assert torch.equal(spread, data(0, (3, 1), salt=salt).expand(3, 4))


@check
def results_come_in_inference_mode_too():
    salt = next(SERIAL)
    with torch.inference_mode():
        parts = [torch.zeros(2, 3).t() for _ in range(SIZE)]
        work = dist.all_gather(parts, data(RANK, (3, 2), salt=salt), async_op=True)
    work.wait()
    for part, exact in zip(parts, everyone((3, 2), salt=salt)):
        assert torch.equal(part, exact)


@check
def errors_can_be_pickled():
    if RANK == 0:
        work = dist.irecv(torch.zeros(3), 1, tag=78)
        error = raises(PacelineTimeoutError, "not ended", lambda: work.wait(SHORT))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert isinstance(again, PacelineTimeoutError)
    dist.barrier()
    if RANK == 1:
        dist.send(torch.ones(3), 0, tag=78)
    elif RANK == 0:
        work.wait()


@check
def refusals_are_torchs_errors_too():
    kind = getattr(dist, "DistBackendError", RuntimeError)
    group = dist.distributed_c10d._get_default_group()
    for part, refused in (
        ("split", lambda: dist.all_to_all_single(torch.zeros(SIZE + 1), torch.zeros(SIZE + 1))),
        ("output list", lambda: dist.all_gather([torch.zeros(2)] * (SIZE + 1), torch.zeros(2))),
        ("peer 99", lambda: group.send([torch.zeros(2)], 99, 0)),
        ("peer 99", lambda: group.recv([torch.zeros(2)], 99, 0)),
    ):
        assert isinstance(raises(InvalidArgumentError, part, refused), kind)


@check
def an_interrupted_wait_may_be_repeated():
    """A signal's handler runs when the C ABI has returned, and so has released the operation."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted(wait, salt):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        tell(f"{RANK} will be interrupted {salt}")
        try:
            wait()
        except KeyboardInterrupt:
            return
        raise AssertionError("the signal came too late")

    before = signal.signal(signal.SIGALRM, interrupt)
    for again in ("wait", "future", "poll"):
        salt = next(SERIAL)
        tensor = data(RANK, (5,), salt=salt)
        dist.barrier()
        if RANK == 0:
            for rank in range(1, SIZE):
                hear(f"{rank} will be interrupted {salt}")
            time.sleep(0.3)  # by then their signals are there
        work = dist.all_reduce(tensor, async_op=True)
        if RANK > 0:
            interrupted(work.wait, salt)
        if again == "future":
            work.get_future().wait()
        elif again == "poll":
            assert RANK == 0 or work.is_completed()
        work.wait()
        assert_sum(tensor, everyone((5,), salt=salt), torch.float32)
    signal.signal(signal.SIGALRM, before)


@check
def torchs_own_error_type_catches_ours():
    if hasattr(dist, "DistBackendError"):
        raises(dist.DistBackendError, "name the source", lambda: dist.recv(torch.zeros(1)))
    raises(RuntimeError, "name the source", lambda: dist.recv(torch.zeros(1)))


if __name__ == "__main__":
    run()
