"""What is aborted is left behind: nothing that waits for it may hold up the process's end."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from paceline._torch import aborts

class Backend:
    def {method}(self):
        print("aborted", flush=True)

    def __del__(self):
        print("destroyed", flush=True)

backend = Backend()
aborts.abort(backend)
del backend
sys.exit(3)
"""


@pytest.mark.parametrize(("method", "said"), [("abort", "aborted\n"), ("shutdown", "destroyed\n")])
def test_its_destructor_is_not_called(method, said):
    """torch's own waits for a watchdog that sleeps for a minute. What can't be aborted is as it was."""
    script = SCRIPT.format(method=method)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == (said, 3), done.stderr
