"""A file of checks: functions that every rank runs in the same order, in one launch.

A check that fails on a rank ends that rank's run (its peers could wait for it in vain); what comes after it counts
as not run. Results go to the file that $CHECKS_REPORT names. CHECKS_ONLY=NAME,NAME runs those alone.
"""

import json
import os
import socket
import time
import traceback

_checks = []


def check(function):
    _checks.append(function)
    return function


def keep_ports(count):
    """Ports for later process groups, agreed on by the ranks of the present one: each next() makes one $MASTER_PORT.

    torch's own store may not reuse its port at once, and whichever comes next in number may be taken: rank 0 holds them
    until then.
    """
    import torch.distributed as dist

    held = []
    for _ in range(count if dist.get_rank() == 0 else 0):
        held.append(socket.socket())
        held[-1].bind(("", 0))
    ports = [[s.getsockname()[1] for s in held]]
    dist.broadcast_object_list(ports, 0)

    def one_by_one():
        for port in ports[0]:
            if held:
                held.pop(0).close()
            os.environ["MASTER_PORT"] = str(port)
            yield port

    return one_by_one()


def run():
    """Runs this process's checks and writes their results; exits with 1 where one failed."""
    path = os.environ["CHECKS_REPORT"] + "." + os.environ["RANK"]
    only = os.environ.get("CHECKS_ONLY")
    results, failed = {}, None
    for function in _checks:
        if only and function.__name__ not in only.split(","):
            continue
        started = time.monotonic()
        if failed:
            results[function.__name__] = f"not run: {failed} failed before it"
            continue
        try:
            function()
            results[function.__name__] = "ok"
        except BaseException:
            failed = function.__name__
            results[failed] = traceback.format_exc()
        print(f"{function.__name__}: {results[function.__name__]} ({time.monotonic() - started:.2f} s)", flush=True)
        with open(path, "w") as report:
            json.dump(results, report)
    if failed:
        os._exit(1)
