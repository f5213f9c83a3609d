"""Frameworks on top of DDP, where they are installed (with the newer torch): checks_frameworks.py."""

import importlib.util

import pytest
from support import Suite, names_of

INSTALLED = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers", "lightning"))
suite = Suite("checks_frameworks.py", 2, timeout=240, PREIMPORT="accelerate,transformers.trainer,lightning")


@pytest.mark.parametrize("name", names_of("checks_frameworks.py") if INSTALLED else [])
def test_frameworks(name):
    suite.expect(name)
