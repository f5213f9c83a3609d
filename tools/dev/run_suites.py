#!/usr/bin/env python3
"""Runs every test suite of the tree and sums up: the work behind `./dev test`.

Each suite is a command that leaves JUnit XML, or a check that counts as one test. Builds come first, at full speed;
then suites run two at a time. The last line is 'N passed, N failed'; the one before says how many could not run here,
and before both stand the tests that a second run forgave, by name.

    run_suites.py [--only REGEX] [--instrumented] [--list] [--jobs N]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fcntl
import glob
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "test-results"
PRINT = threading.Lock()
#: By which a sanitizer's report and a counterexample begin: what one run shows and the next does not is there still.
REPORT = re.compile(
    r"(WARNING|ERROR): (Thread|Address|Leak|Memory)Sanitizer|: runtime error: |"
    r"Falsifiable after|Falsifying example|Failing test case"  # rapidcheck's, Hypothesis's before and now
)
WENT_WRONG = re.compile(
    r"\b(\w*Error|error|terminate called|Aborted|Fatal|[Ss]ignal \d+)(?=[:( ]|$)|\bwhat\(\):|\[paceline\]|exitcode"
)
#: What a suite tells of all its jobs: how many faults of each kind the simulation injected.
COUNTS = re.compile(r"^\d+ jobs: .*$", re.MULTILINE)
#: The files that make sense with torch 1.13: the others need packages of the newer torch.
_OLD = (
    *("arrivals", "buckets", "codecs", "ddp", "faults", "group", "killed_ranks", "large", "lost_ranks", "models"),
    *("older", "overlap", "restart", "shared_pages", "start"),
)
TORCH_1_13 = [f"tests/torch/test_{name}.py" for name in _OLD]
#: Of torch's the files that want the machine: they bound how soon a rank hears of another's end, or take its memory.
_TIMED = ("aborts", "faults", "guard", "killed_ranks", "lost_ranks", "overlap", "restart")
_LARGE = ("large",)
TIMED = [f"tests/torch/test_{name}.py" for name in (*_TIMED, *_LARGE)]
#: Modules with threads or with memory that several processes share: what ThreadSanitizer is for. Not gpu: after a fault
#: its simulated kernels go on over data that the failure has let go, as those of a GPU do.
THREADED = ("base", "codec", "wire_shm", "wire_tcp", "bootstrap", "engine", "capi", "agreement")
#: They take half of a small machine's memory: beside others they would be skipped, or take it from them.
HUNGRY = ("capi_large_test",)
#: What every run instruments: the code that takes bytes from strangers, and its threads. --instrumented: all.
FUZZED = (
    *("handshake", "protocol", "tcp_stream", "kv_frame", "kv_space", "kv_client", "key_rows", "launcher_text"),
    *("members", "shm_handshake", "shm_ring", "control", "named_queue", "topk_decode", "topk_encode"),
    *("device_decode", "table_row", "user_text"),
)
IN_EVERY_RUN = {
    "asan": ("base", "bootstrap", "wire_protocol", "wire_tcp", "wire_shm", "codec", "engine"),
    "tsan": ("base", "codec", "wire_tcp", "wire_shm", "engine", "agreement"),
    "fuzz": FUZZED,
}
#: Half of a suite's time under a sanitizer, for what other tests of it show too; --instrumented runs them.
LONG_UNDER_A_SANITIZER = {"asan:codec_test": "TopK.AWrongFirstGuessCostsOnlyTime:TopKSum.AddendsAreAsIfAddedAhead"}
#: A process without descriptors: UBSan asks the kernel by a pipe what memory can be read, and takes a refusal for a no.
UNFIT_FOR_A_SANITIZER = {"asan:capi_test": "Wires/Companions.ARankThatCanNotMakeOneIsNamedOnAll/*"}

SANITIZED = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:suppressions={ROOT}/tools/dev/tsan.supp",
}


@dataclasses.dataclass
class Suite:
    name: str
    command: list[str]
    junit: Path | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    timeout: float = 900
    #: Alone on the machine: tests that bound a reaction time (two seconds after a kill) want a core, others the memory.
    alone: bool = False
    #: Failed tests up to which these run once more, beyond which nothing does; None: the suite does.
    forgives: int | None = None


@dataclasses.dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Tally) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def say(text: str) -> None:
    with PRINT:
        print(text, flush=True)


def gtest_suites(build: str, label: str, env: dict[str, str], timeout: float) -> list[Suite]:
    """One suite a test program; the simulation is cut in two so that both cores work."""
    suites = []
    for program in sorted(glob.glob(str(ROOT / build / "bin" / "*_test"))):
        stem = Path(program).name
        shards = 2 if stem == "simulation_test" else 1
        for shard in range(shards):
            name = f"{label}:{stem}" + (f"[{shard + 1}/{shards}]" if shards > 1 else "")
            junit = OUT / (re.sub(r"[^\w.]", "_", name) + ".xml")
            shard_env = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)} if shards > 1 else {}
            command = [program, f"--gtest_output=xml:{junit}"]
            suites.append(Suite(name, command, junit, {**env, **shard_env}, timeout, alone=stem in HUNGRY))
    return suites


def pytest_suite(
    name: str,
    python: str,
    paths: list[str],
    alone: bool = False,
    env: dict[str, str] | None = None,
    forgives: int | None = None,
) -> Suite | None:
    paths = [p for p in paths if (ROOT / p).exists()]
    if not paths:
        return None
    junit = OUT / f"{name}.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *paths]
    full = {"PYTHONPATH": str(ROOT / "python"), **(env or {})}
    return Suite(f"pytest:{name}", command, junit, full, 2700, alone, forgives)


def fuzz_suites(seconds: int) -> list[Suite]:
    suites = []
    for program in sorted(glob.glob(str(ROOT / "build-asan" / "bin" / "*_fuzz"))):
        stem = Path(program).name.removesuffix("_fuzz")
        kept = ROOT / "tests" / "fuzz" / stem
        fresh = OUT / "fuzz" / stem
        fresh.mkdir(parents=True, exist_ok=True)
        corpus = [str(fresh)] + ([str(kept)] if kept.exists() else [])
        suites.append(
            Suite(
                f"fuzz:{stem}",
                [
                    program,
                    f"-max_total_time={seconds}",
                    "-timeout=10",
                    "-rss_limit_mb=2048",
                    f"-artifact_prefix={fresh}/",
                    "-print_final_stats=1",
                    *corpus,
                ],
                None,
                SANITIZED,
                seconds + 120,
            )
        )
    return suites


def all_suites() -> list[Suite]:
    """The longest first, so that the last ones end together."""
    venv, old = str(ROOT / ".venv" / "bin" / "python"), "/usr/bin/python3"
    # run() keeps the caller's settings from the suites; this is not one, but where lint may write.
    cache = {name: os.environ[name] for name in ("PACELINE_CACHE",) if name in os.environ}
    torch = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "torch").glob("test_*.py"))]
    suites: list[Suite | None] = [
        pytest_suite("torch", venv, [path for path in torch if path not in TIMED], forgives=1),
        pytest_suite("torch-1.13", old, [path for path in TORCH_1_13 if path not in TIMED], forgives=1),
        pytest_suite("tools", venv, ["tests/tools"]),
        Suite("lint", [venv, "tools/dev/lint.py", "--recent"], None, cache, 3000),
        *gtest_suites("build", "cpp", {}, 900),
        *gtest_suites("build-asan", "asan", SANITIZED, 1200),
        *gtest_suites("build-tsan", "tsan", SANITIZED, 1200),
        *fuzz_suites(8),
        pytest_suite("tensorflow-2.15", str(ROOT / "build/venv/tf215/bin/python"), ["tests/tensorflow"]),
        pytest_suite("tensorflow-2.21", str(ROOT / "build/venv/tf221/bin/python"), ["tests/tensorflow"]),
        pytest_suite("launch", venv, ["tests/launch"]),
        pytest_suite("lab", venv, ["tests/lab"], alone=True, forgives=2),
        pytest_suite("torch-timed", venv, TIMED, alone=True, forgives=1),
        pytest_suite("torch-1.13-timed", old, [p for p in TORCH_1_13 if p in TIMED], alone=True, forgives=1),
        pytest_suite("docs", venv, ["tests/docs"], alone=True, forgives=2),
    ]
    return [s for s in suites if s]


def tally_of(suite: Suite, code: int) -> Tally:
    if suite.junit is None:
        return Tally(passed=int(code == 0), failed=int(code != 0))
    if not suite.junit.exists():
        return Tally(failed=1)
    tally = Tally()
    root = ET.parse(suite.junit).getroot()
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            tally.failed += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            tally.skipped += 1
        else:
            tally.passed += 1
    if code not in (0, 5) and tally.failed == 0:
        tally.failed += 1  # died outside of a test
    return tally


def gist(text: list[str]) -> list[str]:
    """The end, and of what is before it the lines that say what went wrong: a process's words come before its
    launcher's."""
    before, end = text[:-20], text[-20:]
    return [*[line for line in before if WENT_WRONG.search(line)][:12], *end]


