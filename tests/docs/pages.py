"""What the tests of pages share: commands, Python, and a shell in which `paceline` and `python` are this tree's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "lab"))

from ports import free_port  # noqa: E402


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages ("": of none)."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    return [block for language, block in fences if language in languages]


def commands(page: str, *programs: str) -> list[str]:
    """Lines of shell blocks that run one of these programs, whatever variables are set in front."""
    starts = re.compile(rf"(\w+=\S+ )*({'|'.join(map(re.escape, programs))}) ")
    return [line for block in blocks(page, "sh", "") for line in block.splitlines() if starts.match(line)]


def run(command: str, folder: Path, programs: Path | None = None, **variables: str) -> tuple[int, str]:
    """Exit code and all output of a command in `folder`; what stands in `programs` is found before the system's."""
    command = command.replace("torchrun", f"torchrun --master_port {free_port()}")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    found = [*([str(programs)] if programs else []), str(Path(sys.executable).parent), str(ROOT / "build" / "bin")]
    modules = [str(ROOT / "python")]
    if "PACELINE_DISABLE=1" in command:
        modules.append(str(ROOT / "tests" / "torch" / "at_exit"))
    env = {**clean, "PATH": os.pathsep.join([*found, os.environ["PATH"]]), "PYTHONPATH": os.pathsep.join(modules)}
    env.update({"OMP_NUM_THREADS": "1", **variables})
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    return done.returncode, done.stdout + done.stderr
