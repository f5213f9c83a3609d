"""What is kept of a bucket from pass to pass, and until when."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline._torch.attachment import Attachment


class Model:
    """What an attachment looks at of a DDP model; `_has_rebuilt_buckets` as DDP sets it."""

    def __init__(self):
        self.module = nn.Linear(4, 4)
        self.parameters_to_ignore = set()
        self._has_rebuilt_buckets = False


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def attachment(model):
    endpoint = SimpleNamespace(steps=SimpleNamespace(add=lambda *_: None, dropped=[], enabled=False))
    return Attachment(model, endpoint)


def test_a_bucket_is_known_while_ddp_keeps_its_buckets(attachment):
    buffer = torch.zeros(8)
    for _ in range(3):
        attachment.begin_pass()
        kept = attachment.known(0, buffer) or attachment.keep(0, buffer, "calls")
    attachment.begin_pass()
    assert attachment.known(0, buffer) is kept and kept.calls == "calls"
    assert attachment.known(1, buffer) is None


def test_other_memory_or_another_size_is_another_bucket(attachment):
    buffer = torch.zeros(8)
    attachment.begin_pass()
    attachment.keep(0, buffer, None)
    assert attachment.known(0, torch.zeros(8)) is None
    assert attachment.known(0, buffer[:4]) is None


def test_buckets_that_ddp_has_made_anew_are_others_wherever_they_lie(attachment, model):
    buffer = torch.zeros(8)
    attachment.begin_pass()
    attachment.keep(0, buffer, None)
    model._has_rebuilt_buckets = True
    attachment.begin_pass()
    assert attachment.known(0, buffer) is None
    attachment.keep(0, buffer, None)
    attachment.begin_pass()
    assert attachment.known(0, buffer) is not None


def test_where_ddp_does_not_tell_nothing_is_kept(attachment, model):
    del model._has_rebuilt_buckets
    buffer = torch.zeros(8)
    attachment.begin_pass()
    attachment.keep(0, buffer, None)
    attachment.begin_pass()
    assert attachment.known(0, buffer) is None
