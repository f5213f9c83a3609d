"""Labs come and go: identity, exit codes, signals, crashes, neighbours."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from lab_tools import (
    PROGRAM,
    lab_command,
    processes_with,
    python,
    report_of,
    run_lab,
    start_time,
    traces_of,
    wait_until,
)

FAST = ("--quiet", "--no-calibration")


def start_lab(marker, *flags, ranks_ready=2):
    """A lab whose ranks wait for ever, each with a child of its own that `marker` recognises."""
    code = f"""
    import subprocess, sys
    subprocess.Popen(["sleep", {marker!r}])
    print("ready", flush=True)
    subprocess.run(["sleep", {marker!r}])
    """
    process = subprocess.Popen(
        lab_command(*FAST, *flags, command=python(code)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(ranks_ready):
        assert "ready" in process.stdout.readline()
    return process


def is_alive(pid):
    """Not a zombie, whose command line is empty."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_sleep(pid):
    """Not what is about to become one."""
    return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "sleep"


def test_ranks_know_who_they_are():
    code = """
    import json, os, socket
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
             "PACELINE_INTERFACE", "GLOO_SOCKET_IFNAME", "PACELINE_SECRET")
    print(json.dumps({**{n: os.environ[n] for n in names}, "host": socket.gethostname(),
                      "nics": sorted(os.listdir("/sys/class/net")), "net": os.readlink("/proc/self/ns/net"),
                      "peer": socket.gethostbyname("node0"), "cwd": os.getcwd()}))
    """
    done = run_lab(*FAST, "--nodes", "3", "--slots", "2", command=python(code))
    assert done.returncode == 0, done.stderr
    rows = sorted(
        (json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines()), key=lambda r: int(r["RANK"])
    )
    assert [int(r["RANK"]) for r in rows] == list(range(6))
    assert [int(r["LOCAL_RANK"]) for r in rows] == [0, 1] * 3
    assert [r["host"] for r in rows] == ["node0", "node0", "node1", "node1", "node2", "node2"]
    assert len({r["net"] for r in rows}) == 3
    assert len({r["PACELINE_SECRET"] for r in rows}) == 1 and len(rows[0]["PACELINE_SECRET"]) >= 32
    for r in rows:
        assert r["WORLD_SIZE"] == "6" and r["LOCAL_WORLD_SIZE"] == "2"
        assert r["nics"] == ["eth0", "lo"] and r["PACELINE_INTERFACE"] == r["GLOO_SOCKET_IFNAME"] == "eth0"
        assert r["peer"] == r["MASTER_ADDR"] == "10.77.0.1" and r["cwd"] == os.getcwd()


