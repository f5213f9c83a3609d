"""Runs a file of checks on N ranks: imports torch once, then forks the ranks (an import costs seconds a rank).

As a program it is one such launch; zygote.py makes many after a single import.

    ranks.py N FOLDER SCRIPT [ARGUMENT…]

The ranks see what torchrun would set. Rank r's output goes to FOLDER/r.log, its exit status to FOLDER/r.status.
A script that must patch torch before paceline is imported can do so: nothing but torch is imported here.
"""

import faulthandler
import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab"))

from ports import free_port


def child(rank, size, port, folder, script, arguments):
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    local = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def import_torch():
    import torch
    import torch.distributed

    if hasattr(torch, "compile"):
        import torch._dynamo  # what DDP and the optimizers import on first use
        import torch._inductor.config
        import torch.distributed.optim

    torch.set_num_threads(1)


def run(command):
    size, folder, script, arguments = int(command[0]), Path(command[1]), command[2], command[3:]
    for name in filter(None, os.environ.get("PREIMPORT", "").split(",")):
        importlib.import_module(name)
    port = free_port()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid:
            pids.append(pid)
            (folder / f"{rank}.pid").write_text(str(pid))
            continue
        # The child leaves through sys.exit, so that atexit handlers run as in any script.
        child(rank, size, port, folder, script, arguments)
        return
    worst = 0
    for rank, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        (folder / f"{rank}.status").write_text(str(code))
        worst = worst or code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if worst else 0)  # to take torch down costs a second or two, here for nothing


def guarded(main):
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(3) from None


def main():
    import_torch()
    run(sys.argv[1:])


if __name__ == "__main__":
    guarded(main)
