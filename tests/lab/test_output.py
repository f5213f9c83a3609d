"""What ranks print reaches the lab's reader: slow ones, full disks, ends of pipelines. Signals never wait for it."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import termios
import time

import pytest
from lab_tools import PROGRAM, lab_command, on_a_disk_of_its_own, on_a_small_disk, processes_with, run_lab, wait_until

pytestmark = pytest.mark.anywhere
PLAIN = ("--loopback", "--quiet")


def waiting_in(pipe):
    """Bytes written to a pipe and not read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def blocks(pid, number):
    """Whether a process hears this signal as an event only."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigBlk"))
    return int(mask, 16) >> (number - 1) & 1


def test_a_slow_reader_gets_all():
    command = lab_command(*PLAIN, "--nodes", "1", command=["seq", "1", "20000"])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        got = b""
        for _ in range(40):  # as a pager with a slow person in front of it
            time.sleep(0.05)
            got += os.read(process.stdout.fileno(), 4096)
        got += process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert got.decode().splitlines() == [f"[0] {i}" for i in range(1, 20001)]


def test_a_full_disk_is_told():
    with open("/dev/full", "w") as full:
        command = lab_command(*PLAIN, command=["echo", "hi"])
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "lab: standard output can't be written (No space left on device): free some space" in done.stderr


@on_a_disk_of_its_own
@pytest.mark.parametrize("name", ["report.json", "none/report.json"])
def test_a_report_that_can_t_be_written_is_told_with_what_to_do(tmp_path, name):
    """On a disk that is full when the ranks have ended; in a folder that is not there, before they start."""
    command = lab_command(*PLAIN, "--nodes", "1", "--json", str(tmp_path / name), command=["echo", "hi"])
    disk = on_a_small_disk(tmp_path, full=True)
    done = subprocess.run([*disk, *command], capture_output=True, text=True, timeout=60, check=False)
    reason, fix = {
        "report.json": ("No space left on device", "free some space or give another file"),
        "none/report.json": ("No such file or directory", "name a file in a folder that is there and that you may"),
    }[name]
    assert done.stderr.startswith(f"lab: --json {tmp_path / name}: can't be written ({reason}): {fix}")
    assert (done.returncode, done.stdout) == ((3, "[0] hi\n") if name == "report.json" else (2, ""))


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_caller_that_has_closed_its_standard_descriptors(closed):
    """As a daemon does: what the lab opens must not take their places."""
    script = f"exec {PROGRAM} lab --loopback --quiet --nodes 1 -- sh -c 'echo out; echo err >&2' {closed}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in closed.split() else "[0] out\n")
    assert done.stderr == ("" if "2>&-" in closed else "[0] err\n")


def test_a_lost_reader_ends_the_lab_as_it_ends_others():
    script = f"{PROGRAM} lab --loopback --quiet -- yes | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("] y\n") and done.returncode == 128 + signal.SIGPIPE


def test_pipelines_of_the_ranks_end():
    """By the signal that the lab itself does without."""
    done = run_lab(*PLAIN, "--nodes", "1", command=["bash", "-c", "yes | head -n 1; exit ${PIPESTATUS[0]}"])
    assert done.stdout == "[0] y\n" and done.returncode == 128 + signal.SIGPIPE


def test_signals_are_heard_while_the_reader_stalls():
    mark = f"64{os.getpid()}"
    command = lab_command(*PLAIN, command=["sh", "-c", f"sleep {mark} & yes"])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert wait_until(lambda: len(processes_with(mark)) == 2 and waiting_in(process.stdout) == 65536)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert wait_until(lambda: not processes_with(mark))


def test_signals_are_heard_while_the_lab_s_own_words_wait():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    while waiting_in(read_end) < 65536:
        os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)
    with subprocess.Popen(lab_command("--loopback", command=["true"]), stderr=write_end) as process:
        try:
            assert wait_until(lambda: blocks(process.pid, signal.SIGTERM))
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            os.close(read_end)
            os.close(write_end)


def test_an_exit_code_that_is_no_signal_s():
    done = run_lab(*PLAIN, "--nodes", "1", command=["sh", "-c", "exit 200"])
    assert done.returncode == 200
    assert "exit code 200" in done.stderr and "signal" not in done.stderr


def test_unfinished_lines_of_ranks_stay_apart():
    done = run_lab(*PLAIN, command=["printf", r"a\nb"])
    assert sorted(done.stdout.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert done.stdout.endswith("\n")
