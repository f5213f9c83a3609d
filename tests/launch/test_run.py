"""`paceline run`: output, exit codes, signals, clean-up, remote hosts by a real sshd on loopback."""

import contextlib
import fcntl
import getpass
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time

import pytest
from conftest import ROOT, WORKER, clean_environment, expect_ranks, run, wait_until

sys.path.append(str(ROOT / "tests" / "lab"))

from lab_tools import on_a_disk_of_its_own, on_a_small_disk


def alive(mark):
    """Processes whose command line holds `mark`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@contextlib.contextmanager
def launched(command, cwd=ROOT, **options):
    """`paceline run` in the background; killed at the end if it still runs."""
    process = subprocess.Popen(command, env=clean_environment(), cwd=cwd, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def waiting_in(pipe):
    """Bytes written to a pipe and not read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def state(pid):
    """One letter, as ps shows it: S sleeps, T is stopped."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_prefix_and_files(paceline, tmp_path):
    result = run([paceline, "run", "-np", 2, "--prefix-output", "--output-filename", tmp_path, "--",
                  "sh", "-c", "echo out $PACELINE_RANK; echo err $PACELINE_RANK >&2"])  # fmt: skip
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout> out 0", "[1]<stdout> out 1"]
    assert sorted(result.stderr.splitlines()) == ["[0]<stderr> err 0", "[1]<stderr> err 1"]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "err 0\n"


def test_lines_of_ranks_never_mix(paceline):
    script = 'for i in $(seq 300); do printf "%s" "$PACELINE_RANK$PACELINE_RANK"; echo "$PACELINE_RANK"; done'
    result = run([paceline, "run", "-np", 4, "--", "sh", "-c", script])
    lines = result.stdout.splitlines()
    assert len(lines) == 1200
    assert set(lines) == {"000", "111", "222", "333"}


def test_the_first_failure_is_ours_and_ends_the_others(paceline):
    mark = f"87654.{os.getpid()}"
    begin = time.monotonic()
    result = run([paceline, "run", "-np", 3, "--", "sh", "-c",
                  f"[ $PACELINE_RANK = 1 ] && exit 7; sleep {mark} & wait"])  # fmt: skip
    assert result.returncode == 7
    assert "rank 1" in result.stderr and "exit code 7" in result.stderr
    assert time.monotonic() - begin < 10
    assert wait_until(lambda: not alive(mark)), "a rank's child was left behind"


def test_a_signal_that_ends_a_rank_is_named(paceline):
    result = run([paceline, "run", "-np", 2, "--", "sh", "-c", "[ $PACELINE_RANK = 0 ] && kill -9 $$; sleep 100"])
    assert result.returncode == 137
    assert "rank 0" in result.stderr and "signal 9" in result.stderr


def test_a_rank_that_ignores_sigterm_is_killed(paceline):
    begin = time.monotonic()
    script = "[ $PACELINE_RANK = 0 ] && { sleep 0.5; exit 5; }; trap '' TERM; while :; do sleep 1; done"
    result = run([paceline, "run", "-np", 2, "--", "sh", "-c", script])
    assert result.returncode == 5
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_orphans_when_the_launcher_ends(paceline, number, tmp_path):
    mark = f"98765.{os.getpid()}{int(number)}"
    with launched([paceline, "run", "-np", "3", "--", "sh", "-c", f"sleep {mark} & wait"]) as process:
        assert wait_until(lambda: len(alive(mark)) >= 6)
        process.send_signal(number)
        code = process.wait(timeout=30)
        assert code == (-9 if number == signal.SIGKILL else 128 + number)
        assert wait_until(lambda: not alive(mark))


#: Runs the rest of its command line with no descriptor free below 1100.
WITH_MANY_DESCRIPTORS = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
while (descriptor := os.open("/dev/null", os.O_RDONLY)) < 1100:
    os.set_inheritable(descriptor, True)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_no_orphans_of_a_caller_with_many_descriptors(paceline, python):
    """The pipes that tell guards of the launcher's end have high numbers then, and are no one else's all the same."""
    mark = f"98764.{os.getpid()}"
    command = [paceline, "run", "-np", "3", "--", "sh", "-c", f"sleep {mark} & wait"]
    with launched([python, "-c", WITH_MANY_DESCRIPTORS, *command]) as process:
        assert wait_until(lambda: len(alive(mark)) >= 10)
        process.kill()
        process.wait(timeout=30)
        assert wait_until(lambda: not alive(mark))


def test_more_ranks_than_the_caller_may_have_descriptors(paceline):
    """Which stays the ranks' limit: a program that uses select() relies on it."""
    script = "ulimit -n; [ $PACELINE_RANK != 0 ] || prlimit --nofile --noheadings -o HARD --pid $$"
    result = run(["prlimit", "--nofile=64:4096", paceline, "run", "-np", 40, "--", "sh", "-c", script])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == ["4096"] + ["64"] * 40


