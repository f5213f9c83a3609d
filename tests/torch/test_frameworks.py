"""Frameworks on top of DDP, with the newer torch, beside which they are installed: checks_frameworks.py."""

import pytest
from support import Suite, names_of

suite = Suite("checks_frameworks.py", 2, timeout=240, PREIMPORT="accelerate,transformers.trainer,lightning")


@pytest.mark.parametrize("name", names_of("checks_frameworks.py"))
def test_frameworks(name):
    suite.expect(name)
