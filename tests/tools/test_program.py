"""The `paceline` command of an installed package: how it hands over to the program beside it."""

import shutil
import subprocess
import sys
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


def command(package, *words):
    start = "import paceline._cli; paceline._cli.main()"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
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
