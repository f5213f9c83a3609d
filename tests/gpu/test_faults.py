"""Faults during training on GPUs: every survivor raises an error that names the rank, soon, and no parameter moves."""

import pytest
from lab_launch import LabRun


def survivors(which, where, nodes, timeout=60, script="faulty_gpu.py", **extra):
    done = LabRun(script, nodes, [which, where], timeout=timeout, grace="10s", **extra)
    assert not done.hung, done.everything()
    lost = [] if which in ("cut", "differs") else [1]
    others = [report for rank, report in enumerate(done.reports) if rank not in lost]
    for report in others:
        assert "kind" in report, done.everything()
        assert "PacelineError" in report["kinds"], report
        assert report["unchanged"], "parameters changed after the fault"
        if script == "faulty_gpu.py":
            assert report.get("rests"), f"the GPU waits for what was lost\n{done.everything()}"
    # An uncaught exception, not a signal: the process could end by itself.
    assert [code for rank, code in enumerate(done.exits) if rank not in lost] == [1] * len(others), done.everything()
    return others, done.reports[1], done.everything()


def named_in_time(found):
    """By all that survived rank 1."""
    others, victim, everything = found
    for report in others:
        assert report["kind"] == "PeerLostError", everything
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < 2.0, report["at"] - victim["at"]


@pytest.mark.parametrize(
    ("nodes", "slots", "where", "backend"),
    [
        (2, 1, "before", "gloo"),
        (2, 1, "after", "nccl"),
        (3, 1, "before", "nccl"),
        (3, 1, "after", "gloo"),
        (2, 2, "before", "nccl"),
        (2, 2, "after", "nccl"),
    ],
)
def test_a_killed_rank_is_named_within_two_seconds(nodes, slots, where, backend):
    named_in_time(survivors("killed", where, nodes, slots=slots, CHECKS_BACKEND=backend))


def takes_the_path_of(codec, slots, reports):
    """Its largest bucket, of 16 MiB, is worth a codec and the ranks' copies of shards in each other's memory."""
    for report in reports:
        assert f"{codec} between nodes" in report["path"], report["path"]
        assert slots == 1 or "copies in the node" in report["path"], report["path"]


@pytest.mark.parametrize(
    ("codec", "nodes", "slots", "where"),
    [
        ("topk", 2, 1, "before"),
        ("topk", 2, 2, "after"),
        ("int8", 2, 2, "before"),
        ("int8", 3, 1, "after"),
        ("fp16", 2, 2, "after"),
    ],
)
def test_under_a_codec_a_killed_rank_is_named_within_two_seconds(codec, nodes, slots, where):
    """A residual's kernels, what the launcher's threads have yet to enqueue, copies between the ranks of a node."""
    found = survivors("killed", where, nodes, slots=slots, PACELINE_CODEC=codec, CHECKS_BACKEND="nccl")
    named_in_time(found)
    takes_the_path_of({"topk": "top-k"}.get(codec, codec), slots, [*found[0], found[1]])


def test_where_a_rank_was_killed_training_starts_again():
    """Under the same names, addresses and ports, beside what a killed process could not clear away."""
    chosen = {"slots": 2, "PACELINE_CODEC": "topk", "CHECKS_BACKEND": "nccl"}
    found = survivors("killed", "before", 2, **chosen)
    named_in_time(found)
    takes_the_path_of("top-k", 2, [*found[0], found[1]])
    done = LabRun("faulty_gpu.py", 2, ["nothing", "before"], timeout=60, grace="10s", **chosen)
    assert done.code == 0 and done.exits == [0] * 4, done.everything()
    assert all(report.get("trained") and report["equal"] and report["finite"] for report in done.reports), done.reports
    takes_the_path_of("top-k", 2, done.reports)


