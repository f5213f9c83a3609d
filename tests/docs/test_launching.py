"""The commands of README.md, docs/launching.md and docs/lab.md start train.py, here the example, as the pages say."""

import re
import shlex
import sys

import pages
import pytest

sys.path.insert(0, str(pages.ROOT / "tests" / "lab"))

from lab_tools import makes_namespaces

needs_root = pytest.mark.skipif(not makes_namespaces(), reason="nobody here may make namespaces (root is needed)")
LAUNCHING = pages.commands("docs/launching.md", "paceline run")
LAB = pages.commands("docs/lab.md", "paceline lab")
README = pages.commands("README.md", "torchrun")
#: Its commands without those that the page on PyTorch has too, which test_pytorch.py runs.
ELSEWHERE = {line.split("torchrun")[0] for line in pages.commands("docs/pytorch.md", "torchrun")}
OF_README = [line for line in README if line.split("torchrun")[0] not in ELSEWHERE]
#: Where a line of the text names a command.
IN_WORDS = re.findall(r"`(paceline run [^`]* train\.py)`", pages.text_of("README.md"))

TRAIN = """
import os, runpy, sys
os.write(1, f"data: {{os.environ.get('DATA')}}\\n".encode())
sys.argv += ["--epochs", "1"]
runpy.run_path({example!r}, run_name="__main__")
"""
#: Many ranks on few cores: they only say who they are.
TELL = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
os.write(1, f"rank {' '.join(os.environ[name] for name in names)}\\n".encode())
"""
#: `ssh -o OPTION … -T HOST COMMAND`, to hosts that are this one.
SSH = """#!/bin/sh
while [ "$1" != -T ]; do options="$options $2"; shift 2; done
echo "$2$options" >>"$0.log"; shift 2
exec sh -c "$*"
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a script and a hostfile."""
    (tmp_path / "train.py").write_text(TRAIN.format(example=str(pages.ROOT / "examples/pytorch_native_ddp_demo.py")))
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return tmp_path


def test_the_pages_have_their_commands():
    assert (len(LAUNCHING), len(LAB), len(README), len(OF_README), len(IN_WORDS)) == (3, 1, 5, 2, 1)


@pytest.mark.parametrize("command", [line for line in LAUNCHING if " -H " not in line])
def test_paceline_run(command, folder):
    code, output = pages.run(command, folder)
    assert code == 0, output
    size = int(re.search(r"-np (\d+)", command)[1]) if "-np" in command else 2
    assert f"paceline: {size} ranks on 1 node (paceline run)" in output
    assert output.count("epoch 0: loss") == 1
    assert output.count(f"data: {'/data' if '-x DATA=/data' in command else None}\n") == size


@needs_root
@pytest.mark.parametrize("command", [*(line for line in LAUNCHING if " -H " in line), *IN_WORDS])
def test_paceline_run_on_other_hosts(command, folder):
    (folder / "train.py").write_text(TELL)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    hosts = [host.split(":") for host in re.search(r"-H (\S+)", command)[1].split(",")]
    slots = [int(count) for _, count in hosts]
    # Addresses of loopback that `paceline run` does not take for this machine.
    named = [f"127.0.0.{2 + node} {name}\n" for node, (name, _) in enumerate(hosts)]
    (folder / "etc_hosts").write_text("".join(["127.0.0.1 localhost\n", *named]))
    inside = 'mount --bind "$0"/etc_hosts /etc/hosts && eval "$1"'
    inside = shlex.join(["unshare", "--mount", "sh", "-c", inside, str(folder), command])
    code, output = pages.run(inside, folder, programs)
    assert code == 0, output
    logins = [line.split() for line in (programs / "ssh.log").read_text().splitlines()]
    assert {host for host, *_ in logins} == {name for name, _ in hosts}
    assert all("BatchMode=yes" in options for _, *options in logins)
    wanted = [(sum(slots[:node]) + local, local, count) for node, count in enumerate(slots) for local in range(count)]
    lines = {
        f"{f'[{rank}]<stdout> ' if '--prefix-output' in command else ''}rank {rank} {sum(slots)} {local} {count}"
        for rank, local, count in wanted
    }
    assert set(output.splitlines()) == lines


@needs_root
@pytest.mark.parametrize("command", LAB)
def test_paceline_lab(command, folder):
    code, output = pages.run(command, folder)
    assert code == 0, output
    nodes, slots = (int(re.search(rf"--{word} (\d+)", command)[1]) for word in ("nodes", "slots"))
    assert f"[0] paceline: {nodes * slots} ranks on {nodes} nodes (torch's launcher)" in output
    assert "lab: 4 nodes × 1 rank, 1 Gb/s both ways" in output
    assert sorted(re.findall(r"^\[(\d)\] data: None$", output, re.MULTILINE)) == list("0123")
    assert re.findall(r"^(\[\d\]) epoch 0: loss", output, re.MULTILINE) == ["[0]"]


@pytest.mark.parametrize("command", OF_README)
def test_torchrun(command, folder):
    """On this machine, where the page leaves out where the nodes are."""
    here, many = re.subn(r"torchrun (--nnodes=4 --nproc_per_node=1 )?… ", "torchrun --nproc_per_node=2 ", command)
    assert many == 1, command
    code, output = pages.run(here, folder)
    assert code == 0, output
    assert output.count("epoch 0: loss") == 1
    line = re.search(r"^paceline: 2 ranks on 1 node .*$", output, re.MULTILINE)[0]
    assert ("top-k 1 %" if "PACELINE_CODEC=topk PACELINE_TOPK_RATIO=0.01" in command else ", exact") in line


def test_python_blocks_compile():
    for block in pages.blocks("README.md", "python"):
        compile(block, "README.md", "exec")
