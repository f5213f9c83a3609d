"""The demo: its files and figures, small and in a real lab; its floors; a full disk; its script by hand."""

import base64
import html
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tools" / "demo"
sys.path[:0] = [str(DEMO), str(ROOT / "tests" / "lab")]

import compare  # noqa: E402
import demo  # noqa: E402
import report  # noqa: E402
from lab_tools import in_a_lab, on_a_small_disk, run_lab  # noqa: E402

sys.modules.pop("train", None)  # the demo's; a test of bench/gpu imports one of that name

NAMES = [
    "no-communication", "gloo", "gloo-fp16", "gloo-powersgd", "paceline-exact", "paceline-fp16", "paceline-topk",
]  # fmt: skip
KEYS = {
    "name", "nodes", "slots", "samples_per_s", "share_of_no_comm", "floor_share", "final_accuracy", "bytes_predicted",
    "bytes_measured",
}  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"
TEST_SAMPLES = 2500


def run_demo(*words, prefix=()):
    command = [*prefix, sys.executable, str(DEMO / "demo.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@in_a_lab
def test_the_demo_leaves_figures_pictures_and_a_page(tmp_path):
    out = tmp_path / "not there yet" / "demo"
    words = ("--out", out, "--clusters", "2x1", "--rounds", 1, "--steps", 1, "--rate", "500mbit", "--budget", 20)
    done = run_demo(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result.keys() == {"runs"} and [run["name"] for run in result["runs"]] == NAMES
    for run in result["runs"]:
        assert run.keys() == KEYS
        assert (run["nodes"], run["slots"]) == (2, 1)
        assert run["samples_per_s"] > 0 and run["floor_share"] > 0
        right = round(run["final_accuracy"] * TEST_SAMPLES)
        assert run["final_accuracy"] == right / TEST_SAMPLES and 0 < right <= TEST_SAMPLES
        assert re.search(rf"^{run['name']} .*{run['final_accuracy']:.2%}$", done.stdout, re.MULTILINE)
    details = {run["name"]: run for run in json.loads((out / "details.json").read_text())[0]["runs"]}
    check_rounds(details.values())
    # The same seeds: the same batches from the same parameters. (A sum of two has one order.)
    losses = {name: run["block_loss"] for name, run in details.items()}
    assert losses["gloo"] == losses["paceline-exact"] != losses["paceline-topk"]
    assert len({tuple(loss) for loss in losses.values()}) > 3
    runs = {run["name"]: run for run in result["runs"]}
    assert runs["no-communication"]["share_of_no_comm"] == runs["no-communication"]["floor_share"] == 1
    check_bytes(runs)
    picture = (out / "demo.png").read_bytes()
    page = (out / "report.html").read_text()
    assert picture.startswith(PNG) and base64.b64encode(picture).decode() in page
    assert list(report.LABELS) == NAMES == list(demo.VARIANTS)
    for label in report.LABELS.values():
        assert f"<td>{html.escape(label)}</td>" in page


def check_rounds(runs):
    """One of all variants, then some of the quick ones alone, after which nobody asks what was learned."""
    rounds = {run["name"]: len(run["round_s"]) for run in runs}
    quick = rounds.pop("no-communication")
    assert rounds.pop("paceline-topk") == quick > 1 and set(rounds.values()) == {1}
    assert [len(run["codec_round_s"]) for run in runs] == [0] * 5 + [1, quick]
    assert all(len(run["block_s"]) == len(run["block_loss"]) == 2 and run["steps"] == 3 for run in runs)


def check_bytes(runs):
    """What plans and rings said beforehand is what the links carried, barriers and retransmissions aside."""
    alone = runs["no-communication"]
    assert alone["bytes_predicted"] == 0
    assert alone["bytes_measured"] < 10e3, "a barrier's kilobyte, and no gradient"
    exact = 4 * 21_111_818  # two ranks: each gives its gradients' bytes away once
    for name, share in (("gloo", 1), ("gloo-fp16", 1 / 2), ("paceline-exact", 1), ("paceline-fp16", 1 / 2)):
        assert runs[name]["bytes_predicted"] == pytest.approx(share * exact, rel=0.06), name  # headers: 4.5 %
    assert runs["paceline-topk"]["bytes_predicted"] < exact / 50
    for name in NAMES[1:]:
        off = runs[name]["bytes_measured"] - runs[name]["bytes_predicted"]
        assert -0.06 * runs[name]["bytes_predicted"] < off < 0.06 * runs[name]["bytes_predicted"] + 60e3, name


def test_the_demo_compares_seven_ways_on_two_clusters():
    """What `./dev demo` runs where nothing is asked for: README's figures are of that."""
    args = demo.make_parser().parse_args([])
    assert args.clusters == ["4x1", "2x2"] and args.rate == "1gbit"
    assert args.variants == NAMES and args.out == ROOT / "build" / "demo"
    assert args.rounds >= 3 and args.steps >= 1 and args.budget * 2 <= args.timeout


def test_a_cluster_is_started_as_it_was_asked_for(tmp_path, monkeypatch):
    """The lab's nodes, ranks and rate, and compare.py's part of the time."""
    args = demo.make_parser().parse_args(["--rate", "200mbit", "--budget", "100", "--variants", *NAMES[:2]])
    started = []

    def run(command, **_):
        started.append(command)
        (tmp_path / "ranks-2x2.json").write_text('{"runs": []}')
        (tmp_path / "lab-2x2.json").write_text('{"links": []}')
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo, "program", lambda: Path("paceline"))
    monkeypatch.setattr(demo.subprocess, "run", run)
    made = demo.run_cluster(2, 2, args, tmp_path)
    assert made == {"runs": [], "nodes": 2, "slots": 2, "lab": {"links": []}}
    (command,) = started
    assert command[:8] == ["paceline", "lab", "--nodes", "2", "--slots", "2", "--rate", "200mbit"]
    ranks = command[command.index("--") + 1 :]
    assert ranks[1] == str(DEMO / "compare.py") and ranks[ranks.index("--budget") + 1] == "50.0"
    chosen = ranks.index("--variants")
    assert ranks[chosen + 1 : chosen + 3] == NAMES[:2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--clusters", "4"], "--clusters: '4' is not NODESxRANKS, such as 4x1 or 2x2"),
        (["--clusters", "2x1", "0x2"], "--clusters: '0x2' is not NODESxRANKS"),
        (["--clusters", "2x1x1"], "--clusters: '2x1x1' is not NODESxRANKS"),
        (["--rounds", "0"], "--rounds: '0' is no whole number from 1 on"),
        (["--rounds", "1.5"], "--rounds: '1.5' is no whole number from 1 on"),
        (["--steps", "-1"], "--steps: '-1' is no whole number from 1 on"),
        (["--budget", "0"], "--budget: '0' is no number of seconds above 0"),
        (["--timeout", "nan"], "--timeout: 'nan' is no number of seconds above 0"),
        (["--timeout", "soon"], "--timeout: 'soon' is no number of seconds above 0"),
        (["--variants", "gloo"], "--variants: no-communication is what the others are compared with"),
    ],
)
def test_words_that_would_train_nothing_are_named(words, named, tmp_path):
    done = run_demo("--out", tmp_path / "out", *words)
    assert done.returncode == 2 and named in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists() and "==>" not in done.stdout


def test_a_cluster_that_takes_too_long_is_ended_by_name(tmp_path, monkeypatch):
    """A program that would never end stands for the lab."""
    hung = tmp_path / "hung"
    hung.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nread nothing <{tmp_path}/nobody\n")
    hung.chmod(0o755)
    os.mkfifo(tmp_path / "nobody")
    monkeypatch.setattr(demo, "program", lambda: hung)
    args = demo.make_parser().parse_args(["--timeout", "3"])
    with pytest.raises(SystemExit) as ended:
        demo.run_cluster(2, 2, args, tmp_path)
    assert ended.value.code == (
        "demo: 2 × 2 took longer than 3 s and was ended: raise --timeout, or lower --budget or --rounds"
    )
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


@pytest.fixture
def one_rank(tmp_path):
    """A job of one rank, for what DistributedDataParallel is told when it is made."""
    store = compare.dist.FileStore(str(tmp_path / "store"), 1)
    compare.dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    compare.dist.destroy_process_group()


def test_the_model_has_more_than_ten_million_parameters():
    model = compare.train.build_model()
    assert sum(p.numel() for p in model.parameters()) == 21_111_818 > 10e6
    data = compare.train.Digits()
    assert model(data.batch(0, 0)[0]).shape == (compare.train.BATCH, 10), "and is the digits'"


def test_torch_s_hooks_are_given_what_they_need(one_rank, monkeypatch):
    """Each hook's own settings, asked of the models that carry it: a rival that is held back is no comparison."""
    small = compare.train.build_model
    monkeypatch.setattr(compare.train, "build_model", lambda seed: small(seed, depth=1))
    peers = {"power_rank": 4, "fp16_bucket_mb": 25}
    made = {variant.name: variant.model for variant in compare.make_variants(NAMES[:4], peers)}
    assert list(made) == NAMES[:4]
    hooks = {name: [(hook.__name__, state) for hook, state in model._comm_hooks] for name, model in made.items()}
    assert hooks["no-communication"] == [("leave_alone", None)] and hooks["gloo"] == []
    # Without a group of its own a hook would use the job's: the variants' messages would meet there.
    ((name, group),) = hooks["gloo-fp16"]
    assert name == "fp16_compress_hook" and group is made["gloo-fp16"].process_group
    ((name, state),) = hooks["gloo-powersgd"]
    assert name == "powerSGD_hook" and state.process_group is made["gloo-powersgd"].process_group
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (4, 2)
    assert state.use_error_feedback and state.warm_start, "as its authors recommend"
    assert [made[name].bucket_bytes_cap >> 20 for name in ("gloo-fp16", "gloo-powersgd")] == [25, 1000]
    assert all(model.gradient_as_bucket_view for model in made.values())
    smaller = compare.make_variants(["gloo-fp16"], {**peers, "fp16_bucket_mb": 4})[0].model
    assert smaller.bucket_bytes_cap == 4 << 20


def cluster(**steps):
    """A made-up cluster of 2 × 2 at 800 Mb/s (TCP carries 95 MB a second); steps: (seconds, predicted bytes)."""
    figures = {"forward_s": 0.02, "final_accuracy": 0.5, "bytes_measured": 1e6, "steps": 2}
    figures.update(block_s=[1.0, 1.0], block_loss=[2.0, 1.0])
    codecs = {"paceline_fp16": [0.003] * 3, "paceline_topk": [0.015] * 3}
    return {
        "nodes": 2, "slots": 2, "batch": 16, "parameters": 123_457, "lab": {"rate_bps": 8e8, "links": []},
        "power_rank": 1, "fp16_bucket_mb": 4, "torch": "0", "threads": 1, "test_samples": TEST_SAMPLES,
        "runs": [
            {**figures, "name": name.replace("_", "-"), "step_s": step, "bytes_predicted": predicted,
             "round_s": [step] * 3, "codec_round_s": codecs.get(name, [])}
            for name, (step, predicted) in steps.items()
        ],
    }  # fmt: skip


def test_a_floor_is_the_cores_or_the_link():
    made = cluster(
        no_communication=(0.1, 0), gloo=(0.44, 19e6), paceline_fp16=(0.24, 9.5e6), paceline_topk=(0.23, 950e3)
    )
    demo.add_floors(made)
    runs = {run["name"]: run for run in made["runs"]}
    floors = {name: run["floor_s"] for name, run in runs.items()}
    # Compute; forward and 19 MB; forward and half of them; compute and the codec.
    assert floors == pytest.approx(
        {"no-communication": 0.1, "gloo": 0.22, "paceline-fp16": 0.12, "paceline-topk": 0.115}
    )
    assert {name: run["floor_share"] for name, run in runs.items()} == pytest.approx(
        {"no-communication": 1, "gloo": 0.5, "paceline-fp16": 0.5, "paceline-topk": 0.5}
    )
    assert {name: run["share_of_no_comm"] for name, run in runs.items()} == pytest.approx(
        {"no-communication": 1, "gloo": 10 / 44, "paceline-fp16": 10 / 24, "paceline-topk": 10 / 23}
    )
    assert runs["gloo"]["samples_per_s"] == pytest.approx(4 * 16 / 0.44)


def test_a_row_of_the_result_is_a_variant_on_a_cluster():
    """In the clusters' order, and with the keys that readers of result.json know, of all that was measured."""
    square = cluster(no_communication=(0.1, 0), gloo=(0.44, 19e6), paceline_topk=(0.23, 950e3))
    line = {**cluster(no_communication=(0.2, 0), gloo=(0.8, 28e6)), "nodes": 4, "slots": 1}
    for made in (line, square):
        demo.add_floors(made)
    rows = demo.result_rows([line, square])
    assert [(row["nodes"], row["slots"], row["name"]) for row in rows] == [
        *((4, 1, name) for name in ("no-communication", "gloo")),
        *((2, 2, name) for name in ("no-communication", "gloo", "paceline-topk")),
    ]
    assert all(row.keys() == KEYS for row in rows)
    assert [row["samples_per_s"] for row in rows] == pytest.approx([64 / s for s in (0.2, 0.8, 0.1, 0.44, 0.23)])
    assert [row["bytes_predicted"] for row in rows] == [0, 28e6, 0, 19e6, 950e3]
    assert rows[3]["floor_share"] == pytest.approx(0.5) and rows[3]["share_of_no_comm"] == pytest.approx(10 / 44)


def test_what_disturbs_a_round_meets_both_sides():
    made = cluster(no_communication=(0.1, 0), paceline_topk=(0.2, 950e3))
    alone, ours = made["runs"]
    alone["round_s"], ours["round_s"], ours["codec_round_s"] = [0.1, 0.3, 0.1], [0.125, 0.375, 0.2], [0.02, 0.06, 0.02]
    demo.add_floors(made)
    assert ours["floor_share"] == pytest.approx(0.96)  # of 0.96, 0.96, 0.6
    assert ours["share_of_no_comm"] == pytest.approx(0.8)
    assert (ours["codec_s"], ours["floor_s"]) == pytest.approx((0.02, 0.12))


def test_rounds_of_the_quick_variants_alone_are_held_against_each_other():
    made = cluster(no_communication=(0.1, 0), gloo=(0.4, 19e6), paceline_topk=(0.2, 950e3))
    alone, gloo, ours = made["runs"]
    alone["round_s"], gloo["round_s"], ours["round_s"] = [0.1, 0.1, 0.2, 0.2], [0.4, 0.4], [0.2, 0.2, 0.25, 0.25]
    ours["codec_round_s"] = [0.02, 0.02, 0.02, 0.025]
    demo.add_floors(made)
    assert ours["floor_share"] == pytest.approx((0.6 + 0.88) / 2)  # of 0.6, 0.6, 0.88, 0.9
    assert gloo["share_of_no_comm"] == pytest.approx(0.25) and gloo["floor_share"] == pytest.approx(0.22 / 0.4)


def test_the_picture_has_three_panels_of_what_was_measured():
    made = cluster(no_communication=(0.1, 0), gloo=(0.44, 2e6), paceline_fp16=(0.22, 1e6), paceline_topk=(0.2, 950e3))
    made["runs"][2].update(block_s=[1.0, 3.0], block_loss=[2.0, 0.5])
    demo.add_floors(made)
    picture = report.figure(made)
    throughput, loss, sent = picture.axes
    titles = [axis.get_title(loc="left") for axis in picture.axes]
    assert titles == ["Throughput, 2 nodes × 2", "Loss over time, equal number of steps", "Bytes over the wire"]
    names = [run["name"] for run in made["runs"]]
    bars = {label.get_text(): bar.get_width() for label, bar in zip(throughput.get_yticklabels(), throughput.patches)}
    assert bars == {report.LABELS[run["name"]]: pytest.approx(run["samples_per_s"]) for run in made["runs"]}
    assert any(text.get_text().endswith("(2.0 × Gloo)") for text in throughput.texts)
    assert "wall-clock seconds" in loss.get_xlabel()
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines}
    assert curves.keys() == {report.LABELS[name] for name in names[1:]}, (
        "each but no communication, which trains nothing"
    )
    assert curves["Paceline fp16"] == ([1.0, 4.0], [2.0, 0.5]), "a block's end, not its number"
    assert "measured" in sent.get_xlabel() and "predicted" in sent.get_xlabel()
    widths = [bar.get_width() for bar in sent.patches]
    assert widths[:3] == [1.0] * 3 and widths[3:] == pytest.approx([0.95, 1.0, 2.0]), "megabytes, from below"
    assert [text.get_text().split("(")[1] for text in sent.texts] == ["+5.3%)", "+0.0%)", "-50.0%)"]
    report.plt.close(picture)


