"""init_process_group("paceline"), with torch's Gloo made unavailable (checks_group.py)."""

import pytest
from support import Suite, names_of

two, four = Suite("checks_group.py", 2), Suite("checks_group.py", 4)


@pytest.mark.parametrize("name", names_of("checks_group.py"))
def test_four_ranks(name):
    four.expect(name)


@pytest.mark.parametrize("name", names_of("checks_group.py"))
def test_two_ranks(name):
    two.expect(name)
