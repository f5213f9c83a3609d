"""The peer of `paceline bench --vs gloo`: torch.distributed on Gloo, one process beside each rank.

Started by the bench as `python _bench_gloo.py RANK SIZE NODES`; it imports nothing of this package. Rank 0 writes
the address of the group's store, all read it back and answer "ready VERSION", torch's. Then each line on standard input
is an order ({"operation", "bytes", "dtype", "iterations", "threads"}), answered by a line: {"seconds", "threads"}, what
each operation took here and how many threads torch computed with, or {"error": sentence}. It ends with its input.
"""

import json
import os
import socket
import sys
import time


def _operation(dist, torch, order, buffers):
    """(refill, run) for one order; buffers are kept for the next of the same shape."""
    name, size = order["operation"], dist.get_world_size()
    dtype = getattr(torch, order["dtype"])
    elements = max(order["bytes"] // torch.empty(0, dtype=dtype).element_size(), 1)
    key = (name, elements, dtype)
    if key not in buffers:
        buffers.clear()
        generator = torch.Generator().manual_seed(dist.get_rank())
        source = torch.rand(elements, generator=generator) - 0.5
        source = source.to(dtype) if dtype.is_floating_point else (source * 2000).to(dtype)
        buffers[key] = (source, source.clone(), torch.empty_like(source))
    source, data, other = buffers[key]
    block = elements // size
    runs = {
        "allreduce": lambda: dist.all_reduce(data),
        "broadcast": lambda: dist.broadcast(data, 0),
        "allgather": lambda: dist.all_gather_into_tensor(other, data[:block]),
        "reducescatter": lambda: dist.reduce_scatter_tensor(other[:block], data),
        "alltoall": lambda: dist.all_to_all_single(other, data),
    }
    return (lambda: data.copy_(source)), runs[name]


# Sums grow when they are summed again: the values are renewed this often, outside the time taken.
_RENEW = 8


def _measure(dist, torch, order, buffers):
    torch.set_num_threads(order["threads"])
    refill, run = _operation(dist, torch, order, buffers)
    one_way = order["operation"] == "broadcast"
    times = []
    for i in range(order["iterations"]):
        if i % _RENEW == 0:
            refill()
            dist.barrier()
        elif one_way:
            dist.barrier()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return {"seconds": times, "threads": torch.get_num_threads()}


def main():
    rank, size, nodes = (int(word) for word in sys.argv[1:4])
    # Whatever torch prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(text):
        answers.write(text + "\n")
        answers.flush()

    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}")

    torch.set_num_threads(1)
    store = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else socket.gethostname())
        store = dist.TCPStore(host, 0, size, True, wait_for_workers=False)
        answer(f"{host} {store.port}")
    host, port = sys.stdin.readline().split()
    if store is None:
        store = dist.TCPStore(host, int(port), size, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    answer(f"ready {torch.__version__}")
    buffers = {}
    for line in sys.stdin:
        try:
            answer(json.dumps(_measure(dist, torch, json.loads(line), buffers)))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            answer(json.dumps({"error": str(error).splitlines()[0]}))


if __name__ == "__main__":
    # This folder has a package named torch; the real one is meant.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
    main()
