"""The training benchmark for GPUs, where there is none: its floor, its plan, and all of it, small, on CPUs."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "bench" / "gpu" / "train.py"
sys.path.insert(0, str(TRAIN.parent))

import sums  # noqa: E402
import train  # noqa: E402
import train_floor  # noqa: E402
import wire_bytes  # noqa: E402

#: A path with a setting of its own: values of top-k in two bytes.
_HALF = "topk@PACELINE_TOPK_FP16=1"


def run(*arguments, timeout=400):
    command = [sys.executable, str(TRAIN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_floor_of_a_fast_line_is_the_arithmetic():
    trace = [(0.01, 1e6), (0.02, 1e6)]
    assert train_floor.floor_seconds(trace, 0.001, 0.025, 1e12) == pytest.approx(0.025)


def test_ready_times_are_those_of_steps_in_a_row():
    assert train_floor.ready_in_a_stretch([0.04, 0.07], 0.083, 0.077) == pytest.approx([0.034, 0.064])
    assert train_floor.ready_in_a_stretch([0.04, 0.07], 0.05, 0.077) == [0.04, 0.07], "the host was the slower one"


def test_floor_counts_what_is_left_from_each_bucket_on():
    line = 1e9
    # The first bucket alone takes longer than all that comes after it is ready.
    assert train_floor.floor_seconds([(0.01, 5e8), (0.02, 1e6)], 0.0, 0.0, line) == pytest.approx(0.01 + 0.501)
    # The last one decides.
    assert train_floor.floor_seconds([(0.01, 1e6), (0.5, 2e8)], 0.003, 0.0, line) == pytest.approx(0.703)


def test_floor_without_a_barrier_is_the_busier_of_arithmetic_and_link():
    assert train_floor.floor_without_barrier(5e8, 0.1, 1e9) == pytest.approx(0.5)
    assert train_floor.floor_without_barrier(5e7, 0.1, 1e9) == pytest.approx(0.1)


def test_no_order_beats_a_link_that_has_nothing_to_carry():
    line = 1e9
    # The last to get ready is wanted first, all the rest of the step after it: the link rests from then on.
    step = {"ready": [0.00, 0.04], "length": [1.0, 1.0], "tail": [0.01, 0.03]}
    assert train_floor.least_without_barrier(step, 4e7, 4e7, 0.0, line) == pytest.approx(0.04 + 0.02 + 0.03)
    # A large one stops for it.
    step = {"ready": [0.04, 0.00], "length": [1.0, 9.0], "tail": [0.03, 0.01]}
    assert train_floor.least_without_barrier(step, 1e8, 1e8, 0.0, line) == pytest.approx(0.10 + 0.01)
    assert train_floor.least_without_barrier(step, 1e8, 1e8, 0.5, line) == 0.5, "the arithmetic"
    # Rows that stay at home are the last one's.
    assert train_floor.least_without_barrier(step, 1e8, 9.2e7, 0.0, line) == pytest.approx(0.092 + 0.01)
    assert train_floor.least_without_barrier({"order": None}, 1e8, 1e8, 0.0, line) is None
    shown = {"model": "m", "paths": {"fp16-overlap": {"seconds": 0.22, "least": 0.2, "floor": 0.16}, "fp16": {}}}
    (text,) = train.against_the_least(shown)
    assert text.endswith("1.100 times what no order beats, 200.0 ms (1.250 of the floor)")


def test_bytes_of_the_codecs_on_a_link():
    million = 10**6
    assert train_floor.link_bytes("exact", million, 2) == 4e6
    assert train_floor.link_bytes("exact", million, 4) == 6e6
    assert train_floor.link_bytes("fp16", million, 2) == 2e6
    assert train_floor.link_bytes("int8", million, 2) == 1e6
    assert train_floor.link_bytes("topk", million, 3, 0.01, 2) == pytest.approx(80_000)
    assert train_floor.link_bytes("fp16", million, 1) == 0
    with pytest.raises(ValueError, match="gzip"):
        train_floor.link_bytes("gzip", million, 2)


def test_the_floor_of_top_k_follows_the_settings():
    assert train_floor.topk_format({}, 0.01) == train_floor.TopK(0.01, 4, 1 << 20)
    settings = {"PACELINE_TOPK_FP16": "1", "PACELINE_TOPK_RATIO": "0.02"}
    assert train_floor.topk_format(settings, 0.01) == train_floor.TopK(0.02, 2, 1 << 20)
    assert train_floor.topk_format({"PACELINE_TOPK_FP16": "0"}, 0.001) == train_floor.TopK(0.001, 4, 1 << 20)
    assert train_floor.topk_format({"PACELINE_TOPK_THRESHOLD": "5"}, 0.01).threshold == 5
    assert train_floor.topk_format({"PACELINE_TOPK_MOMENTUM": "0.9"}, 0.01).threshold == 0
    # What is too short for top-k travels as it is.
    topk = train_floor.TopK(0.01, 4, 4000)
    assert train_floor.bucket_bytes("topk", 1000, 2, topk) == pytest.approx(60)
    assert train_floor.bucket_bytes("topk", 999, 2, topk) == 3996 == train_floor.bucket_bytes("exact", 999, 2, topk)
    assert train_floor.bucket_bytes("fp16", 100, 2, topk) == 200


def test_a_path_with_corrected_momentum_takes_it_from_the_optimizer():
    import torch
    import train_paths

    assert train_paths.own_settings("topk-momentum") == {"PACELINE_TOPK_MOMENTUM": "0.9"}
    assert train_paths.own_settings("topk@PACELINE_LANES=2") == {"PACELINE_LANES": "2"}
    parameters = [torch.zeros(3, requires_grad=True)]
    for path, momentum in (("topk", 0.9), ("topk-momentum", 0.0)):
        optimizer = train_paths.give_optimizer(path, torch.optim.SGD(parameters, lr=1e-3, momentum=0.9), None)
        assert optimizer.param_groups[0]["momentum"] == momentum
    with pytest.raises(ValueError, match=r"topk-momentum: AdamW has no momentum of 0\.9"):
        train_paths.give_optimizer("topk-momentum", torch.optim.AdamW(parameters), None)


def test_rows_that_are_zero_are_no_part_of_the_floor():
    """An embedding's gradient is ready last; what it saves is taken from there."""
    sizes = [10.0, 20.0, 5.0, 100.0]
    assert train_floor.without_zero_rows(sizes, 50.0) == [10.0, 20.0, 5.0, 15.0]
    assert train_floor.without_zero_rows(sizes, 25.0) == [10.0, 15.0, 0.0, 0.0]
    assert train_floor.without_zero_rows(sizes, 140.0) == sizes, "headers are no bytes that were saved"


