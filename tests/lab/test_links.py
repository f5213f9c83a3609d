"""Links are what was asked for: rate, bytes, loss, caps."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap

import pytest
from lab_tools import (
    TRANSFER,
    lab_command,
    python,
    report_of,
    rows_of,
    run_lab,
    start_time,
    traces_of,
    transfer,
    wait_until,
)
from presence import measured

MSS, FRAME = 1448, 1514  # TCP with time stamps at MTU 1500
HOLDS = 0.93  # of what a line should carry: below it the lab warns


def calibrated(tmp_path, rate, *flags):
    """The calibration of a lab's links at `rate`, and what the lab said."""
    path = tmp_path / "lab.json"
    done = run_lab("--nodes", "2", "--rate", rate, *flags, "--json", str(path), command=["true"])
    assert done.returncode == 0, done.stderr
    return [link["calibration"][d] for link in report_of(path)["links"] for d in ("up", "down")], done.stderr


def test_calibration_is_within_five_percent_of_95_percent_of_the_line(tmp_path):
    def holds(link):
        return 0.95 * 0.95e8 <= link["payload_bps"] <= 1.05 * 0.95e8

    # A machine that is busy for a moment makes a link look slower.
    links, said = measured(lambda: calibrated(tmp_path, "100mbit"), lambda seen: all(map(holds, seen[0])), attempts=5)
    for link in links:
        assert holds(link), said
        assert link["ahead_after_idle_bytes"] < 200e3, said  # 72 kB of burst, one batch, clocks
    assert "cubic" in said and "node1" in said


def test_a_slow_link_is_measured_as_well(tmp_path):
    """A window holds six batches of 64 kB there: half a batch more or less would be 9 %."""

    def holds(link):
        return 0.98 * 0.95 * 5e6 <= link["payload_bps"] <= 1.02 * 0.95 * 5e6

    links, said = measured(lambda: calibrated(tmp_path, "5mbit"), lambda seen: all(map(holds, seen[0])), attempts=3)
    assert all(map(holds, links)), said
    assert "warning" not in said


def test_the_table_of_links_is_what_was_measured(tmp_path):
    """Rate, its share of the line, and how far a burst after silence ran ahead: up, then down, a line a node. Loss is
    drawn on the way up, so the two differ."""

    def differ(seen):
        ups, downs = seen[0][::2], seen[0][1::2]
        return all(up["payload_bps"] < 0.99 * down["payload_bps"] for up, down in zip(ups, downs, strict=True))

    links, said = measured(lambda: calibrated(tmp_path, "200mbit", "--loss", "3%"), differ, attempts=5)
    assert differ((links, said)), said
    cell = r" +([\d.]+) Mb/s \( *([\d.]+) %\) +(\d+) kB"
    rows = re.findall(rf"^lab: node(\d) {cell} {cell}$", said, re.MULTILINE)
    assert "lab: link   up, TCP payload       after idle  down, TCP payload     after idle\n" in said
    assert [row[0] for row in rows] == ["0", "1"]
    cells = [tuple(map(float, row[i : i + 3])) for row in rows for i in (1, 4)]
    for (rate, share, ahead), link in zip(cells, links, strict=True):
        assert rate == pytest.approx(link["payload_bps"] / 1e6, rel=1e-3)
        assert share == pytest.approx(link["payload_bps"] / 2e8 * 100, abs=0.06)
        assert ahead == pytest.approx(link["ahead_after_idle_bytes"] / 1e3, abs=0.6)


def ended_once_said(enough, *flags):
    """A lab on a terminal is ended by SIGTERM once enough(what it has said)."""
    terminal, inside = pty.openpty()
    with subprocess.Popen(lab_command(*flags, command=["true"]), stderr=inside) as process:
        try:
            os.close(inside)
            said = b""
            while not enough(said):
                assert select.select([terminal], [], [], 30)[0], said
                said += os.read(terminal, 4096)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            os.close(terminal)


def test_a_slow_calibration_shows_how_far_it_is_and_hears_signals():
    far = re.compile(rb"\rlab: calibrated 0 of 2 links \((\d+) %\)")
    ended_once_said(lambda said: len(set(far.findall(said))) >= 3, "--rate", "1mbit")


