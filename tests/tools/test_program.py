"""The `paceline` command of an installed package: how it hands over to the program beside it."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path):
    """The package as a wheel has it, without its program."""
    package = tmp_path / "site" / "paceline"
    shutil.copytree(ROOT / "python" / "paceline", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "bin").mkdir()
    return package


def command(package, *words, python=sys.executable):
    start = "import paceline._cli; paceline._cli.main()"
    return subprocess.run(
        [python, "-c", start, *words],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_program_gets_its_words_and_its_executable_bit(package):
    shutil.copy(ROOT / "build/bin/paceline", package / "bin" / "paceline")
    (package / "bin" / "paceline").chmod(0o644)
    assert command(package, "run", "-np", "1", "echo", "two words").stdout == "two words\n"


def test_the_bench_s_peer_is_the_package_s_python(package):
    """Where no environment is active, too. One without torch is named, and no other one is taken in its place."""
    shutil.copy(ROOT / "build/bin/paceline", package / "bin" / "paceline")
    venv.create(package.parent / "environment", symlinks=True, with_pip=False)
    python = package.parent / "environment" / "bin" / "python"
    done = command(package, "bench", "allreduce", "--np", "2", "--bytes", "4", "--vs", "gloo", python=python)
    assert done.returncode != 0
    assert f"{python}: No module named 'torch'" in done.stderr, done.stderr
    assert f"{python} has ended" in done.stderr and "by --python" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_there_is_named(package):
    done = command(package, "doctor")
    assert done.returncode == 1
    assert done.stderr.startswith(f"paceline: the paceline program is in neither {package}/bin"), done.stderr


def test_another_machine_s_program_is_named(package):
    """As on a processor of another kind."""
    program = package / "bin" / "paceline"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    done = command(package, "doctor")
    assert done.returncode == 1
    assert done.stderr == f"paceline: {program}: Exec format error\n"
