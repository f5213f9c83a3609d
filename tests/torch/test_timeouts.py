"""Time-outs that a script sets later, where torch's function for it knows torch's own backends only."""

import datetime

import pytest
import torch.distributed as dist

from paceline._torch import lifetime

THREE = datetime.timedelta(seconds=3)


class Ours:
    paceline_endpoint = "an endpoint"

    def __init__(self):
        self.asked = []

    def set_timeout(self, timeout):
        self.asked.append(timeout)


class Group:
    """A process group of torch's: a backend for each device."""

    def __init__(self, **backends):
        self.backends = backends

    def _get_backend(self, device):
        if device.type not in self.backends:
            raise RuntimeError("no backend for it")
        return self.backends[device.type]


@pytest.fixture
def older(monkeypatch):
    """torch before 2.15; returns what its own function was called with."""
    calls = []

    def _set_pg_timeout(timeout, group=None):
        calls.append((timeout, group))

    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", _set_pg_timeout, raising=False)
    lifetime.patch_timeouts()
    lifetime.patch_timeouts()
    return calls


def test_a_group_of_ours_hears_of_it_and_torch_does_not_warn(older):
    whole, backend = Ours(), Ours()
    for group in (whole, Group(cpu=backend), Group(cpu=backend, cuda=backend)):
        dist.distributed_c10d._set_pg_timeout(THREE, group)
    assert whole.asked == [THREE] and set(backend.asked) == {THREE} and older == []


def test_the_default_group_is_meant_where_none_is_given(older, monkeypatch):
    whole = Ours()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: whole)
    dist.distributed_c10d._set_pg_timeout(THREE)
    assert whole.asked == [THREE]


def test_torchs_own_backends_are_left_to_torch(older):
    backend = Ours()
    beside, alone = Group(cpu=backend, cuda="NCCL"), Group(cpu="Gloo")
    for group in (beside, alone):
        dist.distributed_c10d._set_pg_timeout(THREE, group)
    assert backend.asked == [THREE] and older == [(THREE, beside), (THREE, alone)]


def test_newer_torch_asks_by_itself(monkeypatch):
    original = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    monkeypatch.setattr(dist, "set_timeout", lambda *_: None, raising=False)
    lifetime.patch_timeouts()
    assert getattr(dist.distributed_c10d, "_set_pg_timeout", None) is original
