"""What a machine lacks or refuses: labs do without it, or name it, what to do about it, and what is next best."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from lab_tools import (
    MOUNTS,
    ROOT,
    lab_command,
    on_a_small_disk,
    processes_with,
    report_of,
    run_lab,
    wait_until,
)

NEXT_BEST = "Next best here: --loopback runs the same ranks as plain processes, without link speeds\n"
AS_ROOT = "Run as root (sudo; in a container with --privileged)"
FAST = ("--quiet", "--no-calibration")


def refusing(**calls):
    """System calls, each with its errno, as a container's filter refuses them."""
    filtered = [f"{name}:{error}" for name, error in calls.items()]
    return [sys.executable, str(ROOT / "tests" / "launch" / "seccomp.py"), *filtered, "--"]


def mounted(script):
    """The shell's `script` has its way with mounts that nobody else sees."""
    return [*MOUNTS, "sh", "-c", f'{script} && exec "$@"', "sh"]


def limited(limit):
    return ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash"]


@pytest.mark.anywhere
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_ranks_whose_end_no_descriptor_tells_end(error):
    """Before Linux 5.3, and in containers whose filter does not know the call."""
    for code in (0, 7):
        done = run_lab(
            *FAST, "--loopback", command=["sh", "-c", f"exit {code}"], prefix=refusing(pidfd_open=error), timeout=30
        )
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_nodes_are_entered_without_a_descriptor_of_their_holder(error):
    command = ["sh", "-c", "echo $(hostname) $(ls /sys/class/net) $(grep -c node1 /etc/hosts); exit $RANK"]
    done = run_lab(*FAST, command=command, prefix=refusing(pidfd_open=error), timeout=30)
    assert sorted(done.stdout.splitlines()) == ["[0] node0 eth0 lo 2", "[1] node1 eth0 lo 2"]
    assert done.returncode == 1 and "rank 1 on node1 ended with exit code 1" in done.stderr


@pytest.mark.anywhere
def test_signals_end_ranks_whose_end_no_descriptor_tells():
    mark = f"91{os.getpid()}"
    command = lab_command(*FAST, "--loopback", command=["sleep", mark])
    with subprocess.Popen([*refusing(pidfd_open=errno.ENOSYS), *command]) as process:
        try:
            assert wait_until(
                lambda: len(processes_with(mark)) == 4
            )  # by their command lines: the lab, its janitor, the ranks
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 128 + signal.SIGINT
        finally:
            process.kill()
    assert wait_until(lambda: not processes_with(mark))


READ_ONLY = mounted("mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys")


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        (READ_ONLY, f"a lab gets no writable /proc/sys (Read-only file system) in them. {AS_ROOT}. {NEXT_BEST}"),
        (
            refusing(mount=errno.EACCES),
            f"a lab gets no mounts of its own (Permission denied) in them. {AS_ROOT}. {NEXT_BEST}",
        ),
        (refusing(sethostname=errno.EPERM), f"can't set its host name: Operation not permitted. {NEXT_BEST}"),
    ],
    ids=["read-only settings", "no mounts", "no host name"],
)
def test_a_container_that_lets_no_lab_be_made(tmp_path, prefix, named):
    """Though it lets network namespaces be made. No report is left of a lab that never was; an old one stays."""
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("{}")
    for report in (new, old):
        done = run_lab(*FAST, "--json", str(report), command=["true"], prefix=prefix)
        assert done.returncode == 3 and done.stderr.endswith(named), done.stderr
    assert not new.exists() and old.read_text() == "{}"


