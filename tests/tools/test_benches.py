"""The benchmarks run and write what their pages quote: small, and nothing is said of how fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "lab")]

from lab_tools import in_a_lab  # noqa: E402


def bench(name, *words):
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def figures(done, path, codes=(0,)):
    assert done.returncode in codes, done.stdout + done.stderr
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if text.startswith('{"') else json.loads(text)


@in_a_lab
def test_links(tmp_path):
    out = tmp_path / "links.json"
    done = bench("links", "--rows", "1:2x1", "--mib", 1, "--seconds", 0.1, "--json", out)
    (row,) = figures(done, out, codes=(0, 1))  # 1: short of its goal, on a busy machine
    assert row["bytes"] == 1 << 20 and row["us_p50"] > 0 and row["cores"] > 0
    assert row["floor_share"] == pytest.approx(row["floor_us"] / row["us_p50"])
    assert row["bytes_measured"] == pytest.approx(row["bytes_predicted"], rel=0.02)


def test_codecs():
    """Against one read of the buffer, in the same thread and the same run."""
    words = ("--benchmark_filter=topk/1M_fp16|dense", "--benchmark_format=json")
    command = [ROOT / "build" / "bin" / "codec_bench", *words]
    assert command[0].exists(), f"{command[0]} is not built: libbenchmark-dev, then ./dev build"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"].split("/iterations")[0]: row for row in json.loads(done.stdout)["benchmarks"]}
    assert "topk/1M_fp16" in rows and any(name.startswith("dense") for name in rows), rows.keys()
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["reference_ms"], rel=0.5)  # of medians, of ratios
    assert rows["topk/1M_fp16"]["kept/k"] == 1 and rows["topk/1M_fp16"]["reference_GB/s"] > 0


@in_a_lab
@pytest.mark.parametrize("nodes", [2, 3])
def test_the_wire_of_cuda_tensors(nodes):
    """With three nodes sums go back."""
    program, lab = ROOT / "build" / "bin", ("lab", "--nodes", str(nodes), "--rate", "1gbit", "--no-calibration", "--")
    words = ("--threads", "1", "--burst", "--window", "2", "--bytes", "262144", "--piece", "131072", "--rounds", "1")
    command = [program / "paceline", *lab, program / "wire_threads_bench", *words, "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "each way out of a node" in line]
    assert float(line.split(":")[1].split()[0]) > 0, line
    (ranks,) = [line.split(":")[1].split() for line in done.stdout.splitlines() if "a burst by rank" in line]
    assert len(ranks) == nodes and all(float(one) > 0 for one in ranks), ranks


def test_memory(tmp_path):
    out = tmp_path / "memory.json"
    rows = figures(bench("memory", "--mib", 8, "--json", out), out)
    assert {(r["nodes"], r["slots"], r["codec"]) for r in rows} == {
        (nodes, slots, codec) for nodes, slots in ((4, 1), (2, 2)) for codec in ("exact", "fp16", "topk")
    }
    assert all(0 <= row["buffers"] <= 2 for row in rows), rows


def test_memory_of_a_training_step(tmp_path):
    """Each path on each cluster and model, from its own processes; what it took is for the page to say."""
    out = tmp_path / "memory.json"
    rows = figures(bench("memory", "--ddp", "--mib", 1, "--steps", 6, "--json", out), out, codes=(0, 1))
    assert [(r["nodes"], r["slots"], r["buckets"], r["path"]) for r in rows] == [
        (nodes, slots, buckets, path)
        for nodes, slots in ((4, 1), (2, 2))
        for buckets in ("alike", "one large", "single")
        for path in ("gloo", "exact", "fp16", "topk")
    ]
    for row in rows:
        largest = 4 if row["buckets"] == "one large" else 1
        assert row["bound"] == 2 * largest, "a bucket for each layer"
        parameters = {"alike": 8, "one large": 12, "single": 1}[row["buckets"]]
        encoded = parameters / row["slots"] if row["path"] == "topk" else 0
        assert row["residuals"] >= 2 * encoded and (row["residuals"] > 0) == (encoded > 0), row
        assert row["scratch"] > 0 or row["path"] in ("gloo", "exact")


def test_accuracy(tmp_path):
    out = tmp_path / "accuracy.json"
    done = bench("accuracy", "--seeds", 1, "--steps", 3, "--json", out)
    said = figures(done, out, codes=(0, 1))  # three steps teach little
    assert said["means"].keys() == {"none", "fp16", "topk", "topk-fp16"}
    assert said["samples"] == 2500
    assert said["means"]["none"] == pytest.approx(said["means"]["fp16"], abs=0.02)
    losses = {result["codec"]: result["loss"] for result in said["results"]}
    assert losses["topk"] != losses["none"] and losses["topk-fp16"] != losses["topk"], "each travels by its own codec"


def test_the_cost_of_a_hook(tmp_path):
    out = tmp_path / "hook.json"
    rows = {row["name"]: row for row in figures(bench("hook_cost", "--buckets", 4, "--json", out), out)}
    assert rows["CPU, fp16"]["buckets"] == 4 and rows["CPU, fp16"]["library_us"] > 0
    assert all(row["python_us"] > 0 for row in rows.values())


@in_a_lab
def test_overlap_says_when_its_time_is_over(tmp_path):
    words = ("--rates", "1gbit", "--nodes", 2, "--codecs", "exact", "--limit", 0.5)
    done = bench("overlap", *words, "--json", tmp_path / "overlap.json")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "overlap: 1gbit was not done after 0.5 s; give a larger --limit" in done.stderr
