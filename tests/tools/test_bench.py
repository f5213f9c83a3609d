"""`paceline bench`: real ranks on this machine, its JSON lines, the peer, bad input."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
PROGRAM = TREE / "build" / "bin" / "paceline"
FIELDS = {
    "op", "ranks", "nodes", "bytes", "dtype", "plan", "codec", "wire", "us_p50", "us_p99", "algbw", "floor_us",
    "bytes_predicted", "bytes_measured",
}  # fmt: skip


def environment(**more):
    ours = ("PACELINE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(ours)}, **more}


def bench(*words):
    """One process, as a user starts it."""
    return subprocess.run(
        [PROGRAM, "bench", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(size, *words):
    """`size` ranks told who they are as torchrun tells them. (exit codes, standard output, standard error)."""
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = []
        try:
            for rank in range(size):
                told = {**common, "RANK": rank, "LOCAL_RANK": rank, "PACELINE_SECRET": "5e" * 16}
                processes.append(
                    subprocess.Popen(
                        [PROGRAM, "bench", *map(str, words)],
                        env=environment(**{k: str(v) for k, v in told.items()}),
                        stdout=out,
                        stderr=err,
                    )
                )
            codes = [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        return codes, out.read(), err.read()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"])
def test_every_operation_prints_and_writes_a_line_a_size(operation, tmp_path):
    report = tmp_path / "lines.json"
    codes, out, err = ranks(3, operation, "--bytes", "12,96KiB", "--iterations", 4, "--turns", 2, "--json", report)
    assert codes == [0, 0, 0], err
    rows = lines(report)
    assert [row["bytes"] for row in rows] == [12, 98304]
    for row in rows:
        assert row.keys() >= FIELDS
        assert (row["op"], row["ranks"], row["nodes"], row["dtype"]) == (operation, 3, 1, "float32")
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["us_p50"] / 1e3)
        assert row["iterations"] == 4
        assert "peer" not in row
    assert "96 KiB" in out


@pytest.mark.parametrize(
    "words", [["--codec", "fp16"], ["--buffers", "shared"], ["--dtype", "int64"], ["--out-of-place"]]
)
def test_sums_are_right(words):
    codes, _, err = ranks(2, "allreduce", "--bytes", "1MiB", "--iterations", 2, "--turns", 1, *words)
    assert codes == [0, 0], err  # the bench compares a sample of the sum with the ranks' values


def test_as_many_operations_as_are_asked_for(tmp_path):
    report = tmp_path / "lines.json"
    words = ("--np", 2, "--bytes", 4, "--iterations", 2500, "--turns", 1, "--json", report)
    assert bench("allreduce", *words).returncode == 0
    assert [row["iterations"] for row in lines(report)] == [2500]


def test_starts_ranks_itself():
    done = bench("allreduce", "--np", 2, "--bytes", "64KiB", "--iterations", 2, "--turns", 1)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout


def test_vs_gloo_takes_turns_and_writes_peer_lines(tmp_path):
    pytest.importorskip("torch")
    report = tmp_path / "lines.json"
    codes, out, err = ranks(
        2, "allreduce", "--bytes", "4,256KiB", "--iterations", 6, "--turns", 2, "--vs", "gloo", "--json", report,
        "--python", sys.executable,
    )  # fmt: skip
    assert codes == [0, 0], err
    assert [row.get("peer") for row in lines(report)] == [None, "gloo", None, "gloo"]
    assert "x gloo's time" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["allreduce"], "--np"),
        (["nonsense"], "nonsense"),
        (["allreduce", "--bytes", "many"], "many"),
        (["allreduce", "--dtype", "float8"], "float8"),
        (["allreduce", "--np", 2, "--bytes", "4,-1"], "--bytes: a size is from 0 to 1EiB"),
        (["allreduce", "--np", 2, "--codec", "topk", "--ratio", 0], "--ratio: a share is above 0"),
        *(
            (["allreduce", "--np", 2, "--link", rate], f"--link: a rate such as 1gbit or 300mbit is wanted, not {rate}")
            for rate in ("fast", "infgbit", "nangbit", "-1gbit", "0gbit", "1e400gbit", "1e300tbit", "1gb")
        ),
        (["allreduce", "--np", 2, "--seconds", "nan"], "--seconds: nan is no number from 0.01 to 3600"),
    ],
)
def test_bad_words_are_named(words, named):
    done = bench(*words)
    assert done.returncode != 0
    assert named in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--json", "/nonexistent/x"], "No such file or directory): name a file in a folder that is there"),
        (["--json", "/"], "Is a directory): name a file"),
        (["--vs", "gloo", "--python", "/nonexistent/python"], "/nonexistent/python"),
    ],
)
def test_what_only_rank_0_can_find_out_ends_all(words, fix):
    codes, _, err = ranks(2, "allreduce", "--bytes", "4", *words)
    assert codes == [1, 1]
    assert words[-1] in err and fix in err


def test_a_rank_that_is_ended_by_another_names_no_cause_of_its_own():
    """Which rank hears of the other's failure before it meets its own is a matter of time."""
    for _ in range(5):
        codes, _, err = ranks(2, "allreduce", "--bytes", "4", "--codec", "topk", "--dtype", "int32")
        assert codes == [1, 1]
        assert "int32" in err
        assert "can't report" not in err and "wrong result" not in err