def test_a_kernel_without_the_shaper(tmp_path):
    """What tc says there is said by something in its place."""
    stand_in = tmp_path / "tc"
    stand_in.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    stand_in.chmod(0o755)
    place = os.path.realpath(shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin"))
    done = run_lab(*FAST, command=["true"], prefix=mounted(f"mount --bind {stand_in} {place}"))
    said = "Error: Specified qdisc kind is unknown. It takes a kernel with sch_tbf, built in or loaded (modprobe). "
    assert done.returncode == 3 and done.stderr.endswith(said + NEXT_BEST), done.stderr


def test_what_was_asked_wrongly_has_no_next_best(tmp_path):
    report = tmp_path / "lab.json"
    done = run_lab(*FAST, "--congestion", "nosuch", "--json", str(report), command=["true"])
    assert done.returncode == 2 and "--loopback" not in done.stderr
    assert not report.exists()


def test_a_full_disk_leaves_no_node_without_names(tmp_path):
    # In a /run of its own: labs of others hold their locks in another TMPDIR, and would be taken for dead.
    prefix = [*mounted("mount -t tmpfs none /run"), *on_a_small_disk(tmp_path, files=16, full=True)]
    done = run_lab(*FAST, command=["cat", "/etc/hosts"], prefix=prefix, TMPDIR=str(tmp_path))
    assert done.returncode == 3 and not done.stdout
    assert done.stderr.startswith(f"lab: TMPDIR: {tmp_path}/paceline-lab-")
    assert "/hosts0: can't be written (No space left on device): free some space or give another folder" in done.stderr


def test_a_folder_for_its_files_that_is_not_there(tmp_path):
    # In a /run of its own, as above.
    done = run_lab(
        *FAST, command=["true"], prefix=mounted("mount -t tmpfs none /run"), TMPDIR=str(tmp_path / "nowhere")
    )
    said = "(No such file or directory): name a folder in a folder that is there and that you may write to"
    assert done.returncode == 3 and not done.stdout
    assert done.stderr.startswith(f"lab: TMPDIR: {tmp_path}/nowhere/paceline-lab-") and said in done.stderr


MANY_FLOWS = ("--nodes", "1", "--rate", "3gbit", "--per-flow", "40mbit")


def test_more_flows_than_a_calibration_takes(tmp_path):
    """A link of 75 is measured by 64, with descriptors for no more, and judged by what these may carry."""
    path = tmp_path / "lab.json"
    done = run_lab(*MANY_FLOWS, "--json", str(path), command=["true"], prefix=limited("-n 155"))
    assert done.returncode == 0, done.stderr
    up, down = (report_of(path)["links"][0]["calibration"][direction] for direction in ("up", "down"))
    assert (up["flows"], up["may_carry_bps"]) == (64, 64 * 40e6)
    assert (down["flows"], down["may_carry_bps"]) == (1, 3e9)
    assert 0 < up["payload_bps"] < up["may_carry_bps"]
    share = 100 * up["payload_bps"] / up["may_carry_bps"]
    assert f"up by 64 flows, which may carry 2.56 Gb/s together ({share:.1f} % of it)" in done.stderr
    slowest = min(link["payload_bps"] / link["may_carry_bps"] for link in (up, down))
    assert ("does not hold 3 Gb/s" in done.stderr) == (slowest < 0.93 * 0.95), done.stderr


def test_a_calibration_has_more_descriptors_than_its_caller_s_shell_gives():
    """As far as the hard limit goes; ranks have what the caller has."""
    flags = ("--nodes", "1", "--rate", "1gbit", "--per-flow", "50mbit", "--quiet")
    done = run_lab(*flags, command=["sh", "-c", "ulimit -Sn"], prefix=limited("-Sn 48"))
    assert (done.returncode, done.stdout) == (0, "[0] 48\n"), done.stderr
    done = run_lab(*flags, command=["true"], prefix=limited("-n 40"))
    assert (done.returncode, done.stderr) == (3, "lab: out of descriptors; raise ulimit -n\n")


@pytest.mark.anywhere
def test_a_lab_without_links_removes_what_dead_labs_left():
    """Of a process that can't be: its number is beyond the kernel's largest."""
    folder = Path(tempfile.gettempdir()) / f"paceline-lab-{10**9 - 1}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        (folder / "hosts0").touch()
        assert run_lab(*FAST, "--loopback", command=["true"]).returncode == 0
        assert not folder.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
