"""What is aborted is left behind: nothing that waits for it may hold up the process's end."""

import subprocess
import sys

import pytest
import torch.distributed as dist

SCRIPT = """
import sys
from paceline._torch import aborts

class Backend:
    def {method}(self):
        print("aborted", flush=True)

    def __del__(self):
        print("destroyed", flush=True)

backend = Backend()
aborts.abort(backend)
del backend
sys.exit(3)
"""


@pytest.mark.parametrize(("method", "said"), [("abort", "aborted\n"), ("shutdown", "destroyed\n")])
def test_its_destructor_is_not_called(method, said):
    """torch's own waits for a watchdog that sleeps for a minute. What can't be aborted is as it was."""
    script = SCRIPT.format(method=method)
    assert run(script) == (said, 3)


WORLD = """
import os
import torch
import torch.distributed as dist
import paceline.torch
from paceline._torch import aborts

class Backend:
    def abort(self):
        pass

os.environ.update(RANK="0", WORLD_SIZE="1")
c10d = dist.distributed_c10d
if hasattr(c10d, "_abort_process_group"):
    abort = c10d._abort_process_group
    c10d._abort_process_group = lambda group=None: (print("aborted"), abort(group))
for lost in (False, True, False):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    if lost:
        aborts.abort(Backend(), made_by_torch=True)
    else:
        aborts.abort(Backend())
    dist.destroy_process_group()
    print("ended", not dist.is_initialized())
"""


def test_a_world_whose_nccl_was_aborted_is_aborted_and_can_begin_again():
    """A torch that can't abort its groups (1.13) destroys them."""
    aborted = "aborted\n" if hasattr(dist.distributed_c10d, "_abort_process_group") else ""
    assert run(WORLD) == (f"ended True\n{aborted}ended True\nended True\n", 0)


def run(script):
    """(what it printed, how it ended)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "Error" not in done.stderr, done.stderr
    return done.stdout, done.returncode