def read_until(pipe, text):
    """All that has come when `text` has."""
    got = b""
    while text not in got:
        assert select.select([pipe], [], [], 30)[0], got
        got += os.read(pipe.fileno(), 4096)
    return got


@pytest.mark.parametrize(("flags", "mark"), [([], b""), (["--prefix-output"], b"[%d]<stdout> ")])
def test_another_rank_s_line_does_not_go_on_with_an_unfinished_one(paceline, tmp_path, flags, mark):
    """A prompt is shown as it stands. What follows of its line, after another rank's, is a line of its own."""
    script = (
        "wait_for() { while [ ! -e $1 ]; do sleep 0.02; done; }; "
        'if [ $RANK = 0 ]; then printf "half"; wait_for go0; printf " rest"; wait_for end; echo; '
        'else wait_for go1; printf "whole\\n"; wait_for end1; echo last; fi'
    )
    command = [paceline, "run", "-np", "2", *flags, "--", "sh", "-c", script]
    marks = [mark % rank if mark else b"" for rank in range(2)]
    with launched(command, tmp_path, stdout=subprocess.PIPE) as process:
        got = read_until(process.stdout, b"half")
        (tmp_path / "go1").touch()
        got += read_until(process.stdout, b"whole\n")
        (tmp_path / "go0").touch()
        got += read_until(process.stdout, b" rest")
        (tmp_path / "end1").touch()
        got += read_until(process.stdout, b"last\n")
        (tmp_path / "end").touch()
        got += process.stdout.buffer.read()
        assert process.wait(timeout=30) == 0
    lines = [marks[0] + b"half", marks[1] + b"whole", marks[0] + b" rest", marks[1] + b"last"]
    assert got == b"".join(line + b"\n" for line in lines)


def test_another_launcher_s_variables_do_not_reach_the_ranks(paceline):
    left = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    result = run([paceline, "run", "-np", 1, "--", "env"], **left)
    assert result.returncode == 0
    assert "TORCHELASTIC" not in result.stdout


def test_user_signals_reach_the_ranks(paceline, tmp_path):
    script = "trap 'echo got; exit 0' USR1; touch ready.$PACELINE_RANK; while :; do sleep 0.05; done"
    command = [paceline, "run", "-np", "2", "--", "sh", "-c", script]
    with launched(command, tmp_path, stdout=subprocess.PIPE) as process:
        assert wait_until(lambda: all((tmp_path / f"ready.{r}").exists() for r in range(2)))
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and out == "got\ngot\n"


def test_a_hang_up_that_the_caller_ignores_ends_nothing(paceline, tmp_path):
    """As under nohup."""
    script = "trap 'exit 7' HUP; touch ready; while [ ! -e go ]; do sleep 0.05; done; echo went on"
    command = [paceline, "run", "-np", "1", "--", "sh", "-c", script]
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    with launched(command, tmp_path, stdout=subprocess.PIPE, **ignoring) as process:
        assert wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "went on\n")


def test_a_stop_reaches_the_ranks_and_so_does_the_end_of_it(paceline, tmp_path):
    """Ctrl-Z and fg: the terminal signals the launcher alone."""
    script = (
        "echo $$ > pid.$PACELINE_RANK.new; mv pid.$PACELINE_RANK.new pid.$PACELINE_RANK; while [ ! -e go ]; do :; done"
    )
    command = [paceline, "run", "-np", "2", "--", "sh", "-c", script]
    files = [tmp_path / f"pid.{rank}" for rank in range(2)]
    with launched(command, tmp_path, preexec_fn=os.setpgrp) as process:
        assert wait_until(lambda: all(file.exists() for file in files))
        ranks = [int(file.read_text()) for file in files]
        process.send_signal(signal.SIGTSTP)
        assert wait_until(lambda: all(state(pid) == "T" for pid in [process.pid, *ranks]))
        process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: all(state(pid) != "T" for pid in [process.pid, *ranks]))
        (tmp_path / "go").touch()
        assert process.wait(timeout=30) == 0


