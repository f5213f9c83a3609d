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
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == last
    forgiven = ["==> 1 failed at first and passed in a second run:", "     pytest:once: test_once.test_d"]
    assert (lines[-4:-2] == forgiven) == (said == "nothing"), "by name, where one looks"
    assert ("second run:" in "".join(lines)) == (said == "nothing")


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("  what():  a rank is lost", True),
        ("RuntimeError: no memory", True),
        ("ValueError", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("rank 1 died: Aborted", True),
        ("Signal 6 (SIGABRT) received", True),
        ("[paceline] rank 1 (host b) is gone", True),
        ('  File "train.py", line 3, in step', False),
        ("no errors so far", False),
        ("somewhat(): fine", False),
    ],
)
def test_a_processes_words_come_before_its_launchers(line, tells):
    end = [f"the launcher's {i}" for i in range(20)]
    assert run_suites.gist(["begins", line, *end]) == ([line] if tells else []) + end


@pytest.mark.parametrize(("fails", "forgives", "runs"), [(2, None, 3), (2, 2, 2), (3, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_a_second_run_is_for_the_few_that_failed(tmp_path, monkeypatch, capfd, fails, forgives, runs):
    """How often a test that passed ran says which it was: the failed ones once more, everything, or nothing."""
    names = [f"late_{i}" for i in range(fails)]
    (tmp_path / "tests").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "tests" / "test_few.py").write_text(
        "import pathlib\nimport pytest\n"
        "def ran(name):\n"
        "    with open(pathlib.Path(__file__).with_suffix('.ran'), 'a') as file: file.write(name + ' ')\n"
        "    return pathlib.Path(__file__).with_suffix('.ran').read_text().split().count(name)\n"
        "def test_good(): ran('good')\n"
        f"@pytest.mark.parametrize('name', {names})\n"
        "def test_late(name): assert ran(name) == 2\n"
    )
    monkeypatch.setattr(run_suites, "ROOT", tmp_path)
    monkeypatch.setattr(run_suites, "OUT", tmp_path / "results")
    suite = run_suites.pytest_suite("few", sys.executable, ["tests/test_few.py"], forgives=forgives)
    first = run_suites.run(suite)
    assert (first.passed, first.failed) == (1, fails)
    tally = run_suites.once_more(suite, first)
    ran = (tmp_path / "tests" / "test_few.ran").read_text().split()
    assert [ran.count("good"), ran.count("late_0")] == {1: [1, 1], 2: [1, 2], 3: [2, 2]}[runs]
    assert (tally.passed, tally.failed) == ((1, fails) if runs == 1 else (1 + fails, 0))
    assert ("once more" in capfd.readouterr().out) == (runs > 1)


def test_of_those_that_ran_twice_only_the_forgiven_are_named(tmp_path, monkeypatch, capfd):
    """Not what failed twice, nor a suite's that died in its second run; a check without tests is named itself."""
    monkeypatch.setattr(run_suites, "OUT", tmp_path / "results")
    (tmp_path / "test_twice.py").write_text(
        ONCE.format("") + "def test_always(): raise ValueError('wrong')\n"  # test_d passes the second time
    )
    (tmp_path / "test_dies.py").write_text(
        ONCE.format("")
        + "import os\ndef test_e():\n    if marker_of().exists(): os._exit(7)\n    marker_of().touch()\n"
        "def marker_of(): return pathlib.Path(__file__).with_suffix('.first')\n"
    )
    marker = tmp_path / "ran"
    script = f"import pathlib, sys\np = pathlib.Path({str(marker)!r})\nif not p.exists(): p.touch(); sys.exit(1)\n"
    suites = [
        run_suites.pytest_suite("twice", sys.executable, [str(tmp_path / "test_twice.py")]),
        run_suites.pytest_suite("dies", sys.executable, [str(tmp_path / "test_dies.py")]),
        run_suites.Suite("walk", [sys.executable, "-c", script]),
    ]
    monkeypatch.setattr(run_suites, "all_suites", lambda: suites)
    monkeypatch.setattr(run_suites, "build_all", lambda *_: run_suites.Tally())
    monkeypatch.setattr(sys, "argv", ["run_suites.py"])
    assert run_suites.main() == 1
    lines = capfd.readouterr().out.splitlines()
    begin = lines.index("==> 2 failed at first and passed in a second run:")
    assert lines[begin + 1 : -2] == ["     pytest:twice: test_twice.test_d", "     walk"]
    assert "==> failed: pytest:twice, pytest:dies" in lines


#: In a property's words, a sanitizer's, and nothing of the kind. Hypothesis has its say itself.
PROPERTY = "hypothesis.given(strategies.integers())(lambda x: 1 / (x - x))()"
FOUND = [
    ("print('Falsifiable after 3 tests and 1 shrink')", False),
    (f"import hypothesis, hypothesis.strategies as strategies; {PROPERTY}", False),
    ("print('WARNING: ThreadSanitizer: data race')", False),
    ("print('took 3 s instead of 2')", True),
]


@pytest.mark.parametrize(("first", "once_more"), FOUND, ids=["rapidcheck", "hypothesis", "sanitizer", "none"])
def test_a_counterexample_is_not_forgiven(tmp_path, monkeypatch, capfd, first, once_more):
    """A property that fails for some of its random inputs would hold for the next ones."""
    monkeypatch.setattr(run_suites, "OUT", tmp_path)
    script = f"import pathlib, sys\np = pathlib.Path({str(tmp_path / 'ran')!r})\nif p.exists(): sys.exit(0)\n"
    suite = run_suites.Suite("cpp:flaky_test", [sys.executable, "-c", f"{script}p.touch()\n{first}\nsys.exit(1)"])
    tally = run_suites.once_more(suite, run_suites.run(suite))
    assert (tally.passed, tally.failed) == ((1, 0) if once_more else (0, 1))
    assert ("not for a second run to forgive" in capfd.readouterr().out) != once_more


def test_what_a_simulation_injected_is_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(run_suites, "OUT", tmp_path)
    told = "2600 jobs: 9 operations right; packets sent 5, lost 3, " + "duplicated 2, " * 20
    suite = run_suites.Suite("cpp:simulation_test", [sys.executable, "-c", f"print('seed 1'); print({told!r})"])
    assert run_suites.run(suite).failed == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("ok   cpp:simulation_test")
    assert " ".join(lines[1:]).split() == told.split() and max(map(len, lines)) <= 120


def test_every_file_of_torchs_is_in_one_suite():
    suites = {suite.name: suite for suite in run_suites.all_suites()}
    for shared, timed, wanted in (
        ("pytest:torch", "pytest:torch-timed", {str(p.relative_to(ROOT)) for p in ROOT.glob("tests/torch/test_*.py")}),
        ("pytest:torch-1.13", "pytest:torch-1.13-timed", set(run_suites.TORCH_1_13)),
    ):
        files = [[part for part in suites[name].command if part.startswith("tests/")] for name in (shared, timed)]
        assert sorted(files[0] + files[1]) == sorted(wanted)
        assert not suites[shared].alone and suites[timed].alone and len(files[1]) > 3
        assert suites[shared].forgives + suites[timed].forgives == 2, "of all of torch's tests"


def test_what_takes_much_memory_runs_alone():
    suites = run_suites.all_suites()
    assert {suite.name for suite in suites if suite.alone} >= {f"cpp:{name}" for name in run_suites.HUNGRY}
    large = [suite for suite in suites if "tests/torch/test_large.py" in suite.command]
    assert [suite.name for suite in large] == ["pytest:torch-timed", "pytest:torch-1.13-timed"], "with every torch"
    assert all(suite.alone for suite in large)


def test_under_a_sanitizer_what_is_long_is_left_out_but_with_instrumented_and_what_can_not_run_always():
    long, unfit = (run_suites.Suite(f"asan:{name}_test", ["program"]) for name in ("codec", "capi"))
    for suite, instrumented, left_out in (
        (long, False, True),
        (long, True, False),
        (unfit, False, True),
        (unfit, True, True),
    ):
        command = run_suites.without_unfit_tests(suite, instrumented).command
        assert command[0] == "program" and (len(command) == 2) == left_out
        assert not left_out or command[1].startswith("--gtest_filter=-")


def test_every_fuzzer_runs():
    places = (run_suites.ROOT / name for name in ("src", "adapters"))
    there = {path.stem.removesuffix("_fuzz") for place in places for path in place.rglob("*_fuzz.cc")}
    assert there == set(run_suites.FUZZED)


def test_modules_with_threads_run_under_thread_sanitizer():
    """In every run those that it can afford, the front ends' queue among them; with --instrumented all."""
    every = run_suites.IN_EVERY_RUN["tsan"]
    assert set(every) <= set(run_suites.THREADED)
    assert {"agreement", "engine", "wire_tcp", "wire_shm", "base"} <= set(every)
    for name in run_suites.THREADED:
        suite = run_suites.Suite(f"tsan:{name}_test", [])
        assert run_suites.is_wanted(suite, instrumented=True)
        assert run_suites.is_wanted(suite, instrumented=False) == (name in every)


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