def test_the_rate_of_a_link_in_gigabits():
    assert [train.link_rate(rate) for rate in ("25gbit", "12500mbit", "2.5gbit", "1000kbit", "fast")] == [
        *("25", "12.5", "2.5", "0", "0")
    ]


def test_what_the_environment_says_of_nccl_holds(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "2")
    monkeypatch.setenv("PACELINE_LINK_RATE", "10")
    monkeypatch.delenv("NCCL_NSOCKS_PERTHREAD", raising=False)
    env = train.rank_environment("25gbit")
    assert (env["NCCL_SOCKET_NTHREADS"], env["PACELINE_LINK_RATE"], env["NCCL_NSOCKS_PERTHREAD"]) == ("2", "10", "4")


def test_what_a_path_is_given_wins_and_one_node_keeps_what_is_chosen_there():
    import train_paths

    def chosen(*arguments):
        return train_paths.our_environment(*arguments)

    assert chosen("fp16", "cuda", 2, {}) == {"PACELINE_CODEC": "fp16", "PACELINE_CUDA_PATH": "paceline"}
    for nodes, device in ((1, "cuda"), (1, "cpu"), (2, "cpu")):
        assert chosen("exact", device, nodes, {}) == {"PACELINE_CODEC": "none"}
    name, own = train_paths.parts("exact@PACELINE_CUDA_PATH=auto,PACELINE_CODEC=bf16")
    assert chosen(name, "cuda", 2, own) == {"PACELINE_CODEC": "bf16", "PACELINE_CUDA_PATH": "auto"}


