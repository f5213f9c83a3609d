"""Runs the GPU suite's files side by side, on pairs of GPUs.

Each pair of GPUs has an MPS server of its own, whose clients get half a GPU each. What kills ranks runs on the first
pair alone: a process that dies in a kernel may take others of its server along. Apart from that as many files run at a
time on each pair as --at-once says: one, for two nodes of two ranks from each of two files are more contexts than a
server makes ("out of memory" as soon as they choose their device). Logs and JUnit files go to a folder; the last line
is 'N passed, N failed'.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
#: The longest first. What is not named comes after them.
ORDER = ["test_faults.py", "test_overlap.py", "test_training.py", "test_all_reduce.py", "test_sharded.py"]
KILLS = "test_faults.py"


def gpus() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit("gpu_suites: no nvidia-smi here: this machine has no GPU, or no driver")
    found = [line.split(":")[0].removeprefix("GPU ") for line in done.stdout.splitlines() if line.startswith("GPU ")]
    if len(found) < 2:
        sys.exit(f"gpu_suites: {len(found)} GPU here; a pair is needed (one GPU: pytest tests/gpu -k 'not 2x2')")
    return found


class Pair:
    """Two GPUs behind an MPS server, which names them 0 and 1."""

    def __init__(self, devices: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.name = "+".join(devices)
        pipe, log = folder / "pipe", folder / "log"
        for path in (pipe, log):
            path.mkdir(exist_ok=True)
        self.env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        server = {**os.environ, **self.env, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=server, check=True)
        self.env |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "CUDA_VISIBLE_DEVICES": "0,1"}

    def close(self) -> None:
        ends = {"input": "quit\n", "text": True, "env": {**os.environ, **self.env}, "check": False}
        try:
            subprocess.run(["nvidia-cuda-mps-control"], timeout=30, **ends)  # it waits for clients that still live
        except subprocess.TimeoutExpired:
            print(f"gpu_suites: the MPS server of GPUs {self.name} does not end", flush=True)


def run(file: Path, pair: Pair, out: Path, until: float) -> None:
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "16", "CHECKS_PATIENCE": "2", "PYTHONUNBUFFERED": "1"}
    env = {
        **defaults,
        **os.environ,
        **pair.env,
        "REQUIRE": "cuda",
    }
    options = {"env": env, "stderr": subprocess.STDOUT, "start_new_session": True}
    junit = out / f"{file.stem}.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={junit}", str(file)]
    started = time.monotonic()
    with open(out / f"{file.stem}.log", "wb") as log:
        tests = subprocess.Popen(command, cwd=ROOT, stdout=log, **options)
        try:
            tests.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            end(tests)
            junit.unlink(missing_ok=True)
    passed, failed = counts(junit)
    ended = "" if junit.exists() else ", cut off by the limit or dead: its log says how far it came"
    if junit.exists() and not failed and tests.returncode:
        ended = f": its end was {tests.returncode}, which its tests do not explain"
        junit.unlink()
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{file.name} on GPUs {pair.name}: {passed} passed, {failed} failed in {took}{ended}", flush=True)


def end(tests: subprocess.Popen[bytes]) -> None:
    """First as a user would: what the tests have started is then ended by them."""
    os.killpg(tests.pid, signal.SIGINT)
    try:
        tests.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()


def counts(junit: Path) -> tuple[int, int]:
    """A file that did not come to its end counts as one failure."""
    try:
        cases = list(ET.parse(junit).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return 0, 1
    bad = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    return sum(case.find("skipped") is None for case in cases) - bad, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="of tests/gpu; all if none is named")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which what still runs is ended")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-suites", help="for logs and results")
    parser.add_argument("--at-once", type=int, default=1, help="files on a pair at a time where nothing is killed")
    args = parser.parse_args()
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: at least one file runs at a time")
    for missing in (file for file in args.files if not file.exists()):
        sys.exit(f"gpu_suites: there is no file {missing}")
    # A shell's background jobs ignore it, and so would the tests that end() interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    until = time.monotonic() + args.limit
    devices = gpus()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = [file.resolve() for file in args.files] or sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    files.sort(key=lambda file: ORDER.index(file.name) if file.name in ORDER else len(ORDER))
    for file in files:
        (out / f"{file.stem}.xml").unlink(missing_ok=True)
    killing: queue.SimpleQueue[Path] = queue.SimpleQueue()
    others: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for file in files:
        (killing if file.name == KILLS else others).put(file)

    killed = threading.Event()  # and the first pair is anybody's

    def drain(source: queue.SimpleQueue[Path], pair: Pair) -> None:
        while True:
            try:
                file = source.get_nowait()
            except queue.Empty:
                return
            run(file, pair, out, until)

    def work(pair: Pair, kills: bool) -> None:
        if kills:
            try:
                drain(killing, pair)
            finally:
                killed.set()
        if pair is pairs[0]:
            killed.wait()
        drain(others, pair)

    pairs: list[Pair] = []
    more = args.at_once - 1
    try:
        for at in range(0, len(devices) - 1, 2):
            pairs.append(Pair(devices[at : at + 2], out / f"mps-{at // 2}"))
        shares = [(pair, pair is pairs[0] and first) for pair in pairs for first in [True] + [False] * more]
        threads = [threading.Thread(target=work, args=share) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for pair in pairs:
            pair.close()
    tallies = [counts(out / f"{file.stem}.xml") for file in files]
    passed, failed = (sum(numbers) for numbers in zip(*tallies))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