@pytest.mark.parametrize(
    ("codec", "slots", "where"),
    [("none", 1, "before"), ("none", 1, "after"), ("none", 2, "before"), ("topk", 1, "after"), ("topk", 2, "before")],
)
def test_a_fused_optimizer_that_nobody_waited_for_changes_nothing(codec, slots, where):
    """With two ranks a node a neighbour is lost, which spoils NCCL's part of what has come."""
    found = survivors("killed", where, 2, slots=slots, PACELINE_CODEC=codec, CHECKS_BACKEND="nccl", CHECKS_FUSED="1")
    named_in_time(found)
    if codec == "topk":
        takes_the_path_of("top-k", slots, [*found[0], found[1]])


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_gradients_that_torch_carries_change_nothing_either(where, fused):
    """A layer in float64: its all-reduce is torch's NCCL's, which ends with garbage when its group is aborted."""
    named_in_time(survivors("killed", where, 2, CHECKS_BACKEND="nccl", CHECKS_FUSED=fused, CHECKS_DOUBLE="1"))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_models_that_differ_are_named_on_all_ranks(backend):
    everybody, _, everything = survivors("differs", "before", 2, CHECKS_BACKEND=backend)
    assert len(everybody) == 2, everything
    for report in everybody:
        assert report["kind"] == "MismatchError", everything
        assert "'4.weight' is float32 [16, 2048] on rank 0 and float32 [17, 2048] on rank 1" in report["text"], report


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("which", ["killed", "cut"])
def test_a_host_that_waits_for_torchs_nccl_is_let_go(which, slots):
    """It reads a sum that never comes, and calls nothing of ours: NCCL's kernel waits for the lost rank on the GPU.

    Nothing of ours waits, so the deadline is that of a silent peer.
    """
    others, victim, everything = survivors(
        which, "before", 2, slots=slots, PACELINE_PEER_TIMEOUT="5", CHECKS_BACKEND="nccl", CHECKS_READS="1"
    )
    for report in others:
        assert report["kind"] in ("PeerLostError", "TimeoutError"), everything
        assert "rank " in report["text"], report["text"]
        late = report["at"] - (victim["cut"] + 5.0 if which == "cut" else victim["at"])
        assert late < 2.0, late


@pytest.mark.parametrize("fused", ["0", "1"])
def test_torchs_group_with_a_lost_rank_can_be_destroyed(fused):
    """torch's watchdog sleeps for a minute over what it has seen itself, and a shutdown would wait for it."""
    others, _, everything = survivors(
        "killed", "before", 2, CHECKS_BACKEND="nccl", CHECKS_FUSED=fused, CHECKS_DESTROYS="1"
    )
    for report in others:
        assert report.get("destroyed"), everything


@pytest.mark.parametrize("slots", [1, 2])
def test_a_killed_rank_of_a_sharded_model_is_named(slots):
    named_in_time(survivors("killed", "before", 2, slots=slots, CHECKS_BACKEND="cpu:paceline,cuda:paceline"))


@pytest.mark.parametrize("exchange", ["messages", "all_to_all"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_rank_killed_amid_exchanges_is_named(exchange, nodes):
    """NCCL's own watchdog would end the process, or wait; the optimizer must not use what never came."""
    backend = "cpu:paceline,cuda:paceline"
    others, victim, everything = survivors(
        "killed", "before", nodes, script="faulty_messages.py", CHECKS_BACKEND=backend, CHECKS_EXCHANGE=exchange
    )
    for report in others:
        assert report["kind"] == "PeerLostError", everything
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < 2.0, report["at"] - victim["at"]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_stopped_rank_is_named_at_the_deadline(slots):
    """Not the other rank of its node, who owes the other node what it can't have without it."""
    others, victim, everything = survivors(
        "stopped", "before", 2, slots=slots, PACELINE_TIMEOUT="5", CHECKS_BACKEND="nccl"
    )
    for report in others:
        assert report["kind"] in ("TimeoutError", "PeerLostError"), everything
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < 7.0, report["at"] - victim["at"]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_cut_link_is_named_on_every_rank_at_the_deadline(slots):
    """Nobody dies, and no socket closes: each node hears no more of the other one."""
    everybody, cutter, everything = survivors(
        "cut", "before", 2, slots=slots, PACELINE_TIMEOUT="5", CHECKS_BACKEND="nccl"
    )
    assert len(everybody) == 2 * slots
    for rank, report in enumerate(everybody):
        assert report["kind"] in ("TimeoutError", "PeerLostError"), everything
        beyond = range(slots, 2 * slots) if rank < slots else range(slots)
        assert any(f"rank {other}" in report["text"] for other in beyond), (rank, report["text"])
        assert report["at"] - cutter["cut"] < 5.0 + 2.0, report["at"] - cutter["cut"]


def test_an_exception_elsewhere_is_told():
    others, victim, everything = survivors("raises", "after", 2)
    for report in others:
        assert report["kind"] in ("AbortedError", "PeerLostError"), everything
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < 5.0
