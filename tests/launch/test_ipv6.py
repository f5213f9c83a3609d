"""Jobs whose addresses are IPv6's: under torch's launcher, by variables, and by `paceline run`."""

import json
import random
import socket

import pytest
from conftest import SUMS, clean_environment, run
from test_launchers import DDP, expect_same_gradients, ranks_by_hand, torchrun


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def addresses(folder, size):
    """Of all the connections between ranks."""
    found = [json.loads((folder / f"{rank}.json").read_text())["connections"] for rank in range(size)]
    assert all(found)
    return {address for connections in found for _, address in connections}


def test_torchrun(python, free_port, rendezvous_port, tmp_path):
    """Every rank a node of its own, so that all goes over TCP."""
    command = torchrun(python, free_port, SUMS, tmp_path, random.randrange(1 << 30), 1, address="::1")
    result = run(command, PACELINE_PORT=rendezvous_port)
    assert result.returncode == 0, result.stdout + result.stderr
    assert addresses(tmp_path, 3) == {"::1"}


def test_a_script_for_torchs_launcher(python, free_port, tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(DDP)
    out.mkdir()
    result = run(torchrun(python, free_port, script, out, address="::1"), PACELINE_WIRE="tcp")
    assert result.returncode == 0, result.stdout + result.stderr
    expect_same_gradients(out, 3)


def test_a_rendezvous_by_hand(python, free_port):
    place = {"WORLD_SIZE": 2, "PACELINE_RENDEZVOUS": f"[::1]:{free_port}"}
    results = ranks_by_hand(python, [clean_environment(RANK=rank, **place) for rank in range(2)])
    for rank, (text, code) in enumerate(results):
        assert code == 0 and f"rank {rank} size 2 nodes 1 ok" in text, text


def test_paceline_run(paceline, python, tmp_path):
    """To a host by its address, which a network of its own takes for this machine's but no interface has."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    net = "ip link set lo up && ip -6 addr add 2001:db8::1/128 dev lo && ip -6 route add local 2001:db8:1::/64 dev lo"
    command = [paceline, "run", "--ssh", ssh, "-H", "[2001:db8:1::2]:1,localhost:1", "--", python, SUMS, tmp_path, 7, 1]
    result = run(["unshare", "--net", "sh", "-c", net + ' && exec "$@"', "sh", *command])
    assert result.returncode == 0, result.stdout + result.stderr
    assert addresses(tmp_path, 2) == {"2001:db8::1"}
