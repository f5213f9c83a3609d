"""Faults through the torch face: every survivor gets an error with a name, soon."""

import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from support import MODERN, SIMULATED, Launch, as_in_a_wheel, environment

HOST = socket.gethostname()


def survivors(which, ranks=3, **extra):
    """(reports of the ranks but 1, report of rank 1, everything printed)."""
    done = Launch("faulty_ranks.py", ranks, [which], timeout=150, **extra).end()
    assert not done.hung, done.everything()
    others = [done.reports[r] for r in range(ranks) if r != 1]
    for report in others:
        assert report, done.everything()
    return others, done.reports[1], done.everything()


@pytest.mark.parametrize(
    "which",
    [
        "killed_in_training",
        "killed_between_two_passes",
        "killed_as_buckets_are_made_anew",
        "killed_before_a_static_graphs_first_pass",
        "killed_in_a_collective",
        "killed_in_a_collective_of_torchs_own",
        "killed_as_buffers_are_sent",
        "killed_as_a_model_is_wrapped",
    ],
)
def test_kill_9_is_named_within_two_seconds(which):
    others, victim, everything = survivors(which)
    for report in others:
        assert report["kind"] == "PeerLostError", everything
        assert "rank 1" in report["text"] and HOST in report["text"], report["text"]
        assert report["at"] - victim["at"] < 2.0, report["at"] - victim["at"]


@pytest.mark.skipif(not MODERN, reason="the path for CUDA tensors needs torch 2")
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_kill_9_while_the_way_of_cuda_tensors_is_made(backend):
    """It is no reason to leave them to torch, which would wait for that rank."""
    assert SIMULATED.exists(), f"{SIMULATED} is not built: ./dev build"
    done = Launch("lost_in_creation.py", 3, [backend], timeout=60).end()
    *others, victim = done.reports
    for report in others:
        assert report.get("kind") == "PeerLostError" and "rank 2" in report["text"], done.everything()
        assert report["at"] - victim["at"] < 2.0


def test_kill_9_while_waiting_for_a_future():
    """A future carries its error as text: torch turns it into a RuntimeError."""
    others, victim, everything = survivors("killed_while_others_wait_for_a_future")
    for report in others:
        assert "RuntimeError" in report["kinds"] and f"rank 1 (host {HOST}" in report["text"], everything
        assert report["at"] - victim["at"] < 2.0


def test_torchs_own_type_catches_it():
    others, _, everything = survivors("killed_in_a_collective")
    wanted = "DistBackendError" if MODERN else "RuntimeError"
    for report in others:
        assert wanted in report["kinds"] and "PacelineError" in report["kinds"], everything


def test_shapes_that_differ_are_named_on_all_ranks():
    others, first, everything = survivors("shapes_differ")
    for report in [*others, first]:
        assert report["kind"] == "MismatchError", everything
        shapes = set(re.findall(r"\[3, \d\]", report["text"]))
        assert len(shapes) >= 2 and "all_reduce" in report["text"], report["text"]


MODELS = {
    "models_of_other_shapes": "'1.weight' is float32 [8, 3] on ranks 0, 2 and float32 [7, 3] on rank 1",
    "models_of_other_types": "'weight' is float32 [4, 3] on ranks 0, 1 and float64 [4, 3] on rank 2",
    "models_of_other_tensors": "'bias' is missing on rank 0 and float32 [4] on ranks 1, 2",
    "models_frozen_elsewhere": "'bias' is float32 [4] on ranks 0, 2 and float32 [4], frozen on rank 1",
    "models_with_names_of_their_own": "tensor 2 ('head.weight' on rank 0) is float32 [8, 3] on ranks 0, 2 and "
    "float32 [7, 3] on rank 1",
    "models_in_another_order": "tensor 0 is 'first.weight' on rank 0 and 'second.weight' on rank 2",
    "buffers_of_other_shapes": "'seen' is float32 [6] on ranks 0, 2 and float32 [5] on rank 1",
}


