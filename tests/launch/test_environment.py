"""What scripts for torch's launcher read, supplied to a process that another launcher started."""

import json

from conftest import run

ASKED = """
import json, os
from paceline import _launch
given = _launch.supply_environment()
print(json.dumps([given, {name: os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")}]))
"""
ALONE = {
    "SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_STEP_NUM_TASKS": 1, "SLURM_LOCALID": 0, "SLURM_JOB_ID": 7,
    "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "localhost",
}  # fmt: skip


def asked(python, **variables):
    result = run([python, "-c", ASKED], **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_what_is_missing_is_supplied(python):
    given, there = asked(python, **ALONE)
    assert given["RANK"] == "0" and given["WORLD_SIZE"] == "1"
    assert there == {name: given[name] for name in there}


def test_what_the_user_has_set_stays(python):
    given, there = asked(python, **ALONE, MASTER_ADDR="10.9.8.7", MASTER_PORT="1234")
    assert there == {"RANK": "0", "MASTER_ADDR": "10.9.8.7", "MASTER_PORT": "1234"}
    assert "MASTER_ADDR" not in given and given["RANK"] == "0"


def test_nothing_is_supplied_without_a_launcher(python):
    assert asked(python) == [{}, {"RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None}]
