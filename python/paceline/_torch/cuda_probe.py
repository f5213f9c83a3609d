"""Which way is faster on this job's network, tried once at the start: Paceline between nodes, or NCCL over its sockets.

Only exact gradients are asked about: a codec that the user chose is the user's choice. Both ways carry the same bytes
in the same number of all-reduces, in turn; the slowest rank's best of three counts, and every rank decides by the same
figures. A tie goes to Paceline, whose path keeps no multiprocessor and fewer cores busy. What is raced counts as a
small model: its sums in a node are made by copies, where a large one's are NCCL's, which takes a hundredth less.
"""

import contextlib
import threading
import time

import torch
import torch.distributed as dist

from paceline import _cuda
from paceline._torch import aborts, everybody
from paceline.errors import PacelineError

_SMALL = 1 << 20
_LARGE = 16 << 20
#: What one timed run may take.
_SECONDS = 0.02
_TURNS = 3
_BUCKETS = 4
#: NCCL is chosen where it takes less than this share of our time.
_CLEARLY = 0.9
_LOOK_SECONDS = 0.2


def race(ours, theirs, agree):
    """(seconds of ours, seconds of theirs, bytes), the same on all ranks.

    ours(bytes), theirs(bytes): all-reduce that much and return when it is done. agree([seconds]): the ranks' largest.
    """
    for way in (ours, theirs):
        way(_SMALL)  # connections, kernels, memory
    first = agree([_seconds(ours, _SMALL), _seconds(theirs, _SMALL)])
    size = _SMALL
    while size < _LARGE and max(first) * size / _SMALL < _SECONDS:
        size *= 2
    best = [float("inf")] * 2
    for _ in range(_TURNS):
        for index, way in enumerate((ours, theirs)):
            theirs(4 * _BUCKETS)  # the ranks begin together
            best[index] = min(best[index], _seconds(way, size))
    return (*agree(best), size)


def reason_for_torch(seconds_ours, seconds_theirs, size):
    """Why torch's own all-reduce is the better way, or "" where it is not."""
    if seconds_theirs >= _CLEARLY * seconds_ours:
        return ""
    return (
        f"NCCL carried {size >> 20} MiB in {seconds_theirs * 1e3:.1f} ms where Paceline took "
        f"{seconds_ours * 1e3:.1f}, exact; PACELINE_CUDA_PATH=paceline overrules, PACELINE_CODEC=fp16 sends less"
    )


def outcome(seconds_ours, seconds_theirs, size, took):
    """The sentence for the start-up line; `took`: the seconds of the whole trial."""
    return (
        f"tried at the start, for {took:.2f} s: {size >> 20} MiB in {seconds_ours * 1e3:.1f} ms, by NCCL between nodes "
        f"{seconds_theirs * 1e3:.1f}"
    )


def compare(communicator, process_group, device):
    """race() between a CudaCommunicator and the process group's own all-reduce. Collective over the group."""
    buffer = torch.zeros(_LARGE // 4, dtype=torch.float32, device=device)
    stream = torch.cuda.Stream(device)
    communicator.reserve(_LARGE, _LARGE // _BUCKETS)

    def parts(size):
        return buffer[: size // 4].chunk(_BUCKETS)

    def ours(size):
        operations = [
            communicator.all_reduce(
                part.data_ptr(),
                part.numel(),
                _cuda.DTYPES["float32"],
                stream.cuda_stream,
                codec=_cuda.CODEC_NONE,
                name=b"probe at the start",
            )
            for part in parts(size)
        ]
        for operation in operations:
            communicator.wait_operation(operation)
            communicator.join(operation, stream.cuda_stream)
        stream.synchronize()

    def theirs(size):
        works = [dist.all_reduce(part, group=process_group, async_op=True) for part in parts(size)]
        for work in works:
            work.wait()
        stream.synchronize()

    ranks = communicator.communicator
    with torch.cuda.device(device), torch.cuda.stream(stream), ends_with(ranks, process_group, device):
        stream.wait_stream(torch.cuda.default_stream(device))  # the zeros
        return race(ours, theirs, lambda seconds: everybody.largest(ranks, seconds))


@contextlib.contextmanager
def ends_with(communicator, process_group, device):
    """NCCL inside waits for no rank that is lost: what names the rank is raised in its place.

    NCCL itself knows no deadline, or one of many minutes, and calls nobody by name.
    """
    over = threading.Event()

    def look():
        while not over.wait(_LOOK_SECONDS):
            try:
                communicator.check_health()
            except PacelineError:
                aborts.abort(process_group._get_backend(device), made_by_torch=True)
                return

    thread = threading.Thread(target=look, daemon=True, name="paceline-probe")
    thread.start()
    try:
        yield
    except RuntimeError:
        communicator.check_health()
        raise
    finally:
        over.set()
        thread.join()
    communicator.check_health()


def _seconds(way, size):
    started = time.perf_counter()
    way(size)
    return time.perf_counter() - started
