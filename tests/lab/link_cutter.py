"""A rank whose link is cut: sums go on over a real interface that goes down and, where asked, comes back.

    link_cutter.py SECONDS ROUNDS    rank 1 takes its interface down for SECONDS (0: for good) in the first round

Prints "rank R: N right sums, a round took S s at most" or "rank R: ERROR TYPE: sentence".
"""

import array
import os
import subprocess
import sys
import threading
import time

from paceline import communicator
from paceline.errors import PacelineError

COUNT = 1 << 18


def interface():
    names = [name for name in os.listdir("/sys/class/net") if name != "lo"]
    assert len(names) == 1, names
    return names[0]


def cut(seconds):
    name = interface()
    routes = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True).stdout.splitlines()
    subprocess.run(["ip", "link", "set", name, "down"], check=True)
    if seconds > 0:
        time.sleep(seconds)  # the outage itself
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        for route in routes:  # an interface that goes down takes them with it
            subprocess.run(["ip", "route", "replace", *route.split()], check=True)


def main():
    seconds, rounds = float(sys.argv[1]), int(sys.argv[2])
    comm = communicator.Communicator(timeout=60)
    cutter = threading.Thread(target=cut, args=(seconds,))
    slowest = 0.0
    for number in range(rounds):
        mine = array.array("d", [number * 1000.0 + comm.rank + i % 97 for i in range(COUNT)])
        total = array.array("d", bytes(8 * COUNT))
        if number == 0 and comm.rank == 1:
            cutter.start()
        started = time.monotonic()
        try:
            comm.run(
                communicator.ALL_REDUCE,
                dtype=communicator.DTYPES["float64"],
                input=mine.buffer_info()[0],
                output=total.buffer_info()[0],
                count=COUNT,
                reduce_op=communicator.SUM,
                timeout=5.0 if seconds == 0 else 0.0,
            )
        except PacelineError as error:
            print(f"rank {comm.rank}: {type(error).__name__} after {time.monotonic() - started:.1f} s: {error}")
            return
        slowest = max(slowest, time.monotonic() - started)
        for i in range(0, COUNT, 1009):
            assert total[i] == 2 * (number * 1000.0 + i % 97) + 1, (number, i, total[i])
    if comm.rank == 1:
        cutter.join()
    print(f"rank {comm.rank}: {rounds} right sums, a round took {slowest:.1f} s at most")
    comm.close()


if __name__ == "__main__":
    main()