def test_no_communication_alone_has_its_picture_too():
    made = cluster(no_communication=(0.1, 0))
    demo.add_floors(made)
    throughput, _, sent = (picture := report.figure(made)).axes
    assert len(throughput.patches) == 1 and not sent.patches
    report.plt.close(picture)


@pytest.mark.parametrize("quickest", [1, 2, 4])
def test_powersgd_gets_the_rank_that_was_measured_to_be_quickest(monkeypatch, quickest):
    """The middle of its blocks counts; a single slow or quick one does not."""
    closed, blocks = [], []

    class Model:
        def __init__(self, name, matrix_rank):
            self.name, self.rank, self.step = name, matrix_rank, 0
            self.step_seconds = [0.2, 0.2, 9.0] if matrix_rank == quickest else [0.3, 0.3, 0.1]

        def block(self, _data, steps, record):
            blocks.append((self.rank, record))
            self.step += steps

        def close(self):
            closed.append(self.rank)

    monkeypatch.setattr(compare, "power", Model)
    monkeypatch.setattr(compare.dist, "broadcast", lambda tensor, source: None)
    peers = compare.tuned_peers(["gloo", "gloo-powersgd"], None)
    assert peers["power_rank"] == quickest
    assert peers["power_step_s"] == {rank: 0.2 if rank == quickest else 0.3 for rank in (1, 2, 4)}
    assert blocks == [(rank, measured) for measured in (False, True, True, True) for rank in (1, 2, 4)], (
        "in turn, warm before"
    )
    assert closed == [1, 2, 4]
    built = []
    monkeypatch.setattr(compare, "power", lambda name, rank: built.append((name, rank)))
    compare.make_variants(["gloo-powersgd"], peers)
    assert built == [("gloo-powersgd", quickest)]


