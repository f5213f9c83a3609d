"""CUDA graphs over two namespaces as nodes, one rank each, sharing the GPUs of this machine."""

import pytest
from lab_launch import LabSuite

two = LabSuite("checks_graphs.py", 2, timeout=120)


@pytest.mark.parametrize("name", two.names)
def test_two_nodes(name):
    two.expect(name)
