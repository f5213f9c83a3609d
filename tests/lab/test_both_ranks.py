"""Two ranks of one process, over a shaped link; and what bench/gpu/one_gpu.py works out of it."""

import os
import sys
from pathlib import Path

import pytest
from lab_tools import ROOT, run_lab

sys.path.insert(0, str(ROOT / "bench" / "gpu"))

import one_gpu


def test_both_ranks_may_live_in_one_process(tmp_path):
    result = run_lab(
        "--nodes", "2", "--rate", "1gbit", "--no-calibration", "--quiet",
        command=[sys.executable, str(Path(__file__).with_name("both_ranks.py")), str(tmp_path)],
        prefix=["env", f"PYTHONPATH={os.pathsep.join([str(ROOT / 'python'), os.environ.get('PYTHONPATH', '')])}"],
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} is right" in result.stdout


@pytest.mark.anywhere
def test_shares_of_the_bytes_by_time():
    seen = one_gpu.Watch("lo")
    seen.look()
    assert len(seen.times) == len(seen.into) == len(seen.out) == 1
    seen.times = [k / 1000 for k in range(102)]
    seen.out = [7 + 10 * k for k in range(102)]  # 10 bytes a millisecond
    seen.into = [0] * 52 + [1000] * 50  # all at once
    found = seen.shares(0.0005, 0.1015)
    left, come = found[: len(one_gpu.SHARES)], found[len(one_gpu.SHARES) :]
    assert left == pytest.approx([share * 101 - 0.5 for share in one_gpu.SHARES], abs=1.01)
    assert come == pytest.approx([51.5] * len(one_gpu.SHARES))
    assert seen.shares(0.0005, 0.003) is None
