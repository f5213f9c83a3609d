"""How long operations may take under torch: the settings', the script's, torch's own, in that order."""

import datetime

import pytest
import torch.distributed as dist

from paceline import _state
from paceline import communicator as core
from paceline._torch import endpoints, patience

HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def made(monkeypatch):
    """What communicators are made with; none of this process's settings counts."""
    for variable in ("PACELINE_TIMEOUT", "GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(_state, "face", "paceline")
    calls = []

    def communicator(**given):
        calls.append((given["timeout"], given["operation_timeout"]))
        return None

    monkeypatch.setattr(core, "Communicator", communicator)
    return calls


def make(**given):
    endpoints.make_communicator(0, 2, None, "checks", announce=False, **given)


def test_what_torch_bears_is_borne(made):
    make(bears=HOUR)
    make()
    assert made == [(0.0, 3600.0), (0.0, dist.distributed_c10d.default_pg_timeout.total_seconds())]


def test_a_scripts_time_out_of_our_own_groups_is_for_both(made):
    make(timeout=7.0)
    assert made == [(7.0, 7.0)]


@pytest.mark.parametrize("variable", ["PACELINE_TIMEOUT", "GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"])
def test_a_setting_comes_before_what_was_meant_for_gloo(made, monkeypatch, variable):
    monkeypatch.setenv(variable, "9")
    make(bears=HOUR)
    make()
    assert made == [(0.0, 0.0), (0.0, 0.0)]  # 0: the settings'


def test_a_faces_own_default_counts_as_a_setting(made, monkeypatch):
    monkeypatch.setattr(_state, "face", "perseus")  # whose users know it: a minute
    make(bears=HOUR)
    monkeypatch.setattr(_state, "face", "tiacc_training")
    make(bears=HOUR)
    assert made == [(0.0, 0.0), (0.0, 3600.0)]


def test_given_is_what_differs_from_torchs_default():
    assert patience.given(None) == patience.given(patience.default()) == 0.0
    assert patience.given(HOUR) == 3600.0
