"""The size of DDP's buckets (checks_buckets.py)."""

import pytest
from support import Suite, names_of

two = Suite("checks_buckets.py", 2)


@pytest.mark.parametrize("name", names_of("checks_buckets.py"))
def test_buckets(name):
    two.expect(name)
