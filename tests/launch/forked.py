"""A rank that has a communicator forks a child, which makes one of its own with the other ranks' children: both go on
at the same time, the parent beyond its child's end. Each process prints one line.
"""

import os
import sys

from worker import all_reduce

from paceline import communicator, errors

ROUNDS = 20


def child(inherited):
    try:
        all_reduce(inherited, 10)
    except errors.UnsupportedError as error:
        assert "create a new one" in str(error), error
    else:
        raise AssertionError("the parent's communicator served its child")
    inherited.close()  # nothing to do: it is the parent's
    comm = communicator.Communicator(prefix="children", timeout=60)
    for _ in range(ROUNDS):
        all_reduce(comm, 20_000)
    print(f"child {comm.rank} of {comm.size} ok", flush=True)
    comm.close()


def main():
    comm = communicator.Communicator(timeout=60)
    all_reduce(comm, 1_000)
    pid = os.fork()
    if pid == 0:
        child(comm)
        return  # and through atexit, as any script's child
    for _ in range(ROUNDS):
        all_reduce(comm, 20_000)
    _, status = os.waitpid(pid, 0)
    all_reduce(comm, 100_000)
    comm.check_health()
    print(f"parent {comm.rank} of {comm.size} ok", flush=True)
    comm.close()
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
