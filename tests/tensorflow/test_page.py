"""docs/tensorflow.md's script, started as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tensorflow.md").read_text()


def test_the_script_of_the_page_trains_alike_on_all_ranks(tmp_path):
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    ours = {"paceline": str(ROOT / "build/bin/paceline"), "python": sys.executable}
    words = [ours.get(word, word) for word in command.split()]
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = dict(re.findall(r"rank (\d) of 2: loss ([\d.]+)$", done.stdout, re.MULTILINE))
    assert losses.keys() == {"0", "1"} and losses["0"] == losses["1"], done.stdout
    assert float(losses["0"]) < 1.2, "it did not learn"  # 2.3 at the first step: ten classes
