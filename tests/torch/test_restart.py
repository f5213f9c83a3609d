"""Training that torchrun starts again: a rank is lost after all have joined, and all join once more."""

import os
import signal
import subprocess
import sys

import pytest
from ranks import free_port
from support import HERE, MODERN, environment

RANKS = 3
# Torch 1.13's torchrun takes no other value under Python 3.11.
REDIRECTS = [] if MODERN else ["--redirects", "1", "--tee", "1"]
#: An agent's: torch 1.13 knows no address to give.
AGENT = ["--local_addr", "127.0.0.1"] if MODERN else REDIRECTS


@pytest.mark.parametrize(("rendezvous", "way"), [("static", "killed"), ("c10d", "ended")])
def test_training_goes_on_where_torchrun_starts_it_again(tmp_path, way, rendezvous):
    """From the checkpoint, to where one process with all the data ends: nothing of the first start is met again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--max_restarts", "1"]
    command += {
        "static": ["--master_addr", "127.0.0.1", "--master_port", str(free_port())],
        "c10d": ["--standalone"],
    }[rendezvous]
    command += [*REDIRECTS, str(HERE / "restarted.py"), str(tmp_path), way]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    for rank in range(RANKS):
        assert (tmp_path / str(rank)).read_text() == f"start 1, {RANKS} ranks, steps 3 to 6: right", output


@pytest.mark.skipif(not MODERN, reason="torch 1.13 itself has the agent's count in its store's keys")
@pytest.mark.parametrize("victim", [0, 1])
def test_nodes_meet_again_whose_agents_count_restarts_differently(tmp_path, victim):
    """An agent counts its own workers' failures: the other one restarts its healthy ones and counts none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    command += ["--max_restarts", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--rdzv_id", "job", "--local_addr", "127.0.0.1"]
    command += [str(HERE / "restarted_nodes.py"), str(tmp_path), str(victim)]
    agents = [
        subprocess.Popen(
            command,
            env=environment(PACELINE_INTERFACE="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    outputs = []
    try:
        for agent in agents:
            outputs.append(agent.communicate(timeout=120)[0])
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert (tmp_path / str(victim)).read_text() == "2 ranks, agent's count 1", outputs
    assert (tmp_path / str(1 - victim)).read_text() == "2 ranks, agent's count 0", outputs


def test_training_goes_on_with_the_nodes_that_are_left(tmp_path):
    """An elastic job starts again with fewer ranks; what the store holds of the former ones misleads nobody."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "2"]
    command += ["--max_restarts", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    quick = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    command += ["--rdzv_id", "job", *AGENT, "--monitor_interval", "0.1"]
    agents = [
        subprocess.Popen(
            [
                *command,
                "--rdzv_conf",
                f"{quick},is_host={int(not victim)}",
                str(HERE / "resized_nodes.py"),
                str(tmp_path),
            ],
            env=environment(PACELINE_INTERFACE="lo", **victim),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for victim in ({}, {"VICTIM": "1"})
    ]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, -signal.SIGKILL], "\n".join(outputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], outputs
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["2 ranks"] * 2, outputs