def test_a_gigabit_holds_or_the_lab_warns(tmp_path):
    most = 1.05 * 0.95e9
    links, said = measured(
        lambda: calibrated(tmp_path, "1gbit"),
        lambda seen: max(link["payload_bps"] for link in seen[0]) <= most,
    )
    slowest = min(link["payload_bps"] for link in links)
    assert max(link["payload_bps"] for link in links) <= most, said
    assert ("does not hold 1 Gb/s on every link" in said) == (slowest < HOLDS * 0.95e9), said


def interfaces(*flags):
    """What `ip` says of the nodes' NICs, by rank, and what the lab said."""
    done = run_lab(*flags, command=["ip", "-details", "-json", "link", "show", "eth0"])
    assert done.returncode == 0, done.stderr
    return [json.loads(line.split("] ", 1)[1])[0] for line in sorted(done.stdout.splitlines())], done.stderr


def test_a_scaled_profile_sets_mtu_rate_and_the_cap_of_a_flow(tmp_path):
    path = tmp_path / "lab.json"

    def run():
        seen = interfaces("--profile", "aws-25g", "--scale", "0.004", "--json", str(path))
        return *seen, report_of(path)

    def holds(seen):
        up = [link["calibration"]["up"] for link in seen[2]["links"]]
        return all(HOLDS * 1e8 <= u["payload_bps"] <= 1.02e8 and 19e6 <= u["one_flow_bps"] <= 20.4e6 for u in up)

    # 25 Gb/s, of which a flow gets 5, with jumbo frames: a fixed part of what the cloud's page says.
    nics, said, report = seen = measured(run, holds)
    assert [nic["mtu"] for nic in nics] == [9001, 9001]
    assert "100 Mb/s both ways, MTU 9001, cubic, a flow at most 20 Mb/s (profile aws-25g)" in said
    assert (report["rate_bps"], report["per_flow_bps"], report["mtu"]) == (1e8, 2e7, 9001)
    assert holds(seen), said


def test_segmentation_offload_is_off_where_packets_get_lost():
    lossy, _ = interfaces("--quiet", "--no-calibration", "--loss", "1%")
    assert [nic["gso_max_segs"] for nic in lossy] == [1, 1]
    plain, _ = interfaces("--quiet", "--no-calibration")
    assert all(nic["gso_max_segs"] > 1 for nic in plain)


#: A rank prints its link's shapers, its own and its port's of the switch, and the classes of its flows.
SHAPERS = """
import json, os, re, subprocess
def run(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
rank = os.environ["RANK"]
switch = run("ip", "netns", "identify", str(os.getpid())).strip().removesuffix("n" + rank) + "sw"
def shaper(device, *where):
    found = json.loads(run("tc", *where, "-j", "-d", "-s", "qdisc", "show", "dev", device))
    return next(one for one in found if "root" in one)
overheads = re.findall("^class htb .* overhead (.*?) ", run("tc", "-d", "class", "show", "dev", "eth0"), re.MULTILINE)
print(json.dumps({"rank": int(rank), "up": shaper("eth0"), "down": shaper("port" + rank, "-n", switch),
                  "flows": len(overheads), "overheads": sorted(set(overheads))}))
"""


@pytest.mark.parametrize(("rate", "bps"), [("100mbit", 1e8), ("10gbit", 1e10)])
def test_the_kernel_is_told_the_rate_the_burst_and_an_ethernet_frame_s_overhead(rate, bps):
    """Preamble, check sum and gap are 24 bytes that the kernel does not count: without them TCP's payload would be
    95.6 % of the rate instead of 94.1 %, and no calibration tells the two apart."""
    flags = ("--nodes", "2", "--rate", rate, "--per-flow", "50mbit", "--quiet", "--no-calibration")
    done = run_lab(*flags, command=python(SHAPERS))
    assert done.returncode == 0, done.stderr
    rows = rows_of(done)
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        for direction in ("up", "down"):
            shaper, options = row[direction], row[direction]["options"]
            assert shaper["kind"] == "tbf", direction
            assert options["rate"] == bps / 8, direction  # tc's are bytes a second
            # tc keeps a burst as the time that it takes at the rate, in microseconds.
            burst = int(re.match(r"(\d+)b", options["burst"])[1])
            assert burst == pytest.approx(max(72e3, 80e-6 * bps / 8), abs=1e-6 * bps / 8), direction
            assert (options["overhead"], options["linklayer"]) == (24, "ethernet"), direction
        assert row["flows"] > 1000 and row["overheads"] == ["24"]


