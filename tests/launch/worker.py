"""What every launcher's test runs on each rank: all-reduces random data over the C ABI and checks the sum.

Prints one line, "rank R size N nodes M ok". With --fail-once FILE the job's first start fails, so that an elastic
launcher starts it again: all ranks end before they have joined; with --joined as well the last one is killed in the
middle, after a sum, while the others wait for it in the next one.
"""

import argparse
import array
import os
import pathlib
import random
import signal
import sys

from paceline import communicator


def numbers(rank, count):
    generator = random.Random(1000 + rank)
    return [generator.randint(-(1 << 20), 1 << 20) for _ in range(count)]


def all_reduce(comm, count):
    """Random integers in float64: their sum is exact in any order."""
    mine = array.array("d", numbers(comm.rank, count))
    total = array.array("d", bytes(8 * count))
    comm.run(
        communicator.ALL_REDUCE,
        dtype=communicator.DTYPES["float64"],
        input=mine.buffer_info()[0],
        output=total.buffer_info()[0],
        count=count,
        reduce_op=communicator.SUM,
    )
    expected = [sum(column) for column in zip(*(numbers(r, count) for r in range(comm.size)), strict=True)]
    assert list(total) == expected, f"rank {comm.rank}: a wrong sum of {count} elements"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-once", type=pathlib.Path)
    parser.add_argument("--joined", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, help="make and destroy the communicator so often")
    parser.add_argument("--timeout", type=float, default=60, help="for all ranks to come, in seconds")
    options = parser.parse_args()
    fails = options.fail_once and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if fails and not options.joined:
        options.fail_once.touch()
        sys.exit(3)
    for _ in range(options.rounds):
        comm = communicator.Communicator(timeout=options.timeout)
        for count in (1, 1000, 100_000):
            all_reduce(comm, count)
            if fails and comm.rank == comm.size - 1:
                options.fail_once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        line = f"rank {comm.rank} size {comm.size} nodes {comm.identity.node_count} ok\n"
        comm.close()
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