def test_bytes_on_a_link_are_the_payload_its_headers_and_little_more():
    payload, slots = 50e6, 2
    headers = payload * 66 / 1448
    for wire in (payload, payload + headers, 1.02 * (payload + headers)):
        assert wire_bytes.complaint(payload, wire, slots) == ""
    for wire in (0, payload - 1, 1.025 * (payload + headers)):
        text = wire_bytes.complaint(payload, wire, slots)
        assert f"carried {wire / 1e6:.3f} MB a step: the payload, 50.000 MB" in text
    # And the payload is what the codec makes of the gradients.
    for sent in (50e6, 0.97 * 50e6, 1.03 * 50e6):
        assert wire_bytes.unlike_the_plan(sent, 50e6) == ""
    assert "sent 25.000 MB a step, -50.0% beside the 50.000 MB" in wire_bytes.unlike_the_plan(25e6, 50e6)
    assert "+5.0%" in wire_bytes.unlike_the_plan(52.5e6, 50e6)
    assert wire_bytes.unlike_the_plan(25e6, None) == ""
    # Where little is sent it is the messages beside it that count.
    assert wire_bytes.complaint(1000, 9000, 1) == "" != wire_bytes.complaint(1000, 10_000, 1)


def test_a_table_holds_the_ready_times_of_its_floor_and_one_node_s_steps_beside_ddp_s():
    figures = {"seconds": 0.02, "cores": 1.0, "host": 0.0, "hook": 0.0, "library": 0.0, "iterations": 3}
    paths = {
        "none": {**figures, "rounds": [0.02, 0.02, 0.02]},
        "ddp": {**figures, "rounds": [0.020, 0.040, 0.030]},
        "fp16-hook": {**figures, "rounds": [0.020, 0.040, 0.030]},
        "exact@PACELINE_LANES=2": {**figures, "rounds": [0.021, 0.040, 0.033]},
    }
    trace = {"ready_s": [0.0123, 0.0456], "floor_ready_s": [0.0023, 0.0356], "elements": [1_048_576, 32_000]}
    result = {"model": "m", "nodes": 1, "slots": 2, "paths": paths, "failed": {}, "trace": trace}
    text = train.table([result])
    assert "ready, ms:M elements  2.3:1.05 35.6:0.032\n" in text
    del trace["floor_ready_s"]
    assert "ready from rest, ms:M elements  12.3:1.05 45.6:0.032\n" in train.table([result])
    (line,) = [line for line in text.splitlines() if "times ddp" in line]
    assert line.endswith("exact@PACELINE_LANES=2 1.050 times ddp, in its rounds 1.000 to 1.100")
    assert "times ddp" not in train.table([{**result, "nodes": 2}])


def test_what_a_rank_died_of_is_told_and_not_that_others_lost_it(tmp_path):
    lost, cause = "paceline.errors.PeerLostError: rank 3 is gone", "torch.OutOfMemoryError: 786 MiB"
    (tmp_path / "gpt2.json").write_text(json.dumps({"failed": {"topk": lost}}))
    for rank, why in ((1, lost), (2, lost), (3, cause), (5, lost)):
        (tmp_path / f"gpt2.failed-{rank}.json").write_text(json.dumps({"failed": {"topk": why}}))
    assert train._failures(tmp_path, "gpt2") == {"topk": cause}
    assert train._failures(tmp_path, "gpt2") == {"topk": lost}, "files of ranks are of one run"