def test_a_reader_that_does_not_read_stops_no_signal(paceline):
    """A pager holds the output: a job must still end when it is asked to."""
    mark = f"65432.{os.getpid()}"
    script = f"sleep {mark} & yes"
    with launched([paceline, "run", "-np", "2", "--", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert wait_until(lambda: len(alive(mark)) >= 4 and waiting_in(process.stdout) == 65536)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert wait_until(lambda: not alive(mark))


def test_a_prompt_is_shown_while_another_rank_talks(paceline, tmp_path):
    script = (
        "if [ $PACELINE_RANK = 0 ]; then printf 'your name? '; fi; "
        "while [ ! -e done ]; do [ $PACELINE_RANK = 0 ] || echo talk >&2; sleep 0.02; done"
    )
    command = [paceline, "run", "-np", "2", "--", "sh", "-c", script]
    with launched(command, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert select.select([process.stdout], [], [], 15)[0], "the prompt waits for the other rank's silence"
        assert os.read(process.stdout.fileno(), 100) == b"your name? "
        (tmp_path / "done").touch()
        assert process.wait(timeout=30) == 0


def test_strangers_are_answered_while_a_reader_holds_the_output_up(paceline, tmp_path):
    """Unanswered, they would keep the launcher busy until its reader goes on."""
    mark = f"54321.{os.getpid()}"
    script = f'echo "$PACELINE_RENDEZVOUS" > place; : {mark}; seq 100000'
    with launched([paceline, "run", "-np", "1", "--", "sh", "-c", script], tmp_path, stdout=subprocess.PIPE) as process:
        assert wait_until(lambda: waiting_in(process.stdout) and alive(mark) == [process.pid])
        host, _, port = (tmp_path / "place").read_text().strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=15) as stranger:
            assert stranger.recv(4), "nobody serves"
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out.splitlines()[-1]) == (0, "100000")


def test_output_that_is_lost_is_no_success(paceline):
    result = run(["bash", "-c", f"{paceline} run -np 1 -- echo hello > /dev/full"])
    assert result.returncode == 1
    assert (
        "paceline run: standard output can't be written (No space left on device): free some space" in result.stderr
    ), result.stderr


def test_a_rank_s_file_that_is_not_whole_is_no_success(paceline, tmp_path):
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stdout").symlink_to("/dev/full")
    result = run([paceline, "run", "-np", 2, "--output-filename", tmp_path, "--", "echo", "hello"])
    assert result.returncode == 1
    assert result.stdout == "hello\nhello\n" and (tmp_path / "rank.0" / "stdout").read_text() == "hello\n"
    assert "rank 1: output file" in result.stderr and "No space left on device" in result.stderr, result.stderr


@on_a_disk_of_its_own
@pytest.mark.parametrize(
    ("files", "named", "code"),
    [(16, "rank 1: output file {}/rank.1/stdout (--output-filename)", 1), (2, "--output-filename: {}/rank.0", 2)],
    ids=["no bytes", "no names"],
)
def test_a_full_disk_is_told_with_what_to_do(paceline, tmp_path, files, named, code):
    disk = on_a_small_disk(tmp_path, files=files, full=True)
    result = run([*disk, paceline, "run", "-np", 2, "--output-filename", tmp_path, "--", "echo", "hello"])
    assert result.returncode == code
    fix = "can't be written (No space left on device): free some space or give another folder"
    assert f"paceline run: {named.format(tmp_path)}: {fix}\n" in result.stderr, result.stderr
    assert result.stdout == ("hello\nhello\n" if code == 1 else "")


def test_a_rank_that_can_t_be_made_says_why():
    """A user of its own with two processes: the launcher, and what guards the rank."""
    with tempfile.TemporaryDirectory(prefix="paceline-program-") as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(ROOT / "build/bin/paceline", f"{folder}/paceline")
        user = ["setpriv", "--reuid", 54321, "--regid", 54321, "--clear-groups"]
        result = run(["prlimit", "--nproc=2", *user, program, "run", "-np", 1, "--", "some-command"])
    assert result.returncode == 126
    assert "paceline run: 'some-command': Resource temporarily unavailable" in result.stderr, result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_caller_that_has_closed_its_standard_descriptors(paceline, tmp_path, closed):
    """As a daemon does: what the launcher opens must not take their places."""
    words = f"{paceline} run -np 2 --output-filename {tmp_path} -- sh -c 'cat; echo out; echo err >&2'"
    result = run(["bash", "-c", f"exec {words} {closed}"], timeout=60)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        folder = tmp_path / f"rank.{rank}"
        assert ((folder / "stdout").read_text(), (folder / "stderr").read_text()) == ("out\n", "err\n")
    assert result.stdout == ("" if ">&-" in closed.split() else "out\n" * 2)
    assert result.stderr == ("" if "2>&-" in closed else "err\n" * 2)


def test_a_slow_reader_gets_all(paceline):
    script = "import sys; sys.stdout.writelines(f'{i:07}\\n' for i in range(400_000))"
    with launched([paceline, "run", "-np", "1", "--", "python3", "-c", script], stdout=subprocess.PIPE) as process:
        wait_until(lambda: process.poll() is not None, 1)  # more is on its way than pipes hold
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert out.splitlines() == [f"{i:07}" for i in range(400_000)]


def test_this_machine_s_names_are_one_machine(paceline):
    result = run([paceline, "run", "-H", "localhost:1,127.0.0.1:1", "--", "sh", "-c",
                  'echo "$PACELINE_LOCAL_RANK/$PACELINE_LOCAL_SIZE"'])  # fmt: skip
    assert sorted(result.stdout.splitlines()) == ["0/2", "1/2"]


def test_this_machine_s_addresses_and_whole_name_need_no_ssh(paceline, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 me.example.com\n")
    script = (
        f"hostname me && mount --bind {tmp_path}/hosts /etc/hosts && ip link set lo up && "
        "ip addr add 198.51.100.7/32 dev lo && ip addr add 2001:db8::7/128 dev lo && "
        f"exec {paceline} run --ssh false -H me:1,198.51.100.7:1,[2001:DB8:0::7]:1,me.example.com:1 -- "
        "sh -c 'echo $PACELINE_LOCAL_RANK/$PACELINE_LOCAL_SIZE'"
    )
    result = run(["unshare", "--net", "--uts", "--mount", "sh", "-c", script])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0/4", "1/4", "2/4", "3/4"]


def to_another_host(paceline, tmp_path, **settings):
    """Of a job on this host and on one that no interface has, what the ranks are told of where to meet.

    The network is one of its own, whose way to the other host leaves from 198.51.100.7.
    """
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    net = (
        "ip link set lo up && ip addr add 198.51.100.7/32 dev lo && "
        "ip route add local 192.0.2.0/24 dev lo src 198.51.100.7"
    )
    told = 'echo "${PACELINE_RENDEZVOUS%:*} $MASTER_ADDR"'
    command = [paceline, "run", "--ssh", ssh, "-H", "localhost:1,192.0.2.9:1", "--", "sh", "-c", told]
    return run(["unshare", "--net", "sh", "-c", net + ' && exec "$@"', "sh", *command], **settings)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "198.51.100.7"),
        ({"PACELINE_INTERFACE": "lo", "NCCL_SOCKET_IFNAME": "nosuch9"}, "127.0.0.1"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "127.0.0.1"),
        ({"HOROVOD_GLOO_IFACE": "lo"}, "127.0.0.1"),
        ({"PERSEUS_NCCL_NETWORK_INTERFACE": "lo", "PERSEUS_GLOO_NETWORK_INTERFACE": "nosuch9"}, "127.0.0.1"),
    ],
)
def test_the_interface_by_any_of_its_names_is_where_ranks_meet(paceline, tmp_path, settings, address):
    result = to_another_host(paceline, tmp_path, **settings)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{address} {address}"] * 2, result.stdout


