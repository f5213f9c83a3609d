"""Ranks that don't come together, as real processes: each says who is missing, gone or odd, and what to do."""

import re
import signal
import socket
import subprocess

import pytest
from conftest import OVER_FILES, clean_environment, run, wait_until

#: Prints one line a rank: what came of the join.
JOIN = """
import sys
from paceline.communicator import Communicator
try:
    Communicator(timeout=float(sys.argv[1])).close()
except Exception as e:
    print(type(e).__name__, e)
else:
    print("joined")
"""


def start(python, environments, timeout=30, program=JOIN):
    """A process for each of `environments`."""
    return [
        subprocess.Popen(
            [python, "-c", program, str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(**environment),
        )
        for environment in environments
    ]


def end(processes, timeout=60):
    """What each has printed."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_sizes_that_differ_are_named_on_every_rank(python, free_port, sizes):
    place = {"MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    ranks = start(python, [{"RANK": r, "WORLD_SIZE": sizes[r], **place} for r in (0, 1)])
    for text in end(ranks):
        assert text.startswith("MismatchError"), text
        for rank in (0, 1):
            assert f"rank {rank} (host " in text and f"with {sizes[rank]}" in text, text
        assert "Start all ranks with the same size (WORLD_SIZE" in text, text


@pytest.mark.parametrize("odd", [0, 2])
def test_a_setting_that_differs_is_named_on_every_rank(python, free_port, odd):
    place = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    ranks = start(python, [{"RANK": r, "PACELINE_CODEC": "topk" if r == odd else "fp16", **place} for r in range(3)])
    for text in end(ranks):
        assert text.startswith("MismatchError"), text
        assert "codec is 'topk'" in text or "'topk' on rank" in text, text
        assert "'fp16'" in text and f"rank {odd} (host {socket.gethostname()})" in text, text


@pytest.mark.parametrize("variable", ["PACELINE_START_TIMEOUT", "HOROVOD_START_TIMEOUT"])
def test_the_patience_for_a_rank_that_never_comes_is_a_setting(python, free_port, variable):
    place = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port, variable: "1.5"}
    for text in end(start(python, [{"RANK": r, **place} for r in (0, 2)], timeout=0)):
        # Whoever began to wait first tells the other, too.
        assert re.match(r"TimeoutError after 1(\.\d)? s rank 1 of 3 never came", text), text
        assert "PACELINE_START_TIMEOUT sets the patience" in text, text


#: Rank 0's sum waits for rank 1, which has joined and does nothing until its standard input ends.
SUM = """
import array, sys
from paceline import communicator as core
comm = core.Communicator(timeout=0)
if comm.rank == 1:
    sys.stdin.read()
    sys.exit()
data = array.array("f", [1.0])
address = data.buffer_info()[0]
try:
    comm.run(core.ALL_REDUCE, dtype=0, input=address, output=address, count=1, name="loss")
except Exception as e:
    print(type(e).__name__, e)
"""


@pytest.mark.parametrize("variable", ["PACELINE_TIMEOUT", "GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"])
def test_the_patience_for_a_rank_that_does_not_take_part_is_a_setting(python, free_port, variable):
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port, variable: "1.5"}
    text = end(start(python, [{"RANK": r, **place} for r in (0, 1)], program=SUM))[0]
    assert text.startswith("TimeoutError") and "after 1.5 s" in text and "all-reduce 'loss'" in text, text
    assert f"rank 1 (host {socket.gethostname()})" in text, text


def test_the_patience_for_a_peer_that_falls_silent_is_a_setting(python, free_port):
    """One that is stopped on another node: its kernel still takes what it is sent."""
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port, "PACELINE_PEER_TIMEOUT": "1.5"}
    program = SUM.replace("    sys.stdin.read()", "    print('joined', flush=True)\n    sys.stdin.read()")
    ranks = start(python, [{"RANK": r, "PACELINE_NODE_ID": f"node{r}", **place} for r in (0, 1)], program=program)
    try:
        assert ranks[1].stdout.readline() == "joined\n"
        ranks[1].send_signal(signal.SIGSTOP)
        text = ranks[0].communicate(timeout=30)[0]  # of the 300 s that the sum may take
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert text.startswith(f"PeerLostError rank 1 (host {socket.gethostname()}) "), text
    assert 1.5 <= float(re.search(r"has not answered for (\d+\.\d) s", text)[1]) < 15, text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_with_its_host_by_all_others(python, tmp_path, victim):
    """While all wait for rank 4, which does not come."""

    def asked(rank):
        file = tmp_path / f"asked.{rank}"
        return file.stat().st_size if file.exists() else 0

    environment = clean_environment(PACELINE_INTERFACE="lo")
    ranks = [
        subprocess.Popen(
            [python, OVER_FILES, tmp_path, str(r), "5"], stdout=subprocess.PIPE, text=True, env=environment
        )
        for r in range(4)
    ]
    try:
        # Then rank 0 is greeted by all three, for it looks at its sockets before it asks.
        assert wait_until(lambda: all(asked(rank) for rank in range(4)))
        before = asked(0)
        assert wait_until(lambda: asked(0) >= before + 2)
    finally:
        ranks[victim].kill()
        texts = end(ranks)
    for rank in range(4):
        if rank != victim:
            assert texts[rank].startswith("PeerLostError"), texts[rank]
            assert f"rank {victim} (host {socket.gethostname()}) is gone" in texts[rank], texts[rank]


TORCHS_RENDEZVOUS = """
import datetime
import os
import paceline.torch
import torch.distributed as dist
seconds = 60 if os.environ["RANK"] == "0" else 5  # it serves the store that the other one asks
try:
    dist.init_process_group("paceline", timeout=datetime.timedelta(seconds=seconds))
except Exception as e:
    print(type(e).__name__, e)
"""


def test_whoever_is_missing_at_torchs_rendezvous_is_named(python, free_port):
    """Where torch keeps rank 0 until all are there: it is not the one to blame."""
    place = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    ranks = [
        subprocess.Popen(
            [python, "-c", TORCHS_RENDEZVOUS], stdout=subprocess.PIPE, text=True, env=clean_environment(RANK=r, **place)
        )
        for r in (0, 1)
    ]
    try:
        text = end(ranks[1:])[0]
    finally:
        ranks[0].kill()
        ranks[0].communicate()
    assert text.startswith("TimeoutError") and "rank 2 of 3 never came" in text, text
    assert "Rank 0 has not joined either" in text, text


def test_a_port_that_this_user_may_not_take_is_named_with_the_setting(python):
    join = f"{python} -c '{JOIN.strip()}' 5"
    script = f"ip link set lo up && exec setpriv --bounding-set=-net_bind_service --inh-caps=-net_bind_service {join}"
    result = run(
        ["unshare", "--net", "sh", "-c", script], RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", PACELINE_PORT=80
    )
    assert "can't listen on 127.0.0.1:80: Permission denied" in result.stdout, result.stdout + result.stderr
    assert "choose one from 1024 on by PACELINE_PORT on all ranks" in result.stdout, result.stdout


@pytest.mark.parametrize("variable", ["PACELINE_PORT", "PERSEUS_MASTER_PORT"])
def test_a_port_that_is_taken_is_named_with_the_variable_that_chose_it(python, variable):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run([python, "-c", JOIN, "5"], RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", **{variable: port})
    wanted = f"port {port} of 127.0.0.1 is taken by another program: choose a free one by {variable} on all ranks"
    assert wanted in result.stdout, result.stdout + result.stderr