def test_rounds_find_a_heap_whose_pages_are_there():
    code = (
        "import resource, torch, compare; faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "compare.touch_heap(); before = faults()\n"
        "for mib in (4, 100): torch.ones(mib << 20, dtype=torch.uint8)\n"
        "print(faults() - before)"
    )
    # As demo.py starts it; 104 MiB are 26,624 pages.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=DEMO, env=demo.settings())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000


def test_ranks_take_the_first_one_s_choice(monkeypatch):
    """They measure alike, not the same: each would wait in another collective."""
    monkeypatch.setattr(compare.dist, "broadcast", lambda tensor, source: tensor.fill_(4))
    made = types.SimpleNamespace(step=0, step_seconds=[0.1], block=lambda *_, **__: None, close=lambda: None)
    assert compare.fastest(None, {1: lambda: made, 4: lambda: made})[0] == 4


def expect_a_full_disk(done, path):
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"demo: can't write {path}: No space left on device; free some space or give --out\n" in done.stderr
    assert "Traceback" not in done.stderr


@in_a_lab
@pytest.mark.parametrize("below", [".", "a", "a/b/c/d"])
def test_a_disk_that_can_t_hold_the_report_is_told_before_training(tmp_path, below):
    """Too few bytes, or (of four inodes) no room for the folder."""
    out = tmp_path / below
    words = ("--out", out, "--clusters", "1x1", "--variants", "no-communication", "--rounds", 1, "--steps", 1)
    done = run_demo(*words, prefix=on_a_small_disk(tmp_path))
    expect_a_full_disk(done, out)
    assert "==>" not in done.stdout


