import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
with contextlib.suppress(ImportError):  # Debian's Python need not have it: no test there has a use for it
    from hypothesis import settings

    settings.register_profile("of this project", deadline=None)  # cores are shared: a slow example is no counterexample
    settings.load_profile("of this project")
