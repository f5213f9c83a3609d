"""`./dev test` sums its suites up: the last line is for programs to read, and the exit code says the same."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "dev"))

import run_suites  # noqa: E402

PASS, FAIL = "def test_a(): pass\n", "def test_b(): raise ValueError('b is wrong')\n"
SKIP = "import pytest\ndef test_c(): pytest.skip('not here')\n"


ONCE = """
import pathlib
def test_d():
    marker = pathlib.Path(__file__).with_suffix(".failed")
    if not marker.exists():
        marker.touch()
        print("{}")
        raise ValueError("late")
"""


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("nothing", "1 passed, 0 failed"),
        ("WARNING: ThreadSanitizer: data race (pid=1)", "0 passed, 1 failed"),
        ("==1==ERROR: AddressSanitizer: heap-use-after-free", "0 passed, 1 failed"),
        ("a.cc:3:5: runtime error: signed integer overflow", "0 passed, 1 failed"),
    ],
)
def test_a_second_run_forgives_what_was_late_but_no_sanitizers_report(tmp_path, monkeypatch, capfd, said, last):
    file = tmp_path / "test_once.py"
    file.write_text(ONCE.format(said))
    monkeypatch.setattr(run_suites, "OUT", tmp_path / "results")
    suite = run_suites.pytest_suite("once", sys.executable, [str(file)])
    monkeypatch.setattr(run_suites, "all_suites", lambda: [suite])
    monkeypatch.setattr(run_suites, "build_all", lambda *_: run_suites.Tally())
    monkeypatch.setattr(sys, "argv", ["run_suites.py"])
    assert run_suites.main() == (0 if "0 failed" in last else 1)
    assert capfd.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("sources", "last", "code"),
    [
        ([PASS, PASS], ["2 passed, 0 failed"], 0),
        ([PASS, SKIP + PASS], ["==> 1 skipped: tests that could not run here", "2 passed, 0 failed"], 0),
        ([PASS, SKIP + FAIL], ["==> 1 skipped: tests that could not run here", "1 passed, 1 failed"], 1),
        ([SKIP], ["==> 1 skipped: tests that could not run here", "0 passed, 0 failed"], 1),
        (["import nothing_of_that_name\n"], ["0 passed, 1 failed"], 1),
    ],
)
def test_the_last_line_is_passed_and_failed(tmp_path, monkeypatch, capfd, sources, last, code):
    suites = []
    monkeypatch.setattr(run_suites, "OUT", tmp_path / "results")
    for number, source in enumerate(sources):
        file = tmp_path / f"test_{number}.py"
        file.write_text(source)
        suites.append(run_suites.pytest_suite(f"made-up-{number}", sys.executable, [str(file)], alone=number == 0))
    monkeypatch.setattr(run_suites, "all_suites", lambda: suites)
    monkeypatch.setattr(run_suites, "build_all", lambda *_: run_suites.Tally())
    monkeypatch.setattr(sys, "argv", ["run_suites.py"])
    assert run_suites.main() == code
    lines = capfd.readouterr().out.splitlines()
    assert lines[-len(last) :] == last
    assert ("skipped" in "".join(lines[-2:])) == (len(last) == 2)
    assert ("b is wrong" in "\n".join(lines)) == (FAIL in "".join(sources))
