"""All-reduce of CUDA tensors over namespaces as nodes, one rank each, sharing the GPUs of this machine."""

import pytest
from lab_launch import LabSuite

#: Sums of two, which have one order.
TWO_NODES = ("top_k_keeps_its_books_and_takes_the_largest", "int8_keeps_its_books")
two = LabSuite("checks_all_reduce.py", 2, timeout=120)
lanes = LabSuite(
    "checks_all_reduce.py", 2, timeout=120, PACELINE_LANES="4", CUDA_DEVICE_MAX_CONNECTIONS="1", PACELINE_ZERO_COPY="1"
)
three = LabSuite("checks_all_reduce.py", 3, without=TWO_NODES, timeout=120)


@pytest.mark.parametrize("name", two.names)
def test_two_nodes(name):
    two.expect(name)


@pytest.mark.parametrize("name", lanes.names)
def test_two_nodes_four_lanes_one_hardware_queue(name):
    lanes.expect(name)


@pytest.mark.parametrize("name", three.names)
def test_three_nodes(name):
    three.expect(name)


two_by_two = LabSuite("checks_all_reduce.py", 2, slots=2, timeout=150)


@pytest.mark.parametrize("name", two_by_two.names)
def test_two_nodes_of_two_ranks(name):
    """NCCL inside the nodes, Paceline between them."""
    two_by_two.expect(name)
