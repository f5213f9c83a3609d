"""Codecs by environment in DDP: fp16, bf16, top-k with its residuals (checks_codecs, _residuals, _modes, _owners)."""

import pytest
from support import Launch, Suite, names_of

TOPK = {"PACELINE_CODEC": "topk", "PACELINE_TOPK_RATIO": "0.05", "PACELINE_TOPK_THRESHOLD": "2000"}
casts = {codec: Suite("checks_codecs.py", 2, PACELINE_CODEC=codec) for codec in ("fp16", "bf16")}
sparse = {
    "fp32 values": Suite("checks_residuals.py", 2, **TOPK),
    "fp16 values, three ranks": Suite("checks_residuals.py", 3, PACELINE_TOPK_FP16="1", **TOPK),
}


@pytest.mark.parametrize("codec", sorted(casts))
@pytest.mark.parametrize("name", names_of("checks_codecs.py"))
def test_casts(codec, name):
    casts[codec].expect(name)


@pytest.mark.parametrize("values", sorted(sparse))
@pytest.mark.parametrize("name", names_of("checks_residuals.py"))
def test_top_k(values, name):
    sparse[values].expect(name)


# A model this small is compiled sooner here than by processes that have to start for it.
here = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
modes = {
    "topk": Suite("checks_modes.py", 2, **TOPK, **here),
    "fp16": Suite("checks_modes.py", 2, PACELINE_CODEC="fp16", **here),
}


@pytest.mark.parametrize("codec", sorted(modes))
@pytest.mark.parametrize("name", names_of("checks_modes.py"))
def test_modes(codec, name):
    modes[codec].expect(name)


owners = Suite("checks_owners.py", 4, **TOPK)


@pytest.mark.parametrize("name", names_of("checks_owners.py"))
def test_owners_that_change(name):
    owners.expect(name)


def test_new_processes_go_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    for way in ("unbroken", "resumed"):
        done = Launch("resumed.py", 3, [str(tmp_path), way], timeout=120, **TOPK).end()
        assert set(done.statuses) == {"0"}, done.everything()
    assert all("the same bits" in log for log in done.logs), done.everything()
