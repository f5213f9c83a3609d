"""Models on the process group "paceline" (checks_models.py), and what only torch 2 has (checks_modern.py)."""

import pytest
from support import MODERN, Suite, names_of

both = Suite("checks_models.py", 2)
modern = Suite("checks_modern.py", 2)


@pytest.mark.parametrize("name", names_of("checks_models.py"))
def test_models(name):
    both.expect(name)


if MODERN:  # what older torch answers instead: test_older.py

    @pytest.mark.parametrize("name", names_of("checks_modern.py"))
    def test_torch_2(name):
        modern.expect(name)
