"""Ranks that meet for torch's Gloo, but for those that never come: latecomers.py ABSENT [PORT]

ABSENT: ranks, with commas. PORT: of a store such as torchrun serves.
"""

import datetime
import os
import sys

import torch.distributed as dist
from faulty_notes import seen

import paceline.torch

assert paceline.torch is not None
if int(os.environ["RANK"]) in [int(rank) for rank in sys.argv[1].split(",")]:
    os._exit(0)
if len(sys.argv) > 2:
    os.environ.update(
        MASTER_PORT=sys.argv[2], TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="1", GROUP_RANK="0"
    )
seconds = 6 if os.environ["RANK"] == "0" else 3  # whoever serves the store goes last: then nobody can be asked
seen(lambda: dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds)))
