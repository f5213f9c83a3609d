"""Whether Paceline works here: every rank takes part in a few collectives and checks what comes out.

    paceline run -np 2 -- python -m paceline.selftest

Needs no framework. Prints one line on rank 0; ends with an error that names what was wrong.
"""

import array
import sys

from paceline import communicator as core
from paceline.errors import PacelineError

COUNT = 100_003


def _floats(values):
    data = array.array("f", values)
    return data, data.buffer_info()[0]


def _all_reduce(comm):
    """Sums of whole numbers, which float32 holds exactly whatever the order."""
    data, address = _floats(float((i * 7 + comm.rank) % 1000) for i in range(COUNT))
    comm.run(core.ALL_REDUCE, dtype=0, input=address, output=address, count=COUNT, name="selftest all-reduce")
    expected = array.array("f", (float(sum((i * 7 + r) % 1000 for r in range(comm.size))) for i in range(COUNT)))
    return data == expected


def _broadcast(comm):
    data, address = _floats(float(i % 977 if comm.rank == 0 else -1) for i in range(COUNT))
    comm.run(core.BROADCAST, dtype=0, input=address, output=address, count=COUNT, root=0, name="selftest broadcast")
    return data == array.array("f", (float(i % 977) for i in range(COUNT)))


def main():
    try:
        comm = core.Communicator()
        for name, check in (("all-reduce", _all_reduce), ("broadcast", _broadcast)):
            if not check(comm):
                raise PacelineError(f"rank {comm.rank}: {name} of {COUNT} float32 gave wrong elements")
        comm.run(core.BARRIER, name="selftest end")
    except PacelineError as error:
        print(f"paceline selftest: {error}", file=sys.stderr)
        return 1
    if comm.rank == 0:
        print(f"paceline selftest: {comm.size} ranks, all right; {comm.describe()}")
    comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
