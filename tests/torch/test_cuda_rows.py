"""Gradients by rows: which weights, how a bucket is cut, the setting; and DDP training on simulated GPUs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import SIMULATED, Suite, names_of
from torch import nn

from paceline import _state
from paceline import communicator as core
from paceline._torch import buckets, rows, start_lines
from paceline.errors import InvalidArgumentError

suite = Suite("checks_cuda_rows.py", 2, needs=SIMULATED, timeout=150)


@pytest.mark.parametrize("name", names_of("checks_cuda_rows.py"))
def test_on_two_nodes(name):
    suite.expect(name)


# --- which weights ----------------------------------------------------------------------------------------------------

LARGE = rows.LEAST_BYTES // 4 // 64


def names_by_rows(module, codec="none"):
    found = rows.of_model(module, codec)
    return {name: found[id(p)] for name, p in module.named_parameters() if id(p) in found}


def test_untied_embeddings_and_bags_that_are_worth_it():
    module = nn.ModuleDict(
        {
            "tokens": nn.Embedding(LARGE, 64),
            "bag": nn.EmbeddingBag(LARGE, 64),
            "small": nn.Embedding(LARGE - 1, 64),
            "sparse": nn.Embedding(LARGE, 64, sparse=True),
            "wide": nn.Embedding(LARGE, 64, dtype=torch.float64),
            "narrow": nn.Embedding(2 * LARGE, 64, dtype=torch.bfloat16),
            "frozen": nn.Embedding.from_pretrained(torch.ones(LARGE, 64)),
            "dense": nn.Linear(LARGE, 64),
        }
    )
    assert names_by_rows(module) == {"tokens.weight": 64, "bag.weight": 64, "narrow.weight": 64}
    for codec in ("fp16", "bf16"):
        assert names_by_rows(module, codec) == names_by_rows(module)
    for codec in ("topk", "int8"):
        assert not names_by_rows(module, codec)


def test_a_weight_that_two_modules_have_is_dense():
    head = nn.Linear(64, LARGE)
    tokens = nn.Embedding(LARGE, 64)
    assert names_by_rows(nn.Sequential(tokens, head)) == {"0.weight": 64}
    head.weight = tokens.weight
    assert not names_by_rows(nn.Sequential(tokens, head))
    # One module in two places looks up rows in both.
    assert names_by_rows(nn.Sequential(tokens, nn.Sequential(tokens))) == {"0.weight": 64}


def test_the_setting_turns_it_off(monkeypatch):
    module = nn.Embedding(LARGE, 64)
    monkeypatch.setenv("PACELINE_SPARSE_ROWS", "off")
    assert not rows.of_model(module, "none")
    monkeypatch.setenv("PACELINE_SPARSE_ROWS", "auto")
    assert rows.of_model(module, "none")
    monkeypatch.setenv("PACELINE_SPARSE_ROWS", "always")
    with pytest.raises(InvalidArgumentError, match=r"PACELINE_SPARSE_ROWS.*always.*auto.*off"):
        core.check_settings()


def test_rank_0_says_which(monkeypatch, capsys):
    monkeypatch.delenv("PACELINE_QUIET", raising=False)
    monkeypatch.setattr(_state, "_said", set())
    module = nn.Sequential(nn.Embedding(LARGE, 64), nn.Linear(64, 2))
    keyed = [(name, p, 0) for name, p in module.named_parameters()]
    for rank in (1, 0, 0):
        monkeypatch.setattr(start_lines, "job_rank", lambda _group_rank, rank=rank: rank)
        rows.say(rows.of_model(module, "none"), keyed)
        assert rank == 0 or not capsys.readouterr().err
    rows.say({}, keyed)
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1, said
    assert f"0.weight (at most {LARGE} rows of 64, 1.0 MB if dense)" in said and "PACELINE_SPARSE_ROWS=off" in said


# --- buckets ----------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 10**6).map(lambda n: 4 * n), st.booleans()), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 10**6))
def test_gradients_by_rows_have_buckets_of_their_own(gradients, cap):
    sizes = [size for size, _ in gradients]
    alone = [i for i, (_, by_rows) in enumerate(gradients) if by_rows]
    caps = buckets.plan(sizes, cap, max(1, cap // 16), max(1, cap // 8), alone)
    assert sum(caps) == sum(sizes) and all(caps)
    ends, total = [0], 0
    for size in caps:
        total += size
        ends.append(total)
    for i in alone:
        begin = sum(sizes[:i])
        assert begin in ends and ends[ends.index(begin) + 1] == begin + sizes[i]


def test_a_models_embeddings_have_them_where_they_travel_by_rows(monkeypatch):
    module = nn.Sequential(nn.Embedding(LARGE, 64), nn.Linear(64, 64), nn.Embedding(LARGE, 64), nn.Linear(64, 5))
    own = LARGE * 64 * 4 / buckets.MIB
    caps = buckets.for_cuda({"module": module})["bucket_cap_mb_list"]
    assert caps.count(own) == 2 and caps[-1] == own and len(caps) == 4, caps
    monkeypatch.setenv("PACELINE_SPARSE_ROWS", "off")
    assert buckets.for_cuda({"module": module})["bucket_cap_mb_list"].count(own) < 2


# --- how a bucket is cut ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
def test_parts_cover_a_bucket_and_cut_no_row(shapes):
    parameters = [nn.Parameter(torch.empty(a, b)) for a, b, _ in shapes]
    chosen = {id(p): p.shape[1] for p, (_, _, by_rows) in zip(parameters, shapes) if by_rows}
    cut = rows.parts(parameters, chosen, 4)
    starts, at = [], 0
    for p in parameters:
        if id(p) in chosen:
            starts += [at, at + p.numel()]
        at += p.numel()
    if not chosen or any(s * 4 % 16 for s in starts if s < at):
        assert cut == []
        return
    end = 0
    for first, elements, row_elements, parameter in cut:
        assert first == end and elements > 0 and first * 4 % 16 == 0
        assert (row_elements == 0) == (parameter is None)
        if row_elements:
            assert elements == parameter.numel() and elements % row_elements == 0
        end = first + elements
    assert end == at
    assert [part[3] for part in cut if part[2]] == [p for p in parameters if id(p) in chosen]
