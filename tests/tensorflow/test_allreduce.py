"""The all-reduce for TensorFlow between real processes. Run by the interpreter of each TensorFlow in turn; TensorFlow
itself is imported in the ranks only (ranks.py), which run all cases in one go, since importing it takes seconds.
"""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "launch"))
from not_built import expect_one_warning_each, names_and_values  # noqa: E402

RANKS = HERE / "ranks.py"
ENDINGS = HERE / "endings.py"
SECONDS = 240
DEADLY = "a_killed_rank_is_named"
LEFT_OUT = "left_out_by_one_rank"
LEFT = "left_by_one_rank"
TOPK = "unnamed_operations_keep_no_residual"
FP16 = "fp16_sends_half_of_the_bytes"


def names():
    """The cases that share a run; the others want settings of their own, and what ends a job is in endings.py."""
    tree = ast.parse(RANKS.read_text())
    cases = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    return [name for name in cases if name not in (TOPK, FP16)]


def run_ranks(directory, size, cases, nodes=False, script=RANKS, **settings):
    environment = dict(os.environ, **settings)
    environment["PYTHONPATH"] = str(HERE.parents[1] / "python") + os.pathsep + environment.get("PYTHONPATH", "")
    environment.setdefault("PACELINE_QUIET", "1")
    environment["PACELINE_SECRET"] = "a secret of these tests"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(directory), str(rank), str(size), *cases],
            # Nodes of their own when the ranks are to use what lies between nodes.
            env=environment | ({"PACELINE_NODE_ID": f"node{rank}"} if nodes else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = []
    try:
        for rank in ranks:
            try:
                outputs.append(rank.communicate(timeout=SECONDS)[0])
            except subprocess.TimeoutExpired:
                rank.kill()
                outputs.append("timed out\n" + rank.communicate()[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    results = []
    for rank in range(size):
        path = directory / f"{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else {})
    return results, outputs, [rank.returncode for rank in ranks]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("two"), 2, names())


@pytest.mark.parametrize("case", names())
def test_two_ranks(two_ranks, case):
    results, outputs, _ = two_ranks
    for rank, result in enumerate(results):
        assert case in result, f"rank {rank} did not come here:\n{outputs[rank][-3000:]}"
        assert result[case] == "ok", f"rank {rank}:\n{result[case]}"


def test_ranks_end_well(two_ranks):
    _, outputs, codes = two_ranks
    assert codes == [0, 0], "\n".join(outputs)[-3000:]


def test_what_is_known_but_not_built_is_mentioned_once_on_rank_0(tmp_path):
    asked, cases = names_and_values(), ["eager_operations"]
    outcome = run_ranks(tmp_path, 2, cases, PACELINE_QUIET="0", **asked)
    check(outcome, cases)
    expect_one_warning_each(asked, "\n".join(outcome[1]))


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank(tmp_path, victim):
    results, outputs, codes = run_ranks(
        tmp_path, 3, ["eager_operations", DEADLY], script=ENDINGS, nodes=victim == 0, VICTIM=str(victim)
    )
    for rank in {0, 1, 2} - {victim}:
        assert results[rank].get(DEADLY) == "ok", f"rank {rank}:\n{results[rank].get(DEADLY)}\n{outputs[rank][-3000:]}"
    assert codes[victim] == -9


def check(outcome, cases):
    results, outputs, codes = outcome
    for rank, result in enumerate(results):
        for case in cases:
            assert result.get(case) == "ok", f"rank {rank}, {case}:\n{result.get(case)}\n{outputs[rank][-3000:]}"
    assert codes == [0] * len(codes), "\n".join(outputs)[-3000:]


def test_left_out_by_one_rank(tmp_path):
    check(run_ranks(tmp_path, 2, [LEFT_OUT], script=ENDINGS, PACELINE_TIMEOUT="5"), [LEFT_OUT])


def test_left_by_one_rank(tmp_path):
    check(run_ranks(tmp_path, 2, ["eager_operations", LEFT], script=ENDINGS, PACELINE_TIMEOUT="100"), [LEFT])


def test_unnamed_operations_under_topk(tmp_path):
    check(run_ranks(tmp_path, 2, [TOPK], nodes=True, PACELINE_CODEC="topk"), [TOPK])


def test_fp16_from_the_settings(tmp_path):
    check(run_ranks(tmp_path, 2, [FP16], nodes=True, PACELINE_CODEC="fp16"), [FP16])


def test_shut_down_while_threads_call(tmp_path):
    """One rank: no other one makes a call wait, so a thread nearly always is inside of one."""
    case = "shut_down_while_threads_call"
    check(run_ranks(tmp_path, 1, [case], script=ENDINGS), [case])


def test_a_forked_child_leaves_alone(tmp_path):
    case = "a_forked_child_leaves_alone"
    check(run_ranks(tmp_path, 2, [case], script=ENDINGS), [case])


def test_a_value_that_one_rank_alone_uses(tmp_path):
    case = "a_value_that_one_rank_alone_uses"
    check(run_ranks(tmp_path, 2, [case], script=ENDINGS, PACELINE_TIMEOUT="5"), [case])


@pytest.mark.parametrize(
    "case",
    [
        "an_interrupt_ends_a_wait_that_nobody_else_ends",
        "a_handler_of_the_scripts_own_is_left_alone",
        "a_wait_that_ends_soon_is_not_ended",
    ],
)
def test_interrupts(tmp_path, case):
    began = time.monotonic()
    check(run_ranks(tmp_path, 2, [case], script=ENDINGS, PACELINE_TIMEOUT="100"), [case])
    assert time.monotonic() - began < 60


def test_switched_off(tmp_path):
    """Nothing else would carry its all-reduces, so that a script is told at once; no rank waits for another."""
    code = (
        "import paceline.tensorflow as pl\n"
        "try:\n    pl.init(rank=0, size=2)\nexcept pl.UnsupportedError as error:\n    print('refused:', error)\n"
        "print(pl.is_initialized())\n"
        "try:\n    pl.allreduce([1.0])\nexcept pl.InvalidArgumentError as error:\n    print('refused:', error)\n"
    )
    environment = dict(os.environ, PACELINE_DISABLE="1", PACELINE_LIBRARY=str(tmp_path / "none.so"))
    environment["PYTHONPATH"] = str(HERE.parents[1] / "python") + os.pathsep + environment.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0].startswith("refused: PACELINE_DISABLE is set") and lines[0].endswith("unset it"), lines
    assert lines[1] == "False" and "call paceline.tensorflow.init() first" in lines[2], lines
