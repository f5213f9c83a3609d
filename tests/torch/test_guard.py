"""The thread that looks after what would wait for lost ranks."""

import threading
import time
import weakref

import pytest

from paceline._torch import guard


class Thing:
    def __init__(self):
        self.looks = threading.Semaphore(0)

    def look(self):
        self.looks.release()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.001)


def test_it_looks_until_it_is_told_not_to():
    thing = Thing()
    guard.watch(thing)
    for _ in range(3):
        assert thing.looks.acquire(timeout=10)
    guard.unwatch(thing)
    time.sleep(0.1)
    while thing.looks.acquire(blocking=False):
        pass
    time.sleep(0.1)
    assert not thing.looks.acquire(blocking=False)


def test_it_keeps_nothing_alive_and_ends_with_the_last():
    thing = Thing()
    guard.watch(thing)
    assert thing.looks.acquire(timeout=10)
    gone = weakref.ref(thing)
    del thing
    until = time.monotonic() + 10
    while (gone() is not None or guard._thread is not None) and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None
    assert guard._thread is None


def test_what_comes_as_the_last_one_goes_is_looked_at_all_the_same():
    """The thread ends when there is nothing to look at, and must not just have ended for what was given to it."""
    for _ in range(300):
        thing = Thing()
        guard.watch(thing)
        assert thing.looks.acquire(timeout=10)
        guard.unwatch(thing)
        time.sleep(guard.LOOK_SECONDS)
