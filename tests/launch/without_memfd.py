"""A rank in a container whose system call filter knows no memfd_create: shared memory is what /dev/shm holds.

Adds up 256 MiB of random integers in memory of paceline_alloc(), twice, and checks every one.
"""

import array
import ctypes
import errno
import random

import seccomp

from paceline import _library, communicator

COUNT = 64 << 20
BLOCK = (1 << 20) - 3  # of no length that divides the whole's halves


def refuse_memfd():
    libc = seccomp.refuse(memfd_create=errno.ENOSYS)
    assert libc.memfd_create(b"refused", 0) == -1 and ctypes.get_errno() == errno.ENOSYS


def numbers(rank):
    generator = random.Random(1000 + rank)
    return array.array("i", (generator.randint(-(1 << 20), 1 << 20) for _ in range(BLOCK)))


def repeated(block):
    whole, rest = divmod(COUNT, BLOCK)
    return (block * whole + block[:rest]).tobytes()


def main():
    refuse_memfd()
    comm = communicator.Communicator(timeout=60)
    library = _library.load()
    handle = comm._open_handle()
    expected = repeated(array.array("i", map(sum, zip(*(numbers(r) for r in range(comm.size)), strict=True))))
    mine = repeated(numbers(comm.rank))
    for _ in range(2):
        memory = library.paceline_alloc(handle, 4 * COUNT)
        ctypes.memmove(memory, mine, len(mine))
        comm.run(
            communicator.ALL_REDUCE,
            dtype=communicator.DTYPES["int32"],
            input=memory,
            output=memory,
            count=COUNT,
            reduce_op=communicator.SUM,
        )
        assert ctypes.string_at(memory, 4 * COUNT) == expected, f"rank {comm.rank}: a wrong sum"
        library.paceline_free(handle, memory)
    line = f"rank {comm.rank} size {comm.size} nodes {comm.identity.node_count} ok {comm.describe()}\n"
    comm.close()
    print(line, end="", flush=True)


if __name__ == "__main__":
    main()