def test_results_of_an_all_reduce_are_held_to_their_codecs():
    import torch

    torch.manual_seed(3)
    ranks = [torch.randn(5000) for _ in range(4)]
    expected, magnitudes = sum(ranks), sum(r.abs() for r in ranks)

    def wrong(codec, result):
        return sums.wrong_elements(codec, result, expected, magnitudes, 4, 4.0)

    halves = sum(r.half().float() for r in ranks).half().float()
    assert wrong("exact", ranks[3] + ranks[2] + ranks[1] + ranks[0]) == 0 < wrong("exact", halves)
    assert wrong("fp16", halves) == 0 < wrong("fp16", halves.bfloat16().float())
    assert wrong("int8", expected + 0.1) == 0
    for codec in ("exact", "fp16", "int8"):  # a rank missing, an element that is none
        assert wrong(codec, expected - ranks[1]) > 0
        assert wrong(codec, torch.where(torch.arange(5000) == 7, torch.nan, expected)) == 1
    assert wrong("topk", torch.zeros(5000)) == 0 < wrong("topk", torch.full((5000,), torch.inf))


def test_a_checksum_sees_every_bit_and_its_place():
    import torch

    values = torch.arange(1.0, 1001.0)
    assert sums.checksum([values]) == sums.checksum([values.clone()]) != sums.checksum([values.flip(0)])
    other = values.clone()
    other.view(torch.int32)[500] ^= 1
    assert sums.checksum([other]) != sums.checksum([values])
    assert sums.checksum([torch.zeros(10)]) == (0, 0)


def test_plan_names_models_paths_and_the_first_command():
    done = run("--plan", "--models", "gpt2", "--nodes", "2", "--slots", "4", "--rate", "50gbit")
    assert done.returncode == 0, done.stderr
    assert "354.8 M parameters" in done.stdout and "--slots 4 --rate 50gbit" in done.stdout
    assert "powersgd" in done.stdout


def test_mistakes_are_named():
    for wrong in (["--models", "resnet5"], ["--paths", "ddp"], ["--set", "PACELINE_LANES"], ["--profile", "fp17"]):
        done = run("--plan", *wrong)
        assert done.returncode == 2 and wrong[0] in done.stderr, done.stderr


def test_settings_of_its_own_are_part_of_a_path_s_name():
    import train_paths

    named = [train_paths.label(path) for path in ("topk", _HALF, "fp16-hook@bucket_cap_mb=4,static_graph=1")]
    assert named[1] == f"{named[0]}, PACELINE_TOPK_FP16=1" and named[2].endswith(", bucket_cap_mb=4, static_graph=1")


