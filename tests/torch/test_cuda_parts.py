"""How large buckets are cut without a barrier between iterations, and training on simulated GPUs with them."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SIMULATED, Suite, names_of

from paceline._torch import cuda_overlap

suite = Suite("checks_cuda_parts.py", 2, needs=SIMULATED, timeout=150)


@pytest.mark.parametrize("name", names_of("checks_cuda_parts.py"))
def test_on_two_nodes(name):
    suite.expect(name)


def parts(elements, usual, by_rows=(), has_residuals=False):
    carrier = SimpleNamespace(has_residuals=has_residuals, _usual=usual)
    flight = SimpleNamespace(buffer=SimpleNamespace(numel=lambda: elements), layout=(None, b"", by_rows))
    return cuda_overlap.CudaCarrier.parts(carrier, flight)


@given(st.integers(1, 10**9), st.integers(10**6, 2 * 10**7))
def test_parts_cover_a_bucket_evenly(elements, usual):
    cut = parts(elements, usual)
    assert [first for first, _ in cut] == [sum(size for _, size in cut[:i]) for i in range(len(cut))]
    assert sum(size for _, size in cut) == elements and all(size > 0 for _, size in cut)
    if elements <= 1.5 * usual:
        assert len(cut) == 1
        return
    assert max(size for _, size in cut) <= usual + cuda_overlap._GRANULE
    assert all(size % cuda_overlap._GRANULE == 0 for _, size in cut[:-1])
    assert len(cut) == 1 or cut[-1][1] > cut[0][1] - len(cut) * cuda_overlap._GRANULE


def test_what_can_not_be_cut_is_whole():
    assert len(parts(10**8, 10**6)) == 100
    assert parts(10**8, 10**6, by_rows=[(0, 10**8, 64, b"")]) == [(0, 10**8)]
    assert parts(10**8, 10**6, has_residuals=True) == [(0, 10**8)]
