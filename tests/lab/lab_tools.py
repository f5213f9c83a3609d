"""What the lab's tests share: the program, a run, and what must not be left behind."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "bin" / "paceline"


def makes_namespaces() -> bool:
    """Whether root is here, and may: what a lab needs that has nobody's user namespace."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


in_a_lab = pytest.mark.skipif(not makes_namespaces(), reason="nobody here may make network namespaces (root is needed)")
#: Root's own, or the user's, in which the user is root.
MOUNTS = [
    "unshare",
    *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
    "--mount",
    "--propagation",
    "private",
]
on_a_disk_of_its_own = pytest.mark.skipif(
    subprocess.run([*MOUNTS, "true"], capture_output=True).returncode != 0,
    reason="nobody here may mount a disk (root is needed, or user namespaces)",
)


def on_a_small_disk(folder: Path, size: int = 16384, *, files: int = 4, full: bool = False) -> list[str]:
    """What stands behind it runs where this folder is a disk of so many bytes and files, and nobody else sees that.
    A full one has room for names only."""
    script = f'mount -t tmpfs -o size={size},nr_inodes={files} none "$0"'
    if full:
        script += f' && head -c {size} /dev/zero >"$0/full"'
    command = script + ' && exec "$@"'
    return [*MOUNTS, "sh", "-c", command, str(folder)]


def lab_command(*flags: str, command: list[str]) -> list[str]:
    return [str(PROGRAM), "lab", *flags, "--", *command]


def run_lab(
    *flags: str, command: list[str], timeout: float = 60, prefix: list[str] | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a lab to its end; standard output and error as text."""
    return subprocess.run(
        [*(prefix or []), *lab_command(*flags, command=command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        check=False,
    )


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs `code`, standard library only, with tools/demo's lab_bytes at hand."""
    head = f"import sys; sys.path.insert(0, {str(ROOT / 'tools' / 'demo')!r})\n"
    return [sys.executable, "-S", "-c", head + textwrap.dedent(code), *arguments]


def report_of(path: Path) -> dict:
    return json.loads(path.read_text())


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def traces_of(pid: int, start: str) -> list[str]:
    """Namespaces and files that a lab owned by this process would leave."""
    folder = os.environ.get("TMPDIR", "/tmp")
    return glob.glob(f"/run/netns/paceline-*{pid}-{start}-*") + glob.glob(f"{folder}/paceline-lab-*{pid}-{start}")


def processes_with(text: str) -> list[int]:
    """Processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if text.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition, seconds: float = 15) -> bool:
    """Polls; true as soon as the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


#: Every rank sends BYTES to the next one and prints what its link carried meanwhile.
TRANSFER = """
import json, os, socket, threading
from lab_bytes import read_links
rank, size, count, flows = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1]), int(sys.argv[2])
own, peer = f"10.77.0.{rank + 1}", f"10.77.0.{(rank + 1) % size + 1}"
listener = socket.create_server((own, 7000))
def connect():
    import time
    for _ in range(500):
        try:
            return socket.create_connection((peer, 7000), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise TimeoutError(peer)
out = [connect() for _ in range(flows)]
into = [listener.accept()[0] for _ in range(flows)]
def take(s):
    left = count
    while left:
        left -= len(s.recv(min(left, 1 << 20))) or sys.exit("closed early")
def give(s):
    s.sendall(bytes(count))
import time
before = read_links()
into[0].sendall(b"."); out[0].recv(1)  # nobody sends before the receiver has read its counters
started = time.monotonic()
threads = [threading.Thread(target=f, args=(s,)) for f, ss in ((take, into), (give, out)) for s in ss]
[t.start() for t in threads]
[t.join() for t in threads]
seconds = time.monotonic() - started
out[0].sendall(b"."); into[0].recv(1)  # both directions have ended
time.sleep(0.05)
after = read_links()
print(json.dumps({"rank": rank, "seconds": seconds,
                  "up": after[rank]["up_bytes"] - before[rank]["up_bytes"],
                  "packets": after[rank]["up_packets"] - before[rank]["up_packets"],
                  "down": after[rank]["down_bytes"] - before[rank]["down_bytes"]}))
"""


def transfer(*flags: str, count: int, flows: int = 1, timeout: float = 60) -> list[dict]:
    """The TRANSFER of every rank, by rank."""
    done = run_lab(
        "--quiet", "--no-calibration", *flags, command=python(TRANSFER, str(count), str(flows)), timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return rows_of(done)


def rows_of(done) -> list[dict]:
    """What the ranks of a lab printed as JSON, by rank."""
    rows = [json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("[")]
    return sorted(rows, key=lambda row: row["rank"])