def picture(*arguments):
    command = [sys.executable, str(TRAIN.with_name("picture.py")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_picture_of_results(tmp_path):
    paths = {
        "none": {"seconds": 0.05},
        "ddp": {"seconds": 0.1, "floor": 0.08},
        "fp16": {"seconds": 0.055, "floor": 0.05},
    }
    models = [{"model": name, "nodes": 2, "slots": 2, "paths": paths} for name in ("a", "b", "c")]
    (tmp_path / "train.json").write_text(json.dumps({"models": models}))
    done = picture(tmp_path / "train.json", "--out", tmp_path / "gpu.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.json").write_text("{}")
    done = picture(tmp_path / "other.json")
    assert done.returncode == 1 and "no result of train.py" in done.stderr and "other.json" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_small_on_cpus(tmp_path):
    done = run(
        *("--smoke", "--slots", "1", "--rate", "1gbit", "--models", "bert", "--threads", "1", "--warm-up", "8"),
        *("--paths", "none", "ddp", "fp16", "fp16-overlap", "topk", _HALF),
        *("--rounds", "2", "--limit", "300", "--out", str(tmp_path), "--profile", "fp16", "--phases", "3"),
        *("--set", "PACELINE_TOPK_THRESHOLD=0"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "train.json").read_text())["models"][0]
    paths = result["paths"]
    assert set(paths) == {"none", "ddp", "fp16", "fp16-overlap", "topk", _HALF} and not result["failed"]
    assert all(len(figures["rounds"]) == 2 for figures in paths.values())
    # Without communication the ranks part, for each has a batch of its own; with it they stay together.
    assert [name for name, figures in paths.items() if not figures["ranks_equal"]] == ["none"]
    assert paths[_HALF]["predicted"] == pytest.approx(paths["topk"]["predicted"] * 2 / 3)
    elements = sum(result["trace"]["elements"])
    assert elements == result["parameters"]
    # Every other byte less. That the interface carried payload and headers, and little more, is what no path failed by.
    assert 0.96 < paths["fp16"]["payload"] / paths["fp16"]["predicted"] < 1.04
    # The CPU's top-k has shorter positions than the GPU's, of which the formula is.
    for path in ("topk", _HALF):
        assert 0.6 < paths[path]["payload"] / paths[path]["predicted"] < 1, path
    assert 0 < paths["fp16"]["beyond_headers"] < paths["fp16"]["wire"] - paths["fp16"]["payload"]
    assert paths["none"]["wire"] < 0.1 * paths["ddp"]["wire"]
    assert paths["fp16"]["floor"] >= paths["none"]["seconds"]
    assert 0 < paths["fp16"]["library"] < paths["fp16"]["hook"] < paths["fp16"]["host"]
    assert paths["ddp"]["hook"] == 0 < paths["ddp"]["host"]
    assert paths["fp16-overlap"]["buckets"] == {"order": None, "tried": []}, "it has one bucket"
    assert [name for name, figures in paths.items() if "phases" not in figures] == ["fp16-overlap"]
    for figures in (figures["phases"] for figures in paths.values() if "phases" in figures):
        assert figures["host"] == pytest.approx(figures["device"], rel=0.1, abs=1e-4), "a CPU has one clock"
        assert 0 < sum(figures["device"].values()) < 2 * figures["step"]
    inside = {path: figures["phases"]["inside"] for path, figures in paths.items() if "phases" in figures}
    assert inside["ddp"] == {"hook": [0, 0], "library": [0, 0]}
    for path in ("fp16", "topk"):
        (hook, in_hook), (library, in_library) = inside[path]["hook"], inside[path]["library"]
        assert 0 < library < hook and in_library <= in_hook, inside[path]
    text = (tmp_path / "train.txt").read_text()
    assert "fp16" in text and sum("of a step of" in line for line in text.splitlines()) == len(paths) - 1
    with gzip.open(tmp_path / "bert.fp16.trace.json.gz") as trace:
        assert any(
            "all_reduce" in str(event.get("name")) or "mm" in str(event.get("name"))
            for event in json.load(trace)["traceEvents"]
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_one_node_beside_plain_ddp(tmp_path):
    done = run(
        *("--smoke", "--nodes", "1", "--slots", "2", "--rate", "1gbit", "--models", "bert", "--threads", "1"),
        *("--paths", "none", "ddp", "exact", "--warm-up", "4", "--rounds", "1", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "train.json").read_text())["models"][0]
    assert (result["nodes"], result["slots"]) == (1, 2) and not result["failed"]
    for name in ("ddp", "exact"):
        figures = result["paths"][name]
        assert figures["ranks_equal"] and figures["floor"] >= result["paths"]["none"]["seconds"]
        assert figures["predicted"] == 0 and figures["wire"] < 1e5, "a node's own ranks need no link"
    assert "times ddp, in its rounds" in (tmp_path / "train.txt").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_sharded_small_on_cpus(tmp_path):
    """That its bytes are those of the formula is what no path fails by."""
    command = [sys.executable, str(TRAIN.with_name("sharded.py")), "--smoke", "--slots", "1", "--rate", "1gbit"]
    command += ["--paths", "node", "full", "hybrid", "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "sharded.json").read_text())["models"][0]
    paths = result["paths"]
    # All parameters are gathered, those of the layers again, all gradients reduced; a hybrid sends gradients and sums.
    assert paths["hybrid"]["predicted"] == 4 * result["parameters"]
    assert 2 * 4 * result["parameters"] / 2 < paths["full"]["predicted"] < 3 * 4 * result["parameters"] / 2
    assert all(paths[name]["wire"] > paths[name]["predicted"] for name in ("full", "hybrid"))