def what_failed(suite: Suite, log: Path) -> list[str]:
    """The failed tests' names and messages; the end of the log where the suite died outside of a test."""
    lines = []
    cases = ET.parse(suite.junit).getroot().iter("testcase") if suite.junit and suite.junit.exists() else []
    for case in cases:
        for trouble in [*case.findall("failure"), *case.findall("error")]:
            text = (trouble.text or trouble.get("message") or "").strip().splitlines()
            lines += [f"{case.get('classname')}.{case.get('name')}", *(f"  {line}" for line in gist(text))]
    return lines or log.read_text(errors="replace").splitlines()[-80:]


def titles_of_failed(suite: Suite) -> list[str]:
    """The failed tests of its last run, each with its suite; the suite's name where it died outside of a test."""
    cases = ET.parse(suite.junit).getroot().iter("testcase") if suite.junit and suite.junit.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{suite.name}: {case.get('classname')}.{case.get('name')}" for case in failed] or [suite.name]


def log_of(suite: Suite) -> Path:
    return OUT / (re.sub(r"[^\w.]", "_", suite.name) + ".log")


def run(suite: Suite) -> Tally:
    started = time.monotonic()
    log = log_of(suite)
    if suite.junit is not None:
        suite.junit.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "LIGHT_", "PERSEUS_", "HOROVOD_"))}
    env.update(suite.env)
    with open(log, "wb") as out:
        try:
            code = subprocess.run(
                suite.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=ROOT,
                timeout=suite.timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            out.write(f"\nsuite ran past {suite.timeout:.0f} s\n".encode())
            code = 124
    tally = tally_of(suite, code)
    seconds = time.monotonic() - started
    mark = "ok  " if tally.failed == 0 else "FAIL"
    skipped = f", {tally.skipped} skipped" if tally.skipped else ""
    say(f"{mark} {suite.name:34} {tally.passed} passed, {tally.failed} failed{skipped}  ({seconds:.0f} s)")
    for told in COUNTS.findall(log.read_text(errors="replace")):
        say(textwrap.fill(told, 120, initial_indent="     ", subsequent_indent="       "))
    if tally.failed:
        say("\n".join(f"     | {line}" for line in what_failed(suite, log)))
    return tally


def failed_tests(suite: Suite) -> list[str]:
    """pytest's names of the tests that failed; none where the suite is no pytest, or died outside of a test."""
    if not suite.name.startswith("pytest:") or suite.junit is None or not suite.junit.exists():
        return []
    names = []
    for case in ET.parse(suite.junit).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            file = case.get("classname", "").replace(".", "/") + ".py"
            if not (ROOT / file).exists():
                return []
            names.append(f"{file}::{case.get('name')}")
    return names


def once_more(suite: Suite, tally: Tally) -> Tally:
    """A second run, alone on the machine and said: tests that bound a reaction time can lose against the suite beside
    them on two cores. Of a suite that says so only a few failed tests get it."""
    names = failed_tests(suite)
    log = log_of(suite)
    if REPORT.search(log.read_text(errors="replace")):
        say(f"==> {suite.name}: a sanitizer's report or a counterexample is not for a second run to forgive")
        return tally
    if suite.forgives is not None and not 0 < len(names) == tally.failed <= suite.forgives:
        return tally
    log.replace(log.with_suffix(".first.log"))  # what went wrong stays to be read
    if suite.forgives is None:
        say(f"==> {suite.name} failed beside others; once more, alone")
        return run(suite)
    say(f"==> {suite.name}: once more: {' '.join(names)}")
    kept = [part for part in suite.command if not part.startswith("tests/")]
    again = run(dataclasses.replace(suite, command=[*kept, *names]))
    return Tally(tally.passed + again.passed, again.failed, tally.skipped + again.skipped)


def build(directory: str, options: list[str], targets: list[str]) -> bool:
    """Configures and builds; failures are printed. ccache makes a second time quick."""
    started = time.monotonic()
    say(f"==> building {directory}")
    log = OUT / f"{directory}.log"
    for command in (
        ["cmake", "-S", ".", "-B", directory, "-G", "Ninja", *options],
        ["cmake", "--build", directory, *([] if not targets else ["--target", *targets])],
    ):
        with open(log, "ab") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
        if code != 0:
            say("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
            return False
    say(f"    {directory}: {time.monotonic() - started:.0f} s")
    return True


def is_wanted(suite: Suite, instrumented: bool) -> bool:
    label, _, name = suite.name.partition(":")
    return instrumented or label not in IN_EVERY_RUN or name.removesuffix("_test") in IN_EVERY_RUN[label]


def without_unfit_tests(suite: Suite, instrumented: bool) -> Suite:
    left_out = [UNFIT_FOR_A_SANITIZER.get(suite.name), None if instrumented else LONG_UNDER_A_SANITIZER.get(suite.name)]
    if not any(left_out):
        return suite
    return dataclasses.replace(suite, command=[*suite.command, f"--gtest_filter=-{':'.join(filter(None, left_out))}"])


def build_all(only: re.Pattern[str], instrumented: bool) -> Tally:
    """The instrumented builds. A build that fails counts as one failed test."""
    tally = Tally()
    debug = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1", "-DCMAKE_CXX_COMPILER=clang++"]
    # One tree for AddressSanitizer and the fuzzers: libFuzzer's coverage costs the tests less than a second build.
    wanted = {
        "build-asan": (
            ["-DPACELINE_FUZZERS=ON", "-DPACELINE_SANITIZE=fuzzer-no-link,address,undefined"],
            {
                "asan:": ["tests"] if instrumented else [f"{m}_test" for m in IN_EVERY_RUN["asan"]],
                "fuzz:": ["fuzzers"] if instrumented else [f"{m}_fuzz" for m in FUZZED],
            },
        ),
        "build-tsan": (
            ["-DPACELINE_SANITIZE=thread"],
            {"tsan:": [f"{m}_test" for m in (THREADED if instrumented else IN_EVERY_RUN["tsan"])]},
        ),
    }
    for directory, (options, labels) in wanted.items():
        targets = [t for label, names in labels.items() if only.search(label) or label in only.pattern for t in names]
        if not targets:
            continue
        ok = build(directory, [*debug, *options], targets)
        tally.add(Tally(passed=int(ok), failed=int(not ok)))
    return tally


def be_alone_in_this_tree() -> None:
    """Until the process ends: a second run would take the first one's results away."""
    OUT.parent.mkdir(exist_ok=True)
    lock = os.open(OUT.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            "run_suites: another run is under way in this tree; wait for it, or take a clone (git clone . ../other)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the suites whose name matches this regular expression")
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    parser.add_argument("--jobs", type=int, default=2, help="suites at a time")
    parser.add_argument("--instrumented", action="store_true", help="everything with sanitizers, all fuzzers")
    args = parser.parse_args()
    only = re.compile(args.only)
    if args.list:
        print("\n".join(s.name for s in all_suites()))
        return 0
    be_alone_in_this_tree()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    started = time.monotonic()
    total = build_all(only, args.instrumented)
    suites = [s for s in all_suites() if only.search(s.name) and is_wanted(s, args.instrumented)]
    suites = [without_unfit_tests(suite, args.instrumented) for suite in suites]
    say(f"==> {len(suites)} suites, {args.jobs} at a time")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        together = [s for s in suites if not s.alone]
        results = list(zip(together, pool.map(run, together)))
    results += [(suite, run(suite)) for suite in suites if suite.alone]
    finals, forgiven = [], []
    for suite, tally in results:
        if tally.failed and suite.name != "lint":
            first = titles_of_failed(suite)
            tally = once_more(suite, tally)
            again = titles_of_failed(suite) if tally.failed else []
            if set(again) <= set(first):  # else it went wrong in another way, which forgives nothing
                forgiven += [title for title in first if title not in again]
        finals.append((suite, tally))
        total.add(tally)
    unhappy = [suite.name for suite, tally in finals if tally.failed]
    if unhappy:
        say(f"==> failed: {', '.join(unhappy)}")
    if forgiven:
        say(
            "\n".join(
                [f"==> {len(forgiven)} failed at first and passed in a second run:", *(f"     {t}" for t in forgiven)]
            )
        )
    say(f"==> {time.monotonic() - started:.0f} s; logs in build/test-results/")
    if total.skipped:
        say(f"==> {total.skipped} skipped: tests that could not run here")
    say(f"{total.passed} passed, {total.failed} failed")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
