"""The commands of docs/pytorch.md do what the page says."""

import shutil

import pages
import pytest

PAGE = "docs/pytorch.md"
COMMANDS = [line for block in pages.blocks(PAGE, "sh") for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
    code, output = pages.run(command.replace("build/compat", str(tmp_path)), pages.ROOT)
    assert code == 0, output
    if "torchrun" in command:
        assert ("paceline: 2 ranks" in output) == ("PACELINE_DISABLE=1" not in command), output
    if "demo" in command:
        assert "epoch 1: loss" in output, output


def test_the_page_has_commands():
    assert len(COMMANDS) >= 5 and shutil.which("bash")


def test_python_blocks_compile():
    for block in pages.blocks(PAGE, "python"):
        compile(block, PAGE, "exec")
