"""Ranks that meet for torch's Gloo, but for those that never come: latecomers.py HOW ABSENT [PORT …]

HOW: env, tcp (by an address), torchrun (whose store is at PORT), again (all come to PORT once they have failed, the
absent by themselves in torchrun's store at the second PORT). ABSENT: ranks, with commas.
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from faulty_notes import seen

import paceline.torch
from paceline.errors import TimeoutError

assert paceline.torch is not None
HOW, RANK = sys.argv[1], int(os.environ["RANK"])
ABSENT = [int(rank) for rank in sys.argv[2].split(",")]
# Whoever serves the store goes last: then nobody can be asked any more.
LIMIT = datetime.timedelta(seconds=10 if RANK == 0 else 5)


def meet():
    if HOW == "tcp":
        where = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=where, rank=RANK, world_size=3, timeout=LIMIT)
    else:
        dist.init_process_group("gloo", timeout=LIMIT)


def in_torchruns_store(port):
    os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="1")


def meet_again():
    if RANK in ABSENT:
        in_torchruns_store(sys.argv[4])
    try:
        meet()
    except TimeoutError as error:
        assert ("ranks 0, 2 of 3 never" if RANK in ABSENT else "rank 1 of 3 never") in str(error), error
    else:
        raise AssertionError("nobody was missing")
    os.environ.update(MASTER_PORT=sys.argv[3], TORCHELASTIC_USE_AGENT_STORE="False")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3
    dist.destroy_process_group()


if HOW == "torchrun":
    in_torchruns_store(sys.argv[3])
if HOW != "again" and RANK in ABSENT:
    os._exit(0)
seen(meet_again if HOW == "again" else meet)
