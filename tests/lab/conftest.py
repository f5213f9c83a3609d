import signal

import pytest
from lab_tools import PROGRAM, makes_namespaces

# What started the tests may ignore signals (a shell does, of what it puts in the background); labs inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    """Namespaces need root (or user namespaces); without either only the tests marked `anywhere` can run."""
    if makes_namespaces():
        return
    reason = "this machine lets nobody here make network namespaces (root is needed)"
    for item in items:
        if item.get_closest_marker("anywhere") is None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config):
    config.addinivalue_line("markers", "anywhere: needs no namespaces")


@pytest.fixture(scope="session", autouse=True)
def program_is_built():
    assert PROGRAM.exists(), f"{PROGRAM} is not built: ./dev build"
