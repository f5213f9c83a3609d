"""Both ranks of a job as threads of one process, each in the network namespace of a node, twice under one prefix."""

import array
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))

import one_gpu

from paceline import communicator

COUNT = 100_000


def play(rank, other, store, sums):
    if rank == 1:
        one_gpu.enter_network_of(other)
    for _ in range(2):  # again after its end: it must not meet what is left of the first one
        made = communicator.Communicator(rank=rank, size=2, store=store, prefix="both", timeout=20)
        assert made.identity.node_count == 2, "a thread's namespace is its node"
        data = array.array("f", [rank + 1.0]) * COUNT
        address, _ = data.buffer_info()
        made.wait(
            made.submit(
                communicator.ALL_REDUCE,
                dtype=communicator.DTYPES["float32"],
                input=address,
                output=address,
                count=COUNT,
            )
        )
        sent = made.stats()["wire_sent"]
        made.close()
        sums[rank].append((set(data), sent))


def main():
    shelf = one_gpu.Shelf(sys.argv[1])
    if os.environ["RANK"] == "1":
        shelf.put("process", os.getpid())
        shelf.wait("over")
        return
    other = shelf.wait("process")
    for name in one_gpu.LAUNCHER:
        os.environ.pop(name, None)
    store, sums = one_gpu.Store(), ([], [])
    threads = [threading.Thread(target=play, args=(rank, other, store, sums)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shelf.put("over", True)
    for rank, seen in enumerate(sums):
        assert [values for values, _ in seen] == [{3.0}, {3.0}], seen
        assert all(sent >= 4 * COUNT for _, sent in seen), seen
        print(f"rank {rank} is right")


main()
