"""More than 2 GiB in one tensor (checks_large.py)."""

import re
from pathlib import Path

import pytest
from support import Suite, names_of

GIB_NEEDED = 6
two = Suite("checks_large.py", 2)


def available_gib():
    return int(re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)[1]) / 2**20


@pytest.mark.parametrize("name", names_of("checks_large.py"))
def test_large(name):
    if available_gib() < GIB_NEEDED:
        pytest.skip(f"less than {GIB_NEEDED} GiB of memory is free")
    two.expect(name)