@pytest.mark.parametrize("which", MODELS)
def test_models_that_differ_are_named_on_all_ranks(which):
    others, first, everything = survivors(which)
    for report in [*others, first]:
        assert report["kind"] == "MismatchError", everything
        assert report["text"].endswith(f"{MODELS[which]}: build it alike on every rank"), report["text"]


def test_gradients_that_come_in_another_order_are_named_on_all_ranks():
    others, first, everything = survivors("another_model_first")
    for report in [*others, first]:
        assert report["kind"] == "MismatchError", everything
        assert "bucket 0 of model 0 (weight … bias)' (float32 [16])" in report["text"], report["text"]
        assert "bucket 0 of model 1 (weight)' (float32 [15])" in report["text"], report["text"]


def test_one_bucket_that_fails_on_one_rank_is_the_error_there():
    others, failed, everything = survivors("one_bucket_fails_on_one_rank")
    assert failed["kind"] == "ResourceExhaustedError" and "in this test" in failed["text"], everything
    for report in others:
        assert report["kind"] in ("PeerLostError", "AbortedError"), everything


def test_dtypes_that_differ_are_named_on_all_ranks():
    others, first, everything = survivors("dtypes_differ", ranks=2)
    for report in [*others, first]:
        assert report["kind"] == "MismatchError", everything
        assert "float32" in report["text"] and "float64" in report["text"], report["text"]


def test_shapes_that_differ_from_the_roots_are_named_on_the_root_too():
    others, root, everything = survivors("shapes_differ_from_the_roots")
    for report in others:
        assert report["kind"] == "MismatchError", everything
        assert set(re.findall(r"\[3, \d\]", report["text"])) == {"[3, 4]", "[3, 5]"}, report["text"]
    assert root["kind"] == "MismatchError", everything  # it was through, and came to the end
    assert set(re.findall(r"\[3, \d\]", root["text"])) == {"[3, 4]", "[3, 5]"}, root["text"]


SENT = {"shapes_sent_differ": "float32 [3, 2]", "dtypes_sent_differ": "int32 [2, 3]"}


@pytest.mark.parametrize("which", SENT)
def test_a_message_that_the_receiver_takes_for_another_is_named_on_all_ranks(which):
    others, receiver, everything = survivors(which)
    for report in [*others, receiver]:
        assert report["kind"] == "MismatchError", everything
        ends = f"rank 0 (host {HOST}) sends float32 [2, 3], rank 1 (host {HOST}) expects {SENT[which]}"
        assert report["text"].endswith(ends), report["text"]


NEVER = ["one_never_comes", "one_never_comes_to_a_monitored_barrier"]
if hasattr(torch.distributed, "set_timeout"):
    NEVER.append("one_never_comes_within_a_later_time_out")
if hasattr(torch.distributed.distributed_c10d, "_set_pg_timeout"):
    NEVER.append("one_never_comes_within_a_time_out_by_its_older_name")


@pytest.mark.parametrize("which", NEVER)
def test_a_rank_that_never_comes_is_named(which):
    others, _, everything = survivors(which)
    for report in others:
        assert report["kind"] == "TimeoutError", everything
        assert "rank 1" in report["text"], report["text"]


@pytest.mark.parametrize(("setting", "seconds"), [(None, 6), ("8", 8)])
def test_a_model_on_gloo_waits_as_long_as_its_process_group_or_the_setting(setting, seconds):
    others, _, everything = survivors("one_stays_away_from_a_pass", PACELINE_TIMEOUT=setting)
    for report in others:
        assert report["kind"] == "TimeoutError", everything
        assert f"timed out after {seconds} s: rank 1 (host {HOST}) has not submitted it" in report["text"], everything


def test_an_uncaught_exception_elsewhere_is_told():
    others, victim, everything = survivors("one_raises")
    for report in others:
        assert report["kind"] in ("AbortedError", "PeerLostError"), everything
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < 5.0


def test_several_communicators_end_together_at_exit():
    started = time.monotonic()
    done = Launch("many_communicators.py", 2, timeout=150).end()
    assert not done.hung and done.statuses == ["0", "0"], done.everything()
    assert all("made 6" in log for log in done.logs), done.everything()
    assert time.monotonic() - started < 58  # a communicator that another rank does not close waits for 60 s


