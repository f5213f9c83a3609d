#!/usr/bin/env python3
"""Checks form: clang-format, clang-tidy, ruff, and words that must not stand in the tree.

clang-tidy is slow, so a file that was clean is not checked again until it, a header that it includes, or the
configuration changes (keys are kept in $PACELINE_CACHE/tidy).

    lint.py [--fix] [--quick | --recent]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline") / "tidy"
#: What clang-format shapes: clang-tidy, which needs a compile command of clang's, leaves the device's code out.
CPP = ("*.cc", "*.h", "*.cu", "*.cuh")
#: Where words must not stand: whatever people write, the programs without a suffix among it.
TEXT = (*CPP, "*.py", "*.sh", "*.md", "*.txt", "*.toml", "dev", ".ci/run", "CMakeLists.txt", "*.cmake")
#: What `--recent` looks at, newest first.
LAST_COMMITS, MOST_RECENT = 10, 12
#: Promises and traces that have no place in a finished tree.
OWN_PATHS = "|".join(re.escape(f"{path}/") for path in (ROOT, Path.home()))
# A path counts where it begins: "/src/" as a root is no part of "tools/src/".
FORBIDDEN = re.compile(rf"\b(TODO|FIXME|XXX)\b|(?<![\w./*}}$-])(?:{OWN_PATHS})")


def tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in out.stdout.splitlines() if (ROOT / line).is_file()]


def clang_format(fix: bool) -> list[str]:
    files = tracked(*CPP)
    if fix:
        subprocess.run(["clang-format", "-i", *map(str, files)], cwd=ROOT, check=True)
        return []
    done = subprocess.run(
        ["clang-format", "--dry-run", "-Werror", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return sorted({line for line in done.stderr.splitlines() if "error:" in line})[:40]


def ruff(fix: bool) -> list[str]:
    if fix:
        subprocess.run([str(ROOT / ".venv/bin/ruff"), "format", "--quiet", "."], cwd=ROOT, check=True)
    problems = []
    for command in (
        ["check", "--quiet", "--output-format=concise", *(["--fix"] if fix else [])],
        ["format", "--check"],
    ):
        done = subprocess.run(
            [str(ROOT / ".venv/bin/ruff"), *command, "."], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            problems += (done.stdout + done.stderr).splitlines()[:40]
    return problems


def forbidden_words() -> list[str]:
    problems = []
    for path in tracked(*TEXT):
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if FORBIDDEN.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return problems


def dependencies() -> dict[str, list[str]]:
    """Headers of every object, as the last build recorded them."""
    done = subprocess.run(["ninja", "-C", "build", "-t", "deps"], cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = {}
    headers: list[str] = []
    for line in done.stdout.splitlines():
        if line and not line.startswith(" "):
            headers = found.setdefault(line.split(":")[0], [])
        elif line.strip():
            headers.append(line.strip())
    return found


def tidy_key(source: Path, headers: list[str]) -> str:
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    for path in [source, *sorted(ROOT / "build" / h for h in headers)]:
        resolved = path.resolve()
        if resolved.is_relative_to(ROOT):
            digest.update(str(resolved.relative_to(ROOT)).encode())
            digest.update(resolved.read_bytes())
    return digest.hexdigest()


def changed_lately() -> set[Path]:
    """Sources that the last commits, or nobody yet, changed: the newest ones, as many as a few minutes allow."""
    commands = (
        ["git", "ls-files", "-mo", "--exclude-standard", "--", "*.cc"],
        ["git", "log", "-n", str(LAST_COMMITS), "--name-only", "--format=", "--", "*.cc"],
    )
    found: dict[Path, None] = {}
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found |= {ROOT / line: None for line in done.stdout.splitlines() if is_tidied(ROOT / line)}
    return set(list(found)[:MOST_RECENT])


def is_tidied(source: Path) -> bool:
    # The test framework's macros take most of the time and of the findings.
    return source.is_file() and not source.name.endswith(("_test.cc", "_fuzz.cc"))


def clang_tidy(only: set[Path] | None = None) -> list[str]:
    """The findings in these sources; None: in all of them."""
    commands = json.loads((ROOT / "build/compile_commands.json").read_text())
    headers_of = dependencies()
    CACHE.mkdir(parents=True, exist_ok=True)
    stale = []
    for entry in commands:
        source = Path(entry["file"])
        if not source.is_relative_to(ROOT) or "/build" in str(source.relative_to(ROOT)):
            continue
        if not is_tidied(source) or (only is not None and source not in only):
            continue
        output = re.search(r" -o (\S+)", entry["command"])
        key = tidy_key(source, headers_of.get(output.group(1), []) if output else [])
        if not (CACHE / key).exists():
            stale.append((source, key))

    def check(job: tuple[Path, str]) -> list[str]:
        source, key = job
        done = subprocess.run(
            ["clang-tidy", "-p", "build", "--quiet", str(source)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            (CACHE / key).touch()
            return []
        return [line for line in done.stdout.splitlines() if re.search(r"(error|warning):", line)] or [
            f"{source}: clang-tidy failed: {done.stderr[-300:]}"
        ]

    print(f"clang-tidy: {len(stale)} of {len(commands)} files to check", flush=True)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return sorted({line for lines in pool.map(check, stale) for line in lines})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="let clang-format and ruff rewrite what they can")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--quick", action="store_true", help="leave out clang-tidy (minutes when nothing is cached)")
    some.add_argument("--recent", action="store_true", help="clang-tidy for what the last commits changed alone")
    args = parser.parse_args()
    failed = False
    for name, problems in (
        ("clang-format", clang_format(args.fix)),
        ("ruff", ruff(args.fix)),
        ("words", forbidden_words()),
        *([] if args.quick else [("clang-tidy", clang_tidy(changed_lately() if args.recent else None))]),
    ):
        print(f"{name}: {'clean' if not problems else f'{len(problems)} problems'}", flush=True)
        for problem in problems[:60]:
            print("  " + problem)
        failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
