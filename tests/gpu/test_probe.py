"""What the trial at the start chooses between Paceline and NCCL's sockets, over two namespaces as nodes."""

import re

import pytest
from lab_launch import LabSuite

NAMES = ("two", "two_by_two")
suites = {
    name: LabSuite("checks_probe.py", 2, slots=slots, CHECKS_BACKEND="nccl", PACELINE_CUDA_PATH="auto")
    for name, slots in zip(NAMES, (1, 2), strict=True)
}
_LINE = r"tried at the start, for ([\d.]+) s: (\d+) MiB in ([\d.]+) ms, by NCCL between nodes ([\d.]+)"


@pytest.mark.parametrize("shape", NAMES)
@pytest.mark.parametrize("name", suites["two"].names)
def test_two_nodes(shape, name):
    suites[shape].expect(name)


@pytest.mark.parametrize("shape", NAMES)
def test_the_line_says_what_was_chosen_and_why(shape):
    done = suites[shape].result()
    tried = re.findall(_LINE, done.output)
    assert len(tried) == 1, done.everything()
    _, size, ours, theirs = (float(word) for word in tried[0])
    assert 1 <= size <= 16, tried
    (chosen,) = re.findall(r"chosen: (\w+)", done.output)
    # What is printed is rounded to tenths of a millisecond.
    if theirs >= 0.9 * ours + 0.1:
        assert chosen == "Paceline", done.everything()
    if theirs <= 0.9 * ours - 0.1:
        assert chosen == "NCCL", done.everything()
        assert "PACELINE_CUDA_PATH=paceline overrules" in done.output, done.everything()