def python(code, **extra):
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**extra), capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_library_is_a_named_error(tmp_path):
    done = python("from paceline import _library; _library.load()", PACELINE_LIBRARY=str(tmp_path / "none.so"))
    assert "LibraryNotFoundError" in done.stderr and str(tmp_path / "none.so") in done.stderr
    assert "./dev build" in done.stderr


def test_a_library_of_another_version_is_a_named_error(tmp_path):
    other = tmp_path / "other.so"
    source = tmp_path / "other.c"
    source.write_text("int nothing(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(other), str(source)], check=True, timeout=60)
    done = python("from paceline import _library; _library.load()", PACELINE_LIBRARY=str(other))
    assert "LibraryNotFoundError" in done.stderr and "another version" in done.stderr


def test_a_wrong_setting_is_named_before_training():
    code = (
        "import os, torch.distributed as dist, paceline.torch\n"
        "dist.init_process_group('paceline', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    done = python(code, PACELINE_TOPK_RATIO="7")
    assert "InvalidArgumentError" in done.stderr and "PACELINE_TOPK_RATIO" in done.stderr, done.stderr
    if MODERN:
        kind = "torch.distributed.DistBackendError"
        code = f"import torch\ntry:\n    exec({code!r})\nexcept {kind}:\n    print('caught')"
        done = python(code, PACELINE_TOPK_RATIO="7")
        assert done.stdout == "caught\n", done.stderr


def test_switched_off_loads_nothing_of_ours(tmp_path):
    """Whether there is a library or not, where the same step of two ranks takes it otherwise."""
    missing = str(tmp_path / "none.so")
    for variables in ({}, {"PACELINE_LIBRARY": missing}):
        off = Launch("loaded.py", 2, PACELINE_DISABLE="1", **variables).end()
        for log in off.logs:
            assert "trained with nothing of ours\n" in log, off.everything()
    on = Launch("loaded.py", 2).end()
    assert all("trained with libpaceline.so" in log for log in on.logs), on.everything()
    on = Launch("loaded.py", 2, PACELINE_LIBRARY=missing).end()
    assert all("trained" not in log and "LibraryNotFoundError" in log for log in on.logs), on.everything()


BY_ENTRY_POINT = "import torch"
LINES = [
    "import paceline.torch",
    "import paceline.compat.perseus",
    "from paceline.compat.tiacc_training import init_tiacc_training; init_tiacc_training()",
    *([BY_ENTRY_POINT] if MODERN else []),  # torch 1.13 looks for none
]


@pytest.mark.parametrize("line", LINES)
def test_the_backend_is_refused_by_name_when_switched_off(tmp_path, line):
    if line == BY_ENTRY_POINT:
        as_in_a_wheel(tmp_path)
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n{line}\nimport torch.distributed as dist\ntry:\n"
        "    dist.init_process_group('paceline', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except getattr(dist, 'DistBackendError', RuntimeError) as error:\n    print(type(error).__name__, error)\n"
    )
    done = python(code, PACELINE_DISABLE="1", PACELINE_LIBRARY=str(tmp_path / "none.so"))
    assert done.stdout.startswith("UnsupportedError PACELINE_DISABLE is set"), done.stdout + done.stderr
    assert "unset it" in done.stdout and "'gloo'" in done.stdout


def test_two_faces_in_one_process_are_refused():
    done = python("from paceline._activate import activate\nactivate('perseus')\nactivate('tiacc_training')")
    assert "ImportError" in done.stderr and "perseus" in done.stderr and "tiacc_training" in done.stderr


def test_the_package_imports_no_framework():
    done = python("import paceline, paceline.compat, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("backend", ["gloo", "paceline", "simulated GPU"])
def test_what_a_dropped_model_has_under_way_writes_into_nobody_elses_memory(backend):
    done = Launch("dropped_model.py", 2, timeout=60, CHECKS_BACKEND=backend).end()
    assert "intact" in done.logs[0], done.everything()
    assert "PeerLostError" in done.logs[1], done.everything()
    assert done.statuses[0].strip() == "0", done.everything()
