"""DDP training over namespaces as nodes, one rank each, sharing the GPUs of this machine."""

import pytest
from lab_launch import LabSuite

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
DELAYS = "two_thousand_steps_with_delays"
TOP_K_DELAYS = "three_hundred_steps_of_top_k_with_delays"
ALONE = (DELAYS, TOP_K_DELAYS)  # have launches of their own
#: Sums of two, which have one order.
TWO_RANKS = ("exact_equals_plain_ddp_bit_by_bit",)
TWO_NODES = (
    "exact_equals_its_replay",
    "top_k_equals_its_replay",
    "top_k_with_momentum_equals_its_replay",
    "int8_equals_its_replay",
)
two = LabSuite("checks_training.py", 2, without=ALONE, timeout=170, **DETERMINISTIC)
lanes = LabSuite(
    "checks_training.py",
    2,
    without=ALONE,
    timeout=170,
    PACELINE_LANES="4",
    CUDA_DEVICE_MAX_CONNECTIONS="1",
    PACELINE_ZERO_COPY="1",
    **DETERMINISTIC,
)
three = LabSuite("checks_training.py", 3, without=[*TWO_RANKS, *TWO_NODES, TOP_K_DELAYS], timeout=170, **DETERMINISTIC)


@pytest.mark.parametrize("name", two.names)
def test_two_nodes(name):
    two.expect(name)


@pytest.mark.parametrize("name", lanes.names)
def test_two_nodes_four_lanes_one_hardware_queue(name):
    lanes.expect(name)


@pytest.mark.parametrize("name", three.names)
def test_three_nodes(name):
    three.expect(name)


two_by_two = LabSuite("checks_training.py", 2, slots=2, without=[*ALONE, *TWO_RANKS], timeout=240, **DETERMINISTIC)


@pytest.mark.parametrize("name", two_by_two.names)
def test_two_nodes_of_two_ranks(name):
    """NCCL inside the nodes, Paceline between them."""
    two_by_two.expect(name)


checkpoints = {
    (nodes, slots): LabSuite("checks_checkpoints.py", nodes, slots=slots, timeout=120, **DETERMINISTIC)
    for nodes, slots in ((2, 1), (3, 1), (2, 2))
}


@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape, suite in checkpoints.items() for name in suite.names]
)
def test_checkpoints(shape, name):
    checkpoints[shape].expect(name)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("lanes_", ["1", "4"])
@pytest.mark.parametrize("queues", ["many", "one"])
def test_delays(queues, lanes_, slots):
    """Over one hardware queue all of a bucket is enqueued with its call, else what comes in is launched as it comes.

    Ranks of a node may share a GPU, and NCCL's kernels take turns with everything else there.
    """
    chosen = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if queues == "one" else {}
    timeout = 90 if slots == 1 else 300
    suite = LabSuite(
        "checks_training.py", 2, slots=slots, only=[DELAYS], timeout=timeout, PACELINE_LANES=lanes_, **chosen
    )
    suite.expect(DELAYS)


@pytest.mark.parametrize("slots", [1, 2])
def test_delays_under_top_k(slots):
    """Where the ranks of a node copy, and a thread puts on the streams what goes out, which is not over one queue."""
    timeout = 90 if slots == 1 else 200
    suite = LabSuite(
        "checks_training.py", 2, slots=slots, only=[TOP_K_DELAYS], timeout=timeout, PACELINE_LANES="4", **DETERMINISTIC
    )
    suite.expect(TOP_K_DELAYS)
