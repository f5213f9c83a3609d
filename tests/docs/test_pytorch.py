"""The commands of docs/pytorch.md do what the page says."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pytorch.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


def run(command, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command.replace("build/compat", str(tmp_path)).replace("torchrun", f"torchrun --master_port {port}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = [str(ROOT / "python")]
    if "PACELINE_DISABLE=1" in command:
        modules.append(str(ROOT / "tests" / "torch" / "at_exit"))
    env = {**clean, "PATH": path, "PYTHONPATH": os.pathsep.join(modules), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
    code, output = run(command, tmp_path)
    assert code == 0, output
    if "torchrun" in command:
        assert ("paceline: 2 ranks" in output) == ("PACELINE_DISABLE=1" not in command), output
    if "demo" in command:
        assert "epoch 1: loss" in output, output


def test_the_page_has_commands():
    assert len(COMMANDS) >= 5 and shutil.which("bash")


def test_python_blocks_compile():
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "docs/pytorch.md", "exec")
