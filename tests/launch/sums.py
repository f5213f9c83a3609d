"""What the settings' tests run on each rank: sums of random numbers under whatever settings there are.

    sums.py FOLDER SEED RANKS_A_NODE

RANKS_A_NODE consecutive ranks call themselves a node. The numbers are small and whole, so that their sums are exact in
any order and in fp16. A rank leaves in FOLDER/RANK.json what its largest all-reduce sent, in private memory and in
memory that it shares with its node, what its TCP connections have brought away, and whether it has a long pipe, as one
has that lends the network its memory.
"""

import array
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import pathlib
import random
import socket
import struct
import sys

os.environ["PACELINE_NODE_ID"] = f"node {int(os.environ['RANK']) // int(sys.argv[3])}"

from paceline import communicator as core

SEED = int(sys.argv[2])
COUNTS = (1, 1_000, 70_001, 200_003)  # the last one is cut into pieces
TYPES = {"d": "float64", "i": "int32", "f": "float32"}
_ESTABLISHED, _ACKNOWLEDGED = 1, 120  # a state of TCP's; bytes into Linux's struct tcp_info


def numbers(rank, count):
    return array.array("b", random.Random(1000 * SEED + 10 * count + rank).randbytes(count))


class Sums:
    def __init__(self, comm):
        self.comm = comm
        self.right = {c: list(map(sum, zip(*(numbers(r, c) for r in range(comm.size)), strict=True))) for c in COUNTS}

    def check(self, letter, count, source, target):
        """All-reduces `count` numbers that are written to one address for it, and reads the sum at the other."""
        mine = array.array(letter, numbers(self.comm.rank, count)).tobytes()
        ctypes.memmove(source, mine, len(mine))
        before = self.comm.stats()
        self.comm.run(
            core.ALL_REDUCE,
            dtype=core.DTYPES[TYPES[letter]],
            input=source,
            output=target,
            count=count,
            codec=core.CODEC_SETTINGS,
            segments=[(7, 0, count)] if letter == "f" else None,
            name=f"{count} {TYPES[letter]}",
        )
        after = self.comm.stats()
        got = array.array(letter, ctypes.string_at(target, len(mine)))
        wrong = [i for i, (one, other) in enumerate(zip(got, self.right[count], strict=True)) if one != other]
        assert not wrong, f"rank {self.comm.rank}, {count} {TYPES[letter]}: {len(wrong)} wrong, [{wrong[0]}] first"
        return {name: after[name] - before[name] for name in ("payload_sent", "wire_sent")}


def connections():
    """Of this process's TCP connections the bytes that have arrived at the other end, in ascending order, and the
    address at this one."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as s:  # OSError: no socket
            if s.family in (socket.AF_INET, socket.AF_INET6):
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if info[0] == _ESTABLISHED:
                    found.append((struct.unpack_from("Q", info, _ACKNOWLEDGED)[0], s.getsockname()[0]))
    return sorted(found)


def has_a_long_pipe():
    """Longer than the 64 KiB that pipes have which nobody asked for more."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no pipe
            if fcntl.fcntl(int(name), fcntl.F_GETPIPE_SZ) > 1 << 16:
                return True
    return False


def memory(size):
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return held, ctypes.addressof(ctypes.c_char.from_buffer(held))


def main():
    comm = core.Communicator(timeout=60)
    sums = Sums(comm)
    (_one, source), (_two, target) = memory(8 * COUNTS[-1]), memory(8 * COUNTS[-1])
    for count in COUNTS:
        for letter in TYPES if count < COUNTS[-1] else "f":
            private = sums.check(letter, count, source, target)
            sums.check(letter, count, target, target)
    with contextlib.suppress(core.UnsupportedError):
        comm.share(target, 8 * COUNTS[-1])
    shared = sums.check("f", COUNTS[-1], target, target)
    comm.unshare(target)
    found = {"describe": comm.describe(), "bytes": 4 * COUNTS[-1], "private": private, "shared": shared}
    found["connections"], found["has_a_long_pipe"] = connections(), has_a_long_pipe()
    pathlib.Path(sys.argv[1], f"{comm.rank}.json").write_text(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main()
