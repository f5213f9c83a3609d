"""init_process_group("paceline"), with torch's Gloo made unavailable (group_world.py)."""

import pytest
from support import MODERN, Suite, names_of

FILES = ("checks_callbacks.py", "checks_group.py", "checks_layouts.py", "checks_lifetimes.py", "checks_messages.py")
SUITES = {(file, ranks): Suite(file, ranks) for file in FILES for ranks in (4, 2)}
WHOLE = {file: Suite(file, 2, CHECKS_WHOLE_GROUP="1") for file in FILES}
NAMES = [(file, name) for file in FILES for name in names_of(file)]


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_four_ranks(file, name):
    SUITES[file, 4].expect(name)


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_two_ranks(file, name):
    SUITES[file, 2].expect(name)


if MODERN:

    @pytest.mark.parametrize(("file", "name"), NAMES)
    def test_as_a_whole_process_group(file, name):
        """What torch 2.0 to 2.14 get."""
        WHOLE[file].expect(name)
