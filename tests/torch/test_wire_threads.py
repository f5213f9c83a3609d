"""Several threads on the wire where there is no GPU: communicators beside each other, and ranks that disagree."""

import pytest
from support import Launch, environment

from paceline import communicator as core
from paceline.errors import InvalidArgumentError


@pytest.mark.parametrize("what", ["together", "disagree"])
def test_communicators_beside_each_other(what):
    done = Launch("checks_wire_threads.py", 3 if what == "together" else 2, [what], timeout=150).end()
    assert not done.hung and set(done.statuses) == {"0"}, done.everything()
    assert all("well" in log for log in done.logs), done.everything()


@pytest.mark.parametrize(("given", "held"), [(None, "auto"), ("1", "1"), ("8", "8")])
def test_the_setting(monkeypatch, given, held):
    assert "PACELINE_WIRE_THREADS" not in environment()
    monkeypatch.delenv("PACELINE_WIRE_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("PACELINE_WIRE_THREADS", given)
    assert core.setting("wire_threads") == held


@pytest.mark.parametrize("given", ["0", "9", "two"])
def test_other_numbers_are_refused_by_name(monkeypatch, given):
    monkeypatch.setenv("PACELINE_WIRE_THREADS", given)
    with pytest.raises(InvalidArgumentError, match=f"PACELINE_WIRE_THREADS.*{given}.*auto.*8"):
        core.check_settings()
