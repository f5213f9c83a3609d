"""What the process's threads do in a step: seconds on a processor, seconds ready without one, how often they slept.

As Linux counts them (/proc/self/task/*/schedstat and status). A thread that has the same work and takes longer for it
on a processor shares that processor's core, or its caches, with somebody; a machine of virtual processors cannot see
with whom. `steal` is what it does see: processor time that its host gave to others.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Threads that took less of a step are left out.
_LEAST = 2e-4


def now():
    """{thread: (name, seconds on a processor, seconds ready, sleeps, times it was interrupted)}, and the steal."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            ran, ready, _ = (task / "schedstat").read_text().split()
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
        except OSError:  # it has ended
            continue
        switches = [int(status[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary")]
        found[int(task.name)] = (status["Name"].strip(), int(ran) / 1e9, int(ready) / 1e9, *switches)
    return found, _steal()


def _steal():
    """Seconds of all processors together."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def between(before, after, steps):
    """{"steal": …, "threads": [[name, ran, ready, sleeps, interrupted], …]} a step, who ran most first."""
    rows = []
    for thread, (name, *numbers) in after[0].items():
        _, *earlier = before[0].get(thread, (name, 0.0, 0.0, 0, 0))
        rows.append([name, *((b - a) / steps for a, b in zip(earlier, numbers))])
    rows = sorted((row for row in rows if row[1] >= _LEAST), key=lambda row: -row[1])
    return {"steal": (after[1] - before[1]) / steps, "threads": rows}


def lines(threads):
    """For a table: a line a thread."""
    made = [f"    {'thread, a step':20}{'ran ms':>9}{'ready ms':>10}{'sleeps':>8}{'interrupted':>13}"]
    for name, ran, ready, sleeps, interrupted in threads["threads"]:
        made.append(f"    {name:20}{ran * 1e3:9.2f}{ready * 1e3:10.2f}{sleeps:8.1f}{interrupted:13.2f}")
    return [*made, f"    {'steal, all cores':20}{threads['steal'] * 1e3:9.2f}"]
