"""Kernels on the GPU against their reference and the CPU's codecs, and under the sanitizer's tools."""

import glob
import os
import re
import shutil
import subprocess
import sysconfig

import pytest
from lab_launch import PATIENCE, PROGRAM

KERNELS = PROGRAM.with_name("gpu_kernels")
#: Where toolkits and NVIDIA's packages for Python put it.
_PLACES = (
    "/usr/local/cuda*/bin",
    "/usr/local/cuda*/compute-sanitizer",
    sysconfig.get_path("purelib") + "/nvidia/*/bin",
)

_CHECKED = re.compile(r"^check ([\w-]+) +(\d+) cases, (\d+) failures$", re.MULTILINE)


def sanitizer():
    folders = [folder for place in _PLACES for folder in sorted(glob.glob(place))]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if found is None:
        reason = f"no compute-sanitizer on PATH or in {', '.join(_PLACES)}: it comes with the CUDA toolkit"
        assert os.environ.get("REQUIRE") != "cuda", f"REQUIRE=cuda: {reason}"
        pytest.skip(reason)
    return found


def run(*command):
    done = subprocess.run(
        command, timeout=280 * PATIENCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def test_every_kernel_equals_its_reference():
    said = run(str(KERNELS), "check")
    found = {name: (int(cases), int(failures)) for name, cases, failures in _CHECKED.findall(said)}
    assert {"top-k", "int8", "rows", "pack"} < set(found), said
    assert all(cases > 0 and failures == 0 for cases, failures in found.values()), said


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_kernel_has_an_error_or_a_hazard(tool):
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "17", str(KERNELS), "sanitize"]
    said = run(*command)
    assert ("ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards") in said, said[-8000:]
