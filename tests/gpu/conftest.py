"""Tests that need a GPU, a built tree and network namespaces; under REQUIRE=cuda what would be skipped fails."""

import os
import subprocess
from pathlib import Path

import pytest
from lab_launch import PROGRAM, figures


def _why_not():
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    if not PROGRAM.exists():
        return f"{PROGRAM} is not built: ./dev build"
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        return "this machine lets nobody here make network namespaces (root is needed)"
    return ""


def pytest_configure(config):
    config.addinivalue_line("markers", "anywhere: needs no GPU")


def pytest_collection_modifyitems(items):
    reason = None
    for item in items:
        if item.get_closest_marker("anywhere") is not None or Path(__file__).parent not in item.path.parents:
            continue
        reason = _why_not() if reason is None else reason
        if reason and os.environ.get("REQUIRE") != "cuda":
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def gpu_is_there(request):
    if os.environ.get("REQUIRE") == "cuda" and request.node.get_closest_marker("anywhere") is None:
        reason = _why_not()
        assert not reason, f"REQUIRE=cuda: {reason}"


def pytest_terminal_summary(terminalreporter):
    """What checks have measured, whatever became of them; with -q too."""
    if figures:
        terminalreporter.section("figures")
    for figure in figures:
        terminalreporter.write_line(figure)
