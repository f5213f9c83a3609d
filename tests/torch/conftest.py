import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Fixtures of two files.
from fake_steps import endpoint, fused, watched  # noqa: F401

with contextlib.suppress(ImportError):  # Debian's Python need not have it: no test there has a use for it
    from hypothesis import settings

    settings.register_profile("of this project", deadline=None)  # cores are shared: a slow example is no counterexample
    settings.load_profile("of this project")
