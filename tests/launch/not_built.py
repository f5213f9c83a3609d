"""Settings that are known but have no effect yet, and what a job says of them."""

import json
import subprocess
from pathlib import Path

PACELINE = Path(__file__).resolve().parents[2] / "build" / "bin" / "paceline"
#: What asks for something other than the default, of each type.
VALUES = {"flag": "1", "integer": "7", "number": "7", "text": "x"}


def names_and_values():
    """Each name that a script may have set, with a value."""

    def doctor(*options):
        return subprocess.run([PACELINE, "doctor", "--settings", *options], capture_output=True, text=True, check=True)

    rows = [row for row in json.loads(doctor("--json").stdout) if not row["built"]]
    found = {name: VALUES[row["type"]] for row in rows for name in (row["variable"], *row["aliases"])}
    foreign = [line.split()[0] for line in doctor().stdout.splitlines() if line.endswith(", not built yet")]
    assert len(rows) > 10 and len(foreign) > 10
    return found | dict.fromkeys(foreign, "1")


def expect_one_warning_each(names, said):
    """`said`: by all ranks together."""
    for name in names:
        warning = f"[paceline 0] warning: {name} is known but has no effect yet; the job goes on without it"
        assert said.count(f"warning: {name} is known") == 1 == said.count(warning), f"{name}\n{said}"