def test_an_interface_that_is_not_there_is_named_with_the_variable_that_asks_for_it(paceline, tmp_path):
    result = to_another_host(paceline, tmp_path, HOROVOD_GLOO_IFACE="nosuch9")
    assert result.returncode == 2 and not result.stdout, result.stdout
    assert "HOROVOD_GLOO_IFACE" in result.stderr and "nosuch9" in result.stderr, result.stderr


def test_lines_of_other_systems_are_marked_once(paceline):
    result = run([paceline, "run", "-np", 1, "--prefix-output", "--", "printf", r"a\r\nb\r5 %%\r6 %%\n"])
    assert result.stdout == "[0]<stdout> a\n[0]<stdout> b\n[0]<stdout> 5 %\n[0]<stdout> 6 %\n", ascii(result.stdout)


def test_in_a_pipeline(paceline):
    result = run(["bash", "-c", f"seq 5 | {paceline} run -np 2 -- sh -c 'cat; echo end' | sort | head -3"])
    assert result.stdout == "1\n2\n3\n"
    result = run(["bash", "-c", f"{paceline} run -np 2 -- yes | head -1; exit ${{PIPESTATUS[0]}}"], timeout=30)
    assert result.stdout == "y\n" and result.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["-np", "2"], "COMMAND"),
        (["-H", "a:x", "true"], "a:x"),
        (["-H", "localhost:2", "-np", "3", "true"], "2 slots"),
        (["--hostfile", "/no/such/file", "true"], "/no/such/file"),
        (["-x", "NOT_SET_ANYWHERE", "true"], "NOT_SET_ANYWHERE"),
        (["-x", "1bad=2", "true"], "1bad"),
        (["-H", "-oProxyCommand=x", "true"], "no host name"),
        (["--output-filename", "/proc/nowhere", "true"], "/proc/nowhere"),
        (["-np", "0", "true"], "Value 0 not in range 1 to 1048576"),
        (["--start-timeout", "nan", "true"], "'nan' is no number above 0"),
        (["--ssh", " ", "-H", "127.0.0.2", "true"], "--ssh names no program"),
    ],
)
def test_wrong_usage_is_named(paceline, arguments, names):
    result = run([paceline, "run", *arguments])
    assert result.returncode == 2
    assert names in result.stderr, result.stderr


