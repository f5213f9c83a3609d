"""The GPU suite (tests/gpu), as far as no GPU is needed: what it prints, and that what it calls a check has run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
LAB = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""
TEST = """
from pathlib import Path
import lab_launch, pytest
lab_launch.PROGRAM = lab_launch.HERE = Path(__file__).parent
lab_launch.PROGRAM /= "lab"
suite = lab_launch.LabSuite("checks_it.py", 2, slots=2, without=["later"], PACELINE_LANES="4")

@pytest.mark.anywhere
def test_names():
    assert suite.names == ["first", "last"]
    assert "runs first,last" in suite.result().output
"""
CHECKS = """
import os
@check
def first(): pass
@check
def later(): pass
@check
def last(): pass
print("runs", os.environ["CHECKS_ONLY"])
print("figure: waited 1.25 ms of 20.00 ms a step", flush=True)
"""


def test_what_checks_have_measured_is_printed_though_all_is_well(tmp_path):
    (tmp_path / "lab").write_text(LAB)
    (tmp_path / "lab").chmod(0o755)
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "checks_it.py").write_text(CHECKS.replace("\n@check", "\ncheck = lambda f: f\n@check", 1))
    environment = {**os.environ, "PYTHONPATH": str(GPU), "PYTEST_ADDOPTS": ""}
    environment.pop("CHECKS_ONLY", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", str(tmp_path), "test_it.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "checks_it.py 2 × 2 PACELINE_LANES=4: waited 1.25 ms of 20.00 ms a step" in lines, done.stdout


def checks():
    for path in sorted(GPU.glob("checks_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list):
                yield pytest.param(node, id=f"{path.stem}.{node.name}")


@pytest.mark.parametrize("function", list(checks()))
def test_no_check_is_ok_where_it_does_nothing(function):
    """Layouts for which it claims nothing leave it out (LabSuite's `without`)."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    assert not (len(body) == 1 and isinstance(body[0], ast.If)), "all of it stands under a condition"
    for statement in function.body:
        leaves = isinstance(statement, ast.If) and any(isinstance(inner, ast.Return) for inner in statement.body)
        assert not leaves, f"line {statement.lineno} leaves it"
