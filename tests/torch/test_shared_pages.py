"""Buckets whose pages are shared in the node (checks_shared_pages.py)."""

import pytest
from support import Suite, names_of

two = Suite("checks_shared_pages.py", 2)
three = Suite("checks_shared_pages.py", 3)
two_nodes = Suite("checks_shared_pages.py", 4, CHECKS_RANKS_A_NODE="2")


@pytest.mark.parametrize("suite", [two, three, two_nodes], ids=["2", "3", "2x2"])
@pytest.mark.parametrize("name", names_of("checks_shared_pages.py"))
def test_shared_pages(suite, name):
    suite.expect(name)