def test_a_command_that_is_not_there(paceline):
    result = run([paceline, "run", "no-such-program-here"])
    assert result.returncode == 127 and "no-such-program-here" in result.stderr


def test_hostfile_and_exported_variables(paceline, tmp_path):
    (tmp_path / "hosts").write_text("# two slots\nlocalhost slots=2\n\n127.0.0.1:1\n")
    value = "a 'quoted' \"value\" $HOME;"
    result = run([paceline, "run", "-hostfile", tmp_path / "hosts", "-x", f"GREETING={value}",
                  "sh", "-c", 'echo "$PACELINE_RANK/$PACELINE_SIZE $GREETING"'])  # fmt: skip
    assert sorted(result.stdout.splitlines()) == [f"{r}/3 {value}" for r in range(3)]


@pytest.fixture
def sshd(tmp_path, free_port):
    """A real sshd on loopback with a throw-away key; the command uses nothing of the user's own set-up."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True, timeout=30)
    port = free_port
    os.makedirs("/run/sshd", exist_ok=True)
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\n"
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        "StrictModes no\nPasswordAuthentication no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nAcceptEnv no\n"
    )
    daemon = subprocess.Popen([server, "-D", "-f", tmp_path / "config"], stderr=subprocess.DEVNULL)
    ssh = (
        f"ssh -F none -p {port} -l {getpass.getuser()} -i {tmp_path}/user -o IdentitiesOnly=yes "
        f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={tmp_path}/known -o LogLevel=ERROR"
    )
    try:
        assert wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield ssh
    finally:
        daemon.terminate()
        daemon.wait(timeout=10)


#: A loopback address that `paceline run` does not take for this machine: reached by ssh.
REMOTE = "127.0.0.2"
#: A name that means nothing to anybody.
NOWHERE = "no-such-host.invalid"


def test_over_ssh(paceline, python, sshd):
    result = run([paceline, "run", "--ssh", sshd, "-H", f"{REMOTE}:2,localhost:1", python, WORKER])
    expect_ranks(result, 3)


def test_over_ssh_quoting_exit_code_and_no_secret_on_a_command_line(paceline, sshd, tmp_path):
    value = 'it\'s "$HOME" `x`\n;two lines'
    # printf is the shell's own: looking for the secret must not put it on a command line itself.
    script = (
        'printf "%s" "$ODD" > odd; printf "%s" "$PACELINE_SECRET" > secret; test -s secret || exit 1; '
        "cat /proc/[0-9]*/cmdline > lines 2>/dev/null; grep -a -c -F -f secret lines; exit 9"
    )
    result = subprocess.run(
        [paceline, "run", "--ssh", sshd, "-H", REMOTE, "-x", f"ODD={value}", "--", "sh", "-c", script],
        env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 9, result.stderr
    assert (tmp_path / "odd").read_text() == value
    assert result.stdout.strip() == "0", "the secret stands on a command line"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_over_ssh_no_orphans(paceline, sshd, number):
    mark = f"76543.{os.getpid()}{int(number)}"
    command = [paceline, "run", "--ssh", sshd, "-H", f"{REMOTE}:2", "--", "sh", "-c", f"sleep {mark} & wait"]
    with launched(command) as process:
        assert wait_until(lambda: len(alive(mark)) >= 4)
        process.send_signal(number)
        process.wait(timeout=30)
        assert wait_until(lambda: not alive(mark))


def test_over_ssh_with_a_secret_in_a_file(paceline, python, sshd, tmp_path):
    """Which the launcher has read: ranks get what it says, wherever they run."""
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    command = [paceline, "run", "--ssh", sshd, "-H", f"{REMOTE}:1,localhost:1", python, WORKER]
    expect_ranks(run(command, PACELINE_SECRET_FILE=tmp_path / "secret"), 2)


def test_over_ssh_an_interrupt_is_a_python_script_s_own_affair(paceline, python, sshd, tmp_path):
    script = (
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('ready').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('cleaned up', flush=True)\n"
        "    raise\n"
    )
    command = [paceline, "run", "--ssh", sshd, "-H", REMOTE, "--", python, "-c", script]
    with launched(command, tmp_path, stdout=subprocess.PIPE) as process:
        assert wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (130, "cleaned up\n")


def test_a_host_that_refuses_is_an_error(paceline):
    result = run([paceline, "run", "--ssh", "ssh -F none -p 1", "-H", REMOTE, "true"], timeout=60)
    assert result.returncode == 255
    said = f"rank 0 (host {REMOTE}) ended with exit code 255, as ssh does where it can't log in: "
    assert said + f"'ssh -o BatchMode=yes {REMOTE} true' must succeed from here" in result.stderr, result.stderr


@pytest.mark.parametrize(("hosts", "code"), [(f"{NOWHERE}:2,localhost:1", 2), (f"{REMOTE}:1,{NOWHERE}:1", 255)])
def test_a_host_that_can_t_be_resolved_is_named(paceline, tmp_path, sshd, hosts, code):
    """By the launcher, which asks for the way to the first other host; by ssh of those after it."""
    ran = tmp_path / "ran"
    result = run([paceline, "run", "--ssh", sshd, "-H", hosts, "--", "sh", "-c", f"touch {ran}; sleep 60"], timeout=60)
    assert result.returncode == code
    if code == 2:
        assert f"paceline run: host '{NOWHERE}' can't be resolved" in result.stderr, result.stderr
        assert "check its name, /etc/hosts and DNS" in result.stderr and not ran.exists(), result.stderr
    else:
        assert f"Could not resolve hostname {NOWHERE}" in result.stderr, result.stderr
        assert f"rank 1 (host {NOWHERE}) ended with exit code 255" in result.stderr, result.stderr


def test_selftest_needs_no_framework(paceline):
    """What the wheel is tried with: collectives by the C ABI alone, on a Python that has no torch."""
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('paceline.selftest', run_name='__main__')"
    result = run([paceline, "run", "-np", 2, "--", shutil.which("python3"), "-c", code])
    assert result.returncode == 0, result.stderr
    assert "2 ranks, all right" in result.stdout