@in_a_lab
def test_a_disk_that_is_full_after_training_is_told_by_the_rank(tmp_path):
    figures = tmp_path / "ranks.json"
    script = f"head -c 16384 /dev/zero >{tmp_path}/full; exec {sys.executable} {DEMO}/compare.py --out {figures}"
    script += " --rounds 1 --steps 1 --variants no-communication"
    done = run_lab("--quiet", "--no-calibration", command=["sh", "-c", script], prefix=on_a_small_disk(tmp_path))
    assert done.returncode == 1, done.stderr
    assert f"demo: can't write {figures}: No space left on device; free some space or give --out" in done.stderr
    assert "Traceback" not in done.stderr


@in_a_lab
@pytest.mark.parametrize("name", ["demo.png", "report.html"])
def test_a_disk_that_is_full_before_the_report_is_told(tmp_path, name):
    made = cluster(no_communication=(0.1, 0), gloo=(0.44, 19e6))
    demo.add_floors(made)
    code = "import json, pathlib, sys; sys.path.insert(0, sys.argv[1]); import report\n"
    code += "report.write([json.loads(sys.argv[2])], pathlib.Path(sys.argv[3]))"
    # The page holds the picture in base64: four thirds of it.
    size = len(report.png(report.figure(made))) * (0.5 if name == "demo.png" else 2)
    command = [*on_a_small_disk(tmp_path, int(size)), sys.executable, "-c", code, str(DEMO), json.dumps(made)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    expect_a_full_disk(done, tmp_path / name)


def train(*words, **variables):
    """The script in a lab of two nodes: what it printed."""
    flags = ("--quiet", "--no-calibration", "--nodes", "2", "--slots", "1", "--rate", "10gbit")
    command = [sys.executable, str(DEMO / "train.py"), *words]
    done = run_lab(*flags, command=command, timeout=120, PYTHONPATH=str(ROOT / "python"), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses(output):
    return re.findall(r"^\[0\] step +(\d+): loss ([\d.]+), \d+ samples/s$", output, re.MULTILINE)


@in_a_lab
def test_one_import_is_the_difference():
    plain, ours = train("--steps", "20"), train("--steps", "20", "--paceline")
    assert "paceline: " not in plain
    assert re.search(r"^\[0\] paceline: 2 ranks on 2 nodes .* · tcp, ", ours, re.MULTILINE), ours
    # Equal seeds and batches, and of two ranks' gradients there is but one sum: the same training, digit by digit.
    assert [step for step, _ in losses(ours)] == ["10", "20"]
    assert losses(ours) == losses(plain)
    accuracy = re.compile(r"^\[0\] accuracy ([\d.]+) on 2500 test samples$", re.MULTILINE)
    (at_last,) = accuracy.findall(ours)
    assert accuracy.findall(plain) == [at_last] and float(at_last) > 0.5