def test_batches_leave_room_in_the_burst_for_a_late_timer():
    """72 kB without what a line of 5 Gb/s carries in 20 µs; one of 1 Gb/s has room for the kernel's batches."""
    for rate, largest in (("5gbit", 59500), ("1gbit", 65536)):
        nics, _ = interfaces("--quiet", "--no-calibration", "--rate", rate)
        assert [nic["gso_max_size"] for nic in nics] == [largest, largest]


@pytest.mark.parametrize("flags", [[], ["--congestion", "reno"]])
def test_congestion_control_of_a_connection_to_another_node(flags):
    code = """
    import os, socket, time
    if os.environ["RANK"] == "1":
        s = socket.create_server(("10.77.0.2", 7003)).accept()[0]
    else:
        s = None
        while s is None:
            try:
                s = socket.create_connection(("10.77.0.2", 7003))
            except ConnectionRefusedError:  # it is not listening yet
                time.sleep(0.01)
    print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
    """
    wanted = flags[-1] if flags else "cubic"
    done = run_lab("--no-calibration", *flags, command=python(code))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[0] {wanted}", f"[1] {wanted}"]
    assert f"MTU 1500, {wanted}\n" in done.stderr


def test_bytes_match_a_known_transfer():
    count = 20_000_000
    least = count / MSS * FRAME
    # Data one way, and the acknowledgements of the other way's data: at most one in two segments. A machine that
    # stands still lets TCP send again what had arrived.
    rows = measured(
        lambda: transfer("--nodes", "2", "--rate", "1gbit", count=count),
        lambda rows: all(max(row["up"], row["down"]) <= least * 1.045 for row in rows),
    )
    for row in rows:
        assert least <= row["up"] <= least * 1.045
        assert least <= row["down"] <= least * 1.045
        data_only = row["up"] - (row["packets"] - count / MSS) * 66
        assert data_only == pytest.approx(least, rel=0.02)


def test_what_the_command_sent_stands_in_the_table_and_the_report(tmp_path):
    """And nothing of the calibration before it, which is several times as much."""
    path, count = tmp_path / "lab.json", 4_000_000
    least = count / MSS * FRAME
    flags = ("--nodes", "2", "--rate", "1gbit", "--json", str(path))
    done = run_lab(*flags, command=python(TRANSFER, str(count), "1"), timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(done)) == 2
    links = report_of(path)["links"]
    assert [link["node"] for link in links] == [0, 1]
    cell = r"([\d.]+) +[\d.]+ [kMG]b/s"
    table = re.findall(rf"^lab: node(\d) +{cell} +{cell} +(\d+)$", done.stderr, re.MULTILINE)
    assert [int(row[0]) for row in table] == [0, 1], done.stderr
    for link, (_, *shown, dropped) in zip(links, table, strict=True):
        for direction, megabytes in zip(("up", "down"), shown, strict=True):
            sent = link[direction]["bytes"]
            # Beside it acknowledgements, as above, the connections' begin and end, and the kernel's own packets.
            assert least <= sent <= least * 1.045 + 20_000
            assert float(megabytes) == pytest.approx(sent / 1e6, abs=0.00051)
            assert link[direction]["packets"] >= count / MSS
        assert int(dropped) == link["up"]["drops"] + link["down"]["drops"]


def test_a_transfer_takes_the_time_that_the_line_allows():
    count = 25_000_000
    for row in transfer("--nodes", "2", "--rate", "400mbit", count=count):
        assert row["seconds"] >= count * 8 / 400e6 * 0.97


#: Waits until who is to have the datagrams of a socket answers: before it is bound they would be lost.
GREET = """
def greet(s, whom):
    s.settimeout(0.05)
    for _ in range(300):
        try:
            s.sendto(b"hello", whom)
            if s.recv(100) == b"hello": break
        except OSError:
            pass
    else:
        raise TimeoutError(whom)
    s.settimeout(5)
"""


