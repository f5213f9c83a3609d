"""FSDP, ZeRO and every collective on "cpu:paceline,cuda:paceline": namespaces as nodes, sharing this machine's GPUs."""

import pytest
from lab_launch import LabSuite

CHOSEN = {"CHECKS_BACKEND": "cpu:paceline,cuda:paceline"}
two = LabSuite("checks_sharded.py", 2, timeout=170, **CHOSEN)
one_queue = LabSuite("checks_sharded.py", 2, timeout=170, CUDA_DEVICE_MAX_CONNECTIONS="1", PACELINE_LANES="2", **CHOSEN)
bytes_alone = LabSuite(
    "checks_sharded.py", 2, only=["gradients_travel_as_16_bits_where_asked"], PACELINE_CODEC="fp16", **CHOSEN
)
two_by_two = LabSuite("checks_sharded.py", 2, slots=2, timeout=240, **CHOSEN)


@pytest.mark.parametrize("name", two.names)
def test_two_nodes(name):
    two.expect(name)


@pytest.mark.parametrize("name", one_queue.names)
def test_two_nodes_one_hardware_queue(name):
    one_queue.expect(name)


@pytest.mark.parametrize("name", two_by_two.names)
def test_two_nodes_of_two_ranks(name):
    """NCCL inside the nodes, Paceline between them."""
    two_by_two.expect(name)


@pytest.mark.parametrize("name", bytes_alone.names)
def test_the_codec_of_ddp_says_nothing_to_sharded_models(name):
    bytes_alone.expect(name)
