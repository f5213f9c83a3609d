#!/usr/bin/env python3
"""Puts named faults into a scratch copy, one at a time, and demands that a test turns red for each.

A mutant is an exact replacement in one file (tools/dev/mutants.toml) with the test programs or pytest paths that guard
it. The unmutated copy has to pass first; a mutant that fails to compile is an error, not a catch.

    mutants.py [--only REGEX] [--shard K/N] [--list]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build-mutants/tree"


@dataclasses.dataclass
class Mutant:
    name: str
    file: str
    find: str
    replace: str
    #: gtest programs ("engine_test", with an optional ":filter") and pytest paths.
    tests: list[str]
    timeout: float = 1800  # seconds for each test, where the unmutated copy has not shown what it needs


def load(only: str) -> list[Mutant]:
    data = tomllib.loads((ROOT / "tools/dev/mutants.toml").read_text())
    mutants = [Mutant(**entry) for entry in data["mutant"]]
    names = [m.name for m in mutants]
    duplicates = {n for n in names if names.count(n) > 1}
    if duplicates:
        sys.exit(f"mutants: names used twice: {sorted(duplicates)}")
    return [m for m in mutants if re.search(only, m.name)]


def shard_of(text: str) -> tuple[int, int]:
    """(2, 3) of "2/3": the second of three parts."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"'{text}' is no part such as 2/3, the second of three")
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def alone_in_the_copy():
    """Two runs that change one copy would judge each other's faults."""
    TREE.parent.mkdir(parents=True, exist_ok=True)
    with open(TREE.parent / f"{TREE.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"mutants: another run is under way in {TREE}: wait for it, or use a copy of its own (--shard K/N)"
            )
        yield


def copy_tree() -> None:
    """Brings the scratch copy up to date without touching files that did not change (so that little is rebuilt)."""
    TREE.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        source, target = ROOT / name, TREE / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)  # newer than what was built of another one
    kept = set(listed)
    for path in TREE.rglob("*"):
        name = str(path.relative_to(TREE))
        if path.is_file() and name not in kept and not name.startswith(("build/", ".venv")):
            path.unlink()


def build(targets: set[str]) -> str:
    """Empty when it worked, else the compiler's words."""
    if not (TREE / "build/build.ninja").exists():
        configure = ["cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
        subprocess.run(configure, cwd=TREE, capture_output=True, check=True)
    done = subprocess.run(
        ["cmake", "--build", "build", "--target", *sorted(targets)],
        cwd=TREE,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout[-3000:]


def targets_of(mutant: Mutant) -> set[str]:
    programs = {t.split(":")[0] for t in mutant.tests if not t.startswith("tests/")}
    # Python tests need the library and the program, those on simulated GPUs (some in any file) their libraries too.
    python = [t for t in mutant.tests if t.startswith("tests/")]
    if python:
        programs |= {"paceline", "paceline_bin"}
    if any("tests/torch" in t for t in python):
        programs |= {"simulated_cuda", "simulated_paceline_cuda"}
    if any("tests/tensorflow" in t for t in python):
        programs |= {"paceline_tensorflow"}
    return programs


def interpreter_of(test: str) -> Path:
    """The environment that has what a pytest path needs; ./dev makes them."""
    venv = "build/venv/tf221" if test.startswith("tests/tensorflow") else ".venv"
    return ROOT / venv / "bin/python"


#: Seconds that each test took on the unmutated copy.
needed: dict[str, float] = {}


def limit_of(mutant: Mutant, test: str) -> float:
    """A test that takes longer hangs: this machine may be busier than it was."""
    return 60 + 5 * needed[test] if test in needed else mutant.timeout


def kill_tree(pid: int) -> None:
    """Ends a process and what it has started, in whichever session: a rank that hangs may take a core for ever."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    doomed = [pid]
    for one in doomed:
        doomed += children.get(one, [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def red(mutant: Mutant) -> str:
    """What the first guarding test that fails says (one that hangs past its time fails too); empty when all pass."""
    env = {**os.environ, "PYTHONPATH": str(TREE / "python")}
    for test in mutant.tests:
        if test.startswith("tests/"):
            command = [str(interpreter_of(test)), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        else:
            program, _, pattern = test.partition(":")
            chosen = f"--gtest_filter={pattern or '*'}"
            command = [f"build/bin/{program}", "--gtest_brief=1", "--gtest_fail_fast", chosen]
        limit = limit_of(mutant, test)
        started = time.monotonic()
        with tempfile.TemporaryFile() as said:  # of a wrong sum it can be gigabytes
            with subprocess.Popen(command, cwd=TREE, env=env, stdout=said, stderr=said) as process:
                try:
                    code = process.wait(timeout=limit)
                except subprocess.TimeoutExpired:
                    return f"{test}: not done after {limit:.0f} s"
                finally:
                    if process.returncode is None:
                        kill_tree(process.pid)
            if code not in (0, 5):
                said.seek(max(0, said.seek(0, os.SEEK_END) - 3000))
                return f"{test}: exit code {code}\n{said.read().decode(errors='replace')}"
        needed.setdefault(test, time.monotonic() - started)  # the unmutated copy is the first to come here
    return ""


def try_one(mutant: Mutant) -> str:
    """'caught', or what went wrong."""
    path = TREE / mutant.file
    original = path.read_text()
    if original.count(mutant.find) != 1:
        return f"its text stands {original.count(mutant.find)} times in {mutant.file} (must be once)"
    mutated = original.replace(mutant.find, mutant.replace)
    if path.suffix == ".py":  # nothing builds it, and to pytest a file that can't be read is a failure like others
        try:
            compile(mutated, mutant.file, "exec")
        except SyntaxError as error:
            return f"does not compile:\n{mutant.file}:{error.lineno}: {error.msg}"
    path.write_text(mutated)
    try:
        problem = build(targets_of(mutant)) if targets_of(mutant) else ""
        if problem:
            return "does not compile:\n" + problem
        return "caught" if red(mutant) else "SURVIVED"
    finally:
        path.write_text(original)


def main() -> int:
    global TREE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name matches this regular expression")
    parser.add_argument(
        "--shard", type=shard_of, default=(1, 1), metavar="K/N", help="the K-th of N parts, in a copy of its own"
    )
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    part, parts = args.shard
    if parts > 1:
        TREE = ROOT / f"build-mutants/tree-{part}-of-{parts}"
    mutants = load(args.only)
    mutants = mutants[(part - 1) * len(mutants) // parts : part * len(mutants) // parts]
    if args.list:
        for m in mutants:
            print(f"{m.name:40} {m.file}")
        return 0
    with alone_in_the_copy():
        return try_all(mutants)


def try_all(mutants: list[Mutant]) -> int:
    copy_tree()
    print("==> the unmutated copy", flush=True)
    problem = build(set().union(*(targets_of(m) for m in mutants)))
    if problem:
        print(problem)
        return 1
    clean = Mutant("unmutated", "", "", "", sorted({t for m in mutants for t in m.tests}))
    said = red(clean)
    if said:
        print(f"the unmutated copy does not pass its tests: mend that first\n{said}")
        return 1
    caught = 0
    for number, mutant in enumerate(mutants, 1):
        started = time.monotonic()
        verdict = try_one(mutant)
        caught += verdict == "caught"
        print(f"[{number}/{len(mutants)}] {mutant.name:40} {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{caught} of {len(mutants)} mutants caught")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