def test_loss_drops_about_the_asked_share(tmp_path):
    path = tmp_path / "lab.json"
    code = """
    import os, socket, time
    rank = int(os.environ["RANK"])
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if rank == 1:
        s.bind(("10.77.0.2", 7001)); s.setsockopt(socket.SOL_SOCKET, 33, 1 << 26); s.settimeout(15)
        got = 0
        while True:
            data, who = s.recvfrom(100)
            if data == b"end": break
            if data == b"hello": s.sendto(data, who)
            else: got += 1
        print(got)
    else:
        greet(s, ("10.77.0.2", 7001))
        for i in range(20000):
            s.sendto(b"x", ("10.77.0.2", 7001))
            if i % 100 == 0: time.sleep(0.002)
        time.sleep(0.2)
        for i in range(50): s.sendto(b"end", ("10.77.0.2", 7001))
    """
    command = python(GREET + textwrap.dedent(code))
    done = run_lab("--quiet", "--no-calibration", "--loss", "5%", "--json", str(path), command=command)
    assert done.returncode == 0, done.stderr
    got = int(done.stdout.split("] ")[1])
    assert 0.035 < 1 - got / 20000 < 0.065  # ten standard deviations


def test_one_flow_is_capped_and_several_fill_the_line():
    count = 6_000_000
    flags = ("--nodes", "2", "--rate", "400mbit", "--per-flow", "100mbit")
    for row in transfer(*flags, count=count):
        assert row["seconds"] >= count * 8 / 100e6 * 0.95
    # Four flows together: well beyond one flow's cap (hashing may put two into one class).
    limit = 4 * count * 8 / 100e6 * 0.8
    for row in measured(
        lambda: transfer(*flags, count=count, flows=4), lambda rows: all(row["seconds"] < limit for row in rows)
    ):
        assert row["seconds"] < limit


def test_a_long_delay_is_checked_in_seconds_and_signals_are_heard_meanwhile():
    ended_once_said(lambda said: b"checked the delay of 1 of 2 links" in said, "--delay", "1s", "--no-calibration")


def test_a_delay_that_is_too_short_is_refused_with_one_that_holds(tmp_path):
    """A relay takes tens of microseconds itself, on whatever machine: no link has 1 µs of it."""
    mark, path = tmp_path / "started", tmp_path / "lab.json"
    flags = ("--nodes", "2", "--rate", "100mbit", "--no-calibration", "--json", str(path), "--delay")
    refusal = r"^lab: --delay 1us does not hold here: node\d's link takes (\d+) µs each way .* 2 at most would do\. "

    def refused_and_mended():
        first = run_lab(*flags, "1us", command=["touch", str(mark)])
        said = re.search(refusal + r".* --delay (\d+)us: ask for that", first.stderr, re.MULTILINE)
        return first, said and run_lab(*flags, f"{said[2]}us", command=["true"]), said

    first, second, said = measured(refused_and_mended, lambda seen: seen[1] and seen[1].returncode == 0, attempts=5)
    assert said, first.stderr
    assert first.returncode == 3 and not mark.exists()
    assert second.returncode == 0, second.stderr
    # What is said to hold is judged as documented, printed beside what was asked, and reported link by link.
    asked = int(said[2])
    line = re.search(r"^lab: delay each way: (\d+) µs asked, (\d+) to (\d+) µs measured$", second.stderr, re.MULTILINE)
    report = report_of(path)
    links = [link["delay_measured_ns"] / 1e3 for link in report["links"]]
    assert report["delay_ns"] == asked * 1000
    assert [int(text) for text in line.groups()] == [asked, round(min(links)), round(max(links))]
    assert all(asked < link <= asked + max(0.2 * asked, min(60, 0.6 * asked)) for link in links)


@pytest.mark.parametrize("delay", [100, 1_000, 20_000])
def test_a_delay_that_a_relay_can_keep_is_kept_on_busy_cores(delay):
    command = ["--quiet", "--rate", "100mbit", "--no-calibration", "--delay", f"{delay}us"]
    busy = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = measured(lambda: run_lab(*command, command=["true"]), lambda done: done.returncode == 0, attempts=5)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flags", [["--loss", "1%", "--no-calibration"], ["--loss", "50%"]])
def test_delay_and_loss_go_together(flags):
    """Up to the loss that --loss takes: probes, addresses' questions and handshakes that get lost are sent again."""
    done = measured(
        lambda: run_lab("--nodes", "6", "--rate", "100mbit", "--delay", "2ms", *flags, command=["true"], timeout=150),
        lambda done: done.returncode == 0,
    )
    assert done.returncode == 0, done.stderr
    assert f"2000 µs more each way, {flags[1][:-1]} % lost\n" in done.stderr


