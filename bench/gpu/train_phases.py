"""Where a step's time goes, on the device and on the host: forward and backward pass, what joins them, the optimizer.

Steps run one behind the other, as in training: on the device a phase ends when what was enqueued by its end has run, on
the host when its call returns. "join" is from the last gradient until the optimizer may begin: what nothing hides of
the last bucket's way, and of waiting for the slower rank.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import train_host
import train_threads

NAMES = ("forward", "backward", "join", "optimizer")
#: At the beginning, when the host is no step ahead.
_LEFT_OUT = 2


class Phases:
    """Times the steps of a variant (train_rank.Variant), which must not update parameters as gradients come."""

    def __init__(self, variant, clock, device, half):
        self._variant, self._clock, self._device, self._half = variant, clock, device, half
        self._last_gradient = None

    def _mark(self):
        return self._clock.mark(), time.perf_counter()

    def _step(self):
        """Marks where the phases meet: one more than there are phases."""
        variant = self._variant
        begin = self._mark()
        variant.optimizer.zero_grad(set_to_none=True)
        loss = variant.forward(self._device, self._half)
        forward = self._mark()
        loss.backward()
        joined = self._mark()
        variant.optimizer.step()
        return [begin, forward, self._last_gradient or joined, joined, self._mark()]

    @contextlib.contextmanager
    def _noting_the_last_gradient(self):
        """Of the parameter that the model registers first: the first layer's."""
        first = next(p for p in self._variant.model.module.parameters() if p.requires_grad)

        def note(_parameter):
            self._last_gradient = self._mark()

        hook = first.register_post_accumulate_grad_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def measure(self, steps):
        """{"device": medians by phase, "host": the same, "step": the median time from begin to begin}, seconds.

        "inside": seconds and sleeps a step in Paceline's hook, and of that in its library, of who calls it; "threads":
        what this process's threads did, see train_threads.py.
        """
        parts = train_host.HostParts()
        with self._noting_the_last_gradient(), parts.watch(self._variant):
            before = train_threads.now()
            rows = [self._step() for _ in range(_LEFT_OUT + steps + 1)]
            threads = train_threads.between(before, train_threads.now(), len(rows))
            in_all = len(rows)
        self._clock.settle()
        rows = rows[_LEFT_OUT:]
        spans = {
            "device": [[self._clock.seconds(a[0], b[0]) for a, b in zip(row, row[1:])] for row in rows[:-1]],
            "host": [[b[1] - a[1] for a, b in zip(row, row[1:])] for row in rows[:-1]],
        }
        result = {where: dict(zip(NAMES, map(statistics.median, zip(*each)))) for where, each in spans.items()}
        begins = [row[0][0] for row in rows]
        result["threads"] = threads
        result["inside"] = {
            part: [getattr(parts, part) / in_all, slept / in_all] for part, slept in parts.sleeps.items()
        }
        result["step"] = statistics.median(self._clock.seconds(a, b) for a, b in zip(begins, begins[1:]))
        return result


def lines(result):
    """Of a model's figures (train.py), a line a path; empty where no phases were asked for."""
    found = {path: f["phases"] for path, f in result["paths"].items() if "phases" in f}
    made = [f"{'phases, ms on the device and on the host':51}" + "".join(f"{name:>16}" for name in NAMES)]
    for path, phases in found.items():
        cells = "".join(f"{phases['device'][n] * 1e3:9.2f}{phases['host'][n] * 1e3:7.2f}" for n in NAMES)
        made.append(f"{result['model']:10} {path:40}{cells}   of a step of {phases['step'] * 1e3:.2f}")
    for path, phases in found.items():
        inside = ", ".join(f"{s * 1e3:.2f} ms and {n:.1f} sleeps in its {p}" for p, (s, n) in phases["inside"].items())
        made += [f"{result['model']:10} {path}, rank 0: {inside}", *train_threads.lines(phases["threads"])]
    return made if found else []