@pytest.mark.anywhere
def test_what_another_launcher_left_does_not_count():
    """A rank that another launcher's variables reach would be one of its job, not of this one."""
    left = {f"PACELINE_{name}": "1" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    left |= {"PACELINE_RENDEZVOUS": "127.0.0.1:1", "PACELINE_NODE_ID": "x", "PACELINE_SECRET_FILE": "/none"}
    left |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = run_lab(*FAST, "--loopback", command=python("import os; print(*os.environ)"), **left)
    assert done.returncode == 0, done.stderr
    rows = [set(line.split()) for line in done.stdout.splitlines()]
    assert len(rows) == 2 and all("WORLD_SIZE" in row and not row & set(left) for row in rows)


@pytest.mark.parametrize("loopback", [False, True])
def test_the_first_failing_rank_gives_the_exit_code(loopback, tmp_path):
    code = """
    import os, sys, time
    if os.environ["RANK"] == "1": sys.exit(7)
    time.sleep(60)
    """
    report = tmp_path / "lab.json"
    flags = ("--loopback",) if loopback else ("--no-calibration",)
    done = run_lab(*flags, "--grace", "100ms", "--json", str(report), command=python(code), timeout=30)
    assert done.returncode == 7
    assert "rank 1" in done.stderr and "exit code 7" in done.stderr
    assert report_of(report)["first_failed_rank"] == 1
    assert report_of(report)["ranks"][0]["exit_code"] == 128 + signal.SIGTERM


def test_a_killed_rank_gives_128_plus_the_signal():
    code = 'import os, signal; os.environ["RANK"] == "0" and os.kill(os.getpid(), signal.SIGSEGV)'
    done = run_lab(*FAST, command=python(code))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "signal 11" in done.stderr


def test_output_keeps_its_lines_and_streams():
    code = 'import sys; print("a\\nb", end=""); print("problem", file=sys.stderr)'
    done = run_lab(*FAST, command=python(code))
    assert sorted(done.stdout.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert sorted(done.stderr.splitlines()) == ["[0] problem", "[1] problem"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything(sent):
    marker = f"86{os.getpid()}{int(sent)}"
    process = start_lab(marker)
    start = start_time(process.pid)
    assert traces_of(process.pid, start)
    process.send_signal(sent)
    assert process.wait(timeout=20) == 128 + sent
    assert not traces_of(process.pid, start)
    assert wait_until(lambda: not processes_with(marker))


def test_a_lab_killed_by_kill_9_is_cleaned_at_once():
    marker = f"87{os.getpid()}"
    process = start_lab(marker)
    start = start_time(process.pid)
    process.kill()
    process.wait(timeout=10)
    assert wait_until(lambda: not traces_of(process.pid, start)), "the janitor did not clean up"
    assert wait_until(lambda: not processes_with(marker))


def test_a_lab_killed_while_it_is_made_leaves_nothing():
    """Its ip(8), which lives on, makes no namespace behind the janitor's back."""
    for _ in range(3):
        process = subprocess.Popen(lab_command(*FAST, "--nodes", "64", command=["true"]), stderr=subprocess.DEVNULL)
        start = start_time(process.pid)
        until = time.monotonic() + 15
        while not any("netns" in trace for trace in traces_of(process.pid, start)):  # no pause: it takes milliseconds
            assert time.monotonic() < until
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        assert wait_until(lambda children=children: not any(is_alive(int(child)) for child in children))
        assert not traces_of(process.pid, start)


@pytest.mark.anywhere
def test_plain_processes_do_not_outlive_a_killed_lab():
    marker = f"85{os.getpid()}"
    process = start_lab(marker, "--loopback")
    try:
        assert wait_until(lambda: len(processes_with(marker)) == 4)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_until(lambda: not processes_with(marker))


@pytest.mark.anywhere
def test_nor_do_those_that_cleared_their_environment():
    marker = f"82{os.getpid()}"
    script = f"env -i sleep {marker} & wait"
    process = subprocess.Popen(lab_command(*FAST, "--loopback", command=["sh", "-c", script]))
    try:
        assert wait_until(lambda: sum(map(is_sleep, processes_with(marker))) == 2)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert wait_until(lambda: not processes_with(marker))


@pytest.mark.anywhere
def test_what_a_rank_started_ends_with_it(tmp_path):
    """While the other ranks go on."""
    marker = f"84{os.getpid()}"
    script = f"""
    [ $RANK = 1 ] && while [ ! -e go ]; do sleep 0.02; done && exit 0
    sleep {marker} &
    while [ ! -e leave ]; do sleep 0.02; done
    """
    with subprocess.Popen(lab_command(*FAST, "--loopback", command=["sh", "-c", script]), cwd=tmp_path) as process:
        try:
            assert wait_until(lambda: len(processes_with(marker)) == 1)
            (tmp_path / "leave").touch()
            assert wait_until(lambda: not processes_with(marker))
            assert process.poll() is None
        finally:
            (tmp_path / "go").touch()
        assert process.wait(timeout=30) == 0


@pytest.mark.anywhere
def test_a_rank_s_daemon_ends_with_the_lab(tmp_path):
    marker = f"83{os.getpid()}"
    daemon = f"touch up; exec sleep {marker}"
    script = f"setsid sh -c '{daemon}' </dev/null >/dev/null 2>&1 & while [ ! -e up ]; do sleep 0.02; done"
    command = lab_command(*FAST, "--loopback", "--nodes", "1", command=["sh", "-c", script])
    assert subprocess.run(command, cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert wait_until(lambda: not processes_with(marker))


@pytest.mark.anywhere
def test_a_hang_up_that_the_caller_ignores_ends_nothing(tmp_path):
    """As under nohup."""
    script = "touch ready; while [ ! -e go ]; do sleep 0.02; done; echo went on"
    process = subprocess.Popen(
        lab_command(*FAST, "--loopback", "--nodes", "1", command=["sh", "-c", script]),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "[0] went on\n"


def test_the_next_lab_cleans_where_the_janitor_was_killed_too():
    marker = f"88{os.getpid()}"
    process = start_lab(marker)
    start = start_time(process.pid)
    children = subprocess.run(["pgrep", "-P", str(process.pid), "lab-janitor"], capture_output=True, text=True)
    os.kill(int(children.stdout), signal.SIGKILL)
    process.kill()
    process.wait(timeout=10)
    assert traces_of(process.pid, start), "nothing was left to clean: the test proves nothing"
    done = run_lab("--no-calibration", command=["true"])
    assert done.returncode == 0 and "left behind" in done.stderr
    assert not traces_of(process.pid, start)
    assert wait_until(lambda: not processes_with(marker))


def test_labs_do_not_meet():
    markers = [f"89{os.getpid()}{i}" for i in range(2)]
    labs = [start_lab(m) for m in markers]
    assert run_lab(*FAST, command=["true"]).returncode == 0  # a third one beside them
    assert all(lab.poll() is None for lab in labs)
    assert all(len(processes_with(m)) == 4 for m in markers)
    for lab in labs:
        lab.terminate()
    assert [lab.wait(timeout=20) for lab in labs] == [128 + signal.SIGTERM] * 2


def test_a_lab_of_another_container_is_left_alone(tmp_path):
    """Whose process ids mean others here, or nobody, while it shares this machine's /run and /tmp."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"]
    script = "echo $PACELINE_LAB_NAME; while [ ! -e go ]; do sleep 0.02; done"
    command = lab_command(*FAST, "--nodes", "1", command=["sh", "-c", script])
    with subprocess.Popen([*alone, *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            _, pid, start, _ = process.stdout.readline().split("-")
            before = traces_of(pid, start)
            assert len(before) == 3  # a node, the switch, a folder
            done = run_lab("--no-calibration", command=["true"])
            assert done.returncode == 0 and "left behind" not in done.stderr
            assert traces_of(pid, start) == before
        finally:
            (tmp_path / "go").touch()
        assert process.wait(timeout=30) == 0
    assert not traces_of(pid, start)


def test_keep_leaves_and_remove_kept_ends(copied_program):
    process = subprocess.Popen(lab_command(*FAST, "--keep", command=["true"]), stderr=subprocess.PIPE, text=True)
    start = start_time(process.pid)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and "--remove-kept" in said
    assert run_lab(*FAST, command=["true"]).returncode == 0
    assert traces_of(process.pid, start), "another lab removed what was to be kept"
    kept = traces_of(process.pid, start)
    refused, removed = (
        subprocess.run([*command, "lab", "--remove-kept"], timeout=30, capture_output=True, text=True, check=False)
        for command in ([*nobody(), copied_program], [str(PROGRAM)])
    )
    name = f"paceline-keep-{process.pid}-{start}-*"
    assert refused.returncode == 3 and "lab: removed 0\n" in refused.stderr
    assert f"lab: can't remove {name}: Permission denied. It needs root: sudo paceline lab" in refused.stderr
    assert removed.returncode == 0 and "removed 0" not in removed.stderr and name not in removed.stderr
    assert kept and not traces_of(process.pid, start)


@pytest.mark.anywhere
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rate", "1gb"], "--rate"),
        (["--rate", "1"], "--rate"),
        (["--rate", "-5mbit"], "--rate"),
        (["--rate", "401gbit"], "outside of 1mbit to 400gbit"),
        (["--rate", "999kbit"], "outside of 1mbit to 400gbit"),
        (["--nodes", "0"], "--nodes"),
        (["--slots", "many"], "--slots"),
        (["--loss", "0.1"], "--loss"),
        (["--loss", "80%"], "--loss"),
        (["--delay", "5"], "--delay"),
        (["--delay", "1001ms"], "--delay must be between 0 and 1s"),
        (["--per-flow", "2gbit"], "--per-flow"),
        (["--per-flow", "99kbit"], "--per-flow must be at least 100kbit"),
        (["--grace", "-1s"], "--grace"),
        (["--profile", "mars-1g"], "aws-25g"),
        (["--scale", "0.5"], "--profile"),
        (["--congestion", "nosuch"], "--congestion"),
        (["--json", "/nonexistent/folder/x.json"], "--json"),
        (["--loopback", "--loss", "1%"], "--loopback"),
        (["--keep", "--delay", "1ms"], "--keep can't go with --delay"),
        (["--loopback", "--rate", "1gbit"], "can't go with --rate. Leave --loopback out"),
        (["--keep", "--loopback"], "can't go with --keep"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_flags_are_named(flags, named):
    done = run_lab(*flags, command=["true"])
    assert done.returncode == 2
    assert named in done.stderr + done.stdout


@pytest.mark.anywhere
def test_no_command_is_an_error_that_shows_how():
    done = subprocess.run([str(PROGRAM), "lab"], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 2 and "paceline lab --nodes" in done.stderr


def test_a_command_that_is_not_there():
    done = run_lab(*FAST, command=["no-such-program-here"])
    assert done.returncode == 127 and "no-such-program-here" in done.stderr


def nobody():
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "env", "HOME=/tmp"]


@pytest.fixture
def copied_program():
    """Where others may read it: neither a checkout's folders nor pytest's need be open to all."""
    with tempfile.TemporaryDirectory(prefix="paceline-program-") as folder:
        os.chmod(folder, 0o755)
        yield shutil.copy(PROGRAM, f"{folder}/paceline")


def test_without_root_a_user_namespace_serves_or_the_next_best_is_named(copied_program):
    command = [*nobody(), copied_program, "lab", "--no-calibration", "--", "sh", "-c", "ls /sys/class/net; hostname"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    if done.returncode == 0:
        assert "[1] eth0" in done.stdout and "[1] node1" in done.stdout
    else:
        assert done.returncode == 3
        assert "root" in done.stderr and "--loopback" in done.stderr


def test_keep_without_root_is_refused(copied_program):
    command = [*nobody(), copied_program, "lab", "--keep", "--no-calibration", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    assert done.returncode == 3
    assert "--keep needs root" in done.stderr or "can't make network namespaces" in done.stderr


@pytest.mark.anywhere
def test_a_report_on_a_command_that_is_no_text(tmp_path):
    report = tmp_path / "lab.json"
    command = [*lab_command(*FAST, "--loopback", "--json", str(report), command=["true"]), b"a\xffb"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert report_of(report)["command"] == ["true", "a\N{REPLACEMENT CHARACTER}b"]


def test_without_any_namespaces_the_next_best_is_named(copied_program):
    limited = ["sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    # In a user namespace of its own the limit concerns this test alone.
    command = ["unshare", "-U", "--map-root-user", *limited, *["setpriv", "--bounding-set=-all", "--inh-caps=-all"]]
    command += [copied_program, "lab", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "can't make network namespaces" in done.stderr
    assert "--loopback" in done.stderr and "Run as root" in done.stderr


@pytest.mark.anywhere
def test_no_rank_runs_outside_of_its_node_for_want_of_descriptors():
    """Somewhere among these limits the last rank's output fits, and what leads it into its node does not."""
    ours, answers = os.readlink("/proc/self/ns/net"), set()
    for limit in range(12, 30):
        limited = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash"]
        done = run_lab(*FAST, "--nodes", "2", prefix=limited, command=["readlink", "/proc/self/ns/net"])
        answers.add(done.returncode)
        assert ours not in done.stdout, f"ulimit -n {limit}: {done.stdout}{done.stderr}"
        assert done.returncode == 0 or "ulimit" in done.stderr, f"ulimit -n {limit}: {done.stdout}{done.stderr}"
    assert answers == {0, 3}


def test_loopback_runs_and_says_what_it_is_not():
    """Nor does it pass on what a lab around it has told."""
    code = 'import os; print(os.environ["RANK"], os.environ["MASTER_ADDR"], "PACELINE_LAB_BYTES" in os.environ, '
    code += '"PACELINE_LAB_DELAY" in os.environ, os.environ["PACELINE_LAB_NODES"])'
    outer = {"PACELINE_LAB_BYTES": "/elsewhere", "PACELINE_LAB_DELAY": "0.002", "PACELINE_LAB_NODES": "9"}
    done = run_lab("--loopback", "--nodes", "3", command=python(code), **outer)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} 127.0.0.1 False False 3" for r in range(3)]
    assert "no link speeds" in done.stderr


def test_lab_bytes_outside_and_inside():
    outside = subprocess.run(
        [str(PROGRAM), "lab-bytes"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PACELINE_LAB_BYTES"},
    )
    assert outside.returncode == 3 and "paceline lab" in outside.stderr
    inside = run_lab(*FAST, command=[str(PROGRAM), "lab-bytes"])
    assert inside.returncode == 0
    assert len(json.loads(inside.stdout.splitlines()[0].split("] ", 1)[1])["nodes"]) == 2


@pytest.mark.anywhere
@pytest.mark.parametrize(
    ("answer", "named"), [(b"", "ending"), (b'{"time_s": 1, "no', "ending"), (b'{"error": "netlink"}\n', "netlink")]
)
def test_lab_bytes_without_figures_is_an_error(tmp_path, answer, named):
    with socket.socket(socket.AF_UNIX) as lab:
        lab.bind(str(tmp_path / "bytes"))
        lab.listen()
        asks = subprocess.Popen(
            [str(PROGRAM), "lab-bytes"],
            env={**os.environ, "PACELINE_LAB_BYTES": str(tmp_path / "bytes")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lab.settimeout(30)
        client, _ = lab.accept()
        with client:
            client.sendall(answer)
        out, err = asks.communicate(timeout=30)
    assert asks.returncode == 3 and not out and named in err, (asks.returncode, out, err)


def test_interpreter_is_the_tests_own():
    done = run_lab(*FAST, command=[sys.executable, "-c", "import sys; print(sys.executable)"])
    assert done.stdout.splitlines()[0].endswith(sys.executable)
