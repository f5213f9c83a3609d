"""overlap="forward" over namespaces as nodes, one rank each, sharing the GPUs of this machine."""

import pytest
from lab_launch import LabRun, LabSuite

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
two = LabSuite("checks_overlap.py", 2, timeout=170, **DETERMINISTIC)
lanes = LabSuite(
    "checks_overlap.py", 2, timeout=170, PACELINE_LANES="4", CUDA_DEVICE_MAX_CONNECTIONS="1", **DETERMINISTIC
)
two_by_two = LabSuite("checks_overlap.py", 2, slots=2, timeout=240, **DETERMINISTIC)


@pytest.mark.parametrize("name", two.names)
def test_two_nodes(name):
    two.expect(name)


@pytest.mark.parametrize("name", lanes.names)
def test_two_nodes_four_lanes_one_hardware_queue(name):
    lanes.expect(name)


@pytest.mark.parametrize("name", two_by_two.names)
def test_two_nodes_of_two_ranks(name):
    """NCCL inside the nodes, Paceline between them."""
    two_by_two.expect(name)


@pytest.mark.parametrize("fused", ["fused", "not fused"])
@pytest.mark.parametrize(("which", "nodes"), [("killed", 2), ("killed", 3), ("stopped", 2)])
def test_after_a_fault_only_what_had_arrived_has_changed(which, nodes, fused):
    only_what_had_arrived_has_changed(which, nodes, fused, PACELINE_TIMEOUT="5" if which == "stopped" else "30")


def test_after_a_fault_under_a_codec_only_what_had_arrived_has_changed():
    only_what_had_arrived_has_changed("killed", 2, "fused", PACELINE_CODEC="fp16")


def only_what_had_arrived_has_changed(which, nodes, fused, **chosen):
    done = LabRun("faulty_overlap.py", nodes, [which, fused], timeout=60, grace="10s", CHECKS_BACKEND="nccl", **chosen)
    assert not done.hung, done.everything()
    victim = done.reports[1]
    for rank, report in enumerate(done.reports):
        if rank == 1:
            continue
        assert "kind" in report and "PacelineError" in report["kinds"], done.everything()
        assert "rank 1" in report["text"], report["text"]
        assert report["at"] - victim["at"] < (7.0 if which == "stopped" else 2.0), report["at"] - victim["at"]
        assert report["unchanged"], "parameters changed whose gradients had not arrived"
    others = [code for rank, code in enumerate(done.exits) if rank != 1]
    assert others == [1] * (nodes - 1), done.everything()
