"""The convergence benchmark: what it runs and judges, and all of it, small, on CPUs."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "gpu" / "convergence.py"
sys.path.insert(0, str(BENCH.parent))

import convergence  # noqa: E402


def result_of(scores, lower=True):
    runs = [
        {"codec": codec, "optimizer": "sgd", "seed": seed, "points": [[10, 1.0, 2.0, score]]}
        for codec, values in scores.items()
        for seed, score in enumerate(values)
    ]
    return {"runs": runs, "lower_is_better": lower}


def test_a_codec_keeps_up_within_one_percent_or_two_deviations():
    rows = {r["codec"]: r for r in convergence.verdicts(result_of({"exact": [1.0, 1.0, 1.0], "fp16": [1.009]}))}
    assert rows["fp16"]["keeps_up"] and rows["fp16"]["allowed"] == 0.01
    rows = {r["codec"]: r for r in convergence.verdicts(result_of({"exact": [1.0, 1.0, 1.0], "topk": [1.011]}))}
    assert not rows["topk"]["keeps_up"]
    rows = {r["codec"]: r for r in convergence.verdicts(result_of({"exact": [0.9, 1.0, 1.1], "topk": [1.19]}))}
    assert rows["topk"]["keeps_up"]


def test_accuracy_may_fall_by_half_a_point():
    scores = {"exact": [0.95], "int8": [0.9451], "topk": [0.9449]}
    rows = {r["codec"]: r for r in convergence.verdicts(result_of(scores, lower=False))}
    assert rows["int8"]["keeps_up"] and not rows["topk"]["keeps_up"]


def test_exact_comes_before_what_is_compared_with_it():
    args = argparse.Namespace(seeds=3, other_seeds=1, optimizers=["sgd", "adamw"], codecs=list(convergence.CODECS))
    runs = convergence.runs_of(args)
    assert runs[0] == ("exact", "sgd", 0) and ("topk-momentum", "adamw", 0) not in runs
    assert sum(codec == "exact" for codec, _, _ in runs) == 6 and sum(codec == "int8" for codec, _, _ in runs) == 2


def test_small_on_cpus(tmp_path):
    command = [sys.executable, str(BENCH), "--smoke", "--tasks", "gpt", "--optimizers", "sgd", "--seeds", "1"]
    command += ["--steps", "10", "--codecs", "exact", "fp16", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "convergence-gpt.json").read_text())
    exact, fp16 = result["runs"]
    assert [p[0] for p in exact["points"]] == list(range(1, 11))
    assert exact["points"][-1][3] < exact["points"][0][3]  # it learns
    assert fp16["points"][-1][3] != exact["points"][-1][3]  # it travelled by the codec
    assert abs(fp16["points"][-1][3] - exact["points"][-1][3]) < 0.05
    assert "| sgd | fp16 | 1 |" in done.stdout