def test_a_link_whose_probes_all_get_lost_is_told():
    """Pulled out while the other one's delay, of a second, is checked."""
    flags = ("--rate", "100mbit", "--delay", "1s", "--loss", "1%", "--no-calibration")
    command = lab_command(*flags, command=["true"])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline().startswith("lab: 2 nodes")
            (path,) = (path for path in traces_of(process.pid, start_time(process.pid)) if path.endswith("sw"))
            switch = os.path.basename(path)
            losses = ["tc", "-n", switch, "filter", "show", "dev", "port1", "ingress"]
            # They begin when the relay's rate has been measured, and the delays are checked next.
            assert wait_until(lambda: subprocess.run(losses, capture_output=True, check=False).stdout)
            subprocess.run(["ip", "-n", switch, "link", "set", "port1", "down"], check=True)
            said = process.stderr.read()
            assert process.wait(timeout=60) == 3
        finally:
            process.kill()
    refusal = r"^lab: --delay can't be checked here: of \d+ probes of node1's link 0 came back, and 20 are needed\. "
    assert re.search(refusal + "Ask for a smaller --loss, a higher --rate or fewer nodes", said, re.MULTILINE), said


@pytest.mark.parametrize("flags", [[], ["--no-calibration"], ["--loss", "50%"], ["--loss", "0.1%", "--no-calibration"]])
def test_a_delay_is_refused_where_its_relay_can_t_carry_the_rate(tmp_path, flags):
    """What no relay in user space carries, on whatever machine; and not for the losses that TCP would slow down by."""
    mark = tmp_path / "started"
    links = ("--nodes", "2", "--delay", "20ms", "--rate", "400gbit", *flags)
    done = run_lab(*links, command=["touch", str(mark)])
    assert done.returncode == 3 and not mark.exists()
    way, instead = ("", " or fewer nodes")
    if "--loss" in flags:
        way, instead = (" in single packets, as --loss has them", ", fewer nodes or no --loss")
    refusal = (
        rf"^lab: --delay does not hold here: node\d's link carries [1-9]\S* [MG]b/s of 400 Gb/s{way}, for the relay "
        f"needs more of the cores. Ask for a lower --rate{instead}$"
    )
    assert re.search(refusal, done.stderr, re.MULTILINE), done.stderr


def test_a_delay_that_tcp_takes_long_to_fill_is_not_taken_for_a_slow_relay(tmp_path):
    """7.5 MB are under way when it is full, and TCP begins with 14 kB."""
    path = tmp_path / "lab.json"
    flags = ("--nodes", "2", "--rate", "300mbit", "--delay", "100ms", "--json", str(path))
    done = measured(lambda: run_lab(*flags, command=["true"]), lambda done: done.returncode == 0, attempts=3)
    assert done.returncode == 0, done.stderr
    slowest = min(link["calibration"]["up"]["payload_bps"] for link in report_of(path)["links"])
    assert slowest < 0.8 * 3e8 and "TCP takes its time to fill it over such a delay" in done.stderr


def test_delay_is_added_one_way():
    code = """
    import os, socket, statistics, time
    rank = int(os.environ["RANK"])
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
    if rank == 1:
        s.bind(("10.77.0.2", 7002))
        while True:
            data, who = s.recvfrom(64)
            s.sendto(data, who)
            if data == b"end": break
    else:
        greet(s, ("10.77.0.2", 7002))
        times = []
        for i in range(40):
            t = time.perf_counter(); s.sendto(b"x", ("10.77.0.2", 7002))
            while s.recv(64) != b"x": pass  # an answer to more than one greeting
            times.append(time.perf_counter() - t)
        s.sendto(b"end", ("10.77.0.2", 7002))
        print(statistics.median(times))
    """

    command = python(GREET + textwrap.dedent(code))

    def round_trip_of(done):
        return float(done.stdout.split("] ")[1]) if done.returncode == 0 else float("inf")

    done = measured(
        lambda: run_lab("--quiet", "--delay", "5ms", "--rate", "100mbit", command=command),
        lambda done: round_trip_of(done) < 0.014,
    )
    assert done.returncode == 0, done.stderr
    round_trip = round_trip_of(done)
    assert 0.010 <= round_trip < 0.014
