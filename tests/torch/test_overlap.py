"""paceline.torch.DistributedOptimizer(overlap="forward"): updates as their gradients arrive (checks_overlap.py)."""

import pytest
from support import Suite, names_of

CODECS = {"exact": {}, "fp16": {"PACELINE_CODEC": "fp16", "CHECKS_NODES": "1"}}
suites = {
    (ranks, codec): Suite("checks_overlap.py", ranks, **settings)
    for ranks in (2, 4)
    for codec, settings in CODECS.items()
}


loops = {ranks: Suite("checks_overlap_loops.py", ranks) for ranks in (2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", names_of("checks_overlap_loops.py"))
def test_training_loops(name, ranks):
    loops[ranks].expect(name)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", names_of("checks_overlap.py"))
def test_bit_equal_to_the_barrier(name, ranks, codec):
    suites[ranks, codec].expect(name)
