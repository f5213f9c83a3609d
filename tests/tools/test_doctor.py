"""`paceline doctor` on this machine, with good and bad environments."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "bin" / "paceline"


#: What tells that a launcher started this process, and who it is.
LAUNCHERS = ("PACELINE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def doctor(*arguments: str, under: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    """under: a command that starts what follows it in a world of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in RANK}
    return subprocess.run(
        [*under, PROGRAM, "doctor", *arguments],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SLURM_HERE = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
}  # fmt: skip
NOWHERE = {"MASTER_ADDR": "nosuch.host.invalid", "MASTER_PORT": "29500"}


def findings(**variables: str) -> dict[str, dict]:
    return {f["subject"]: f for f in json.loads(doctor("--json", **variables).stdout)}


def test_every_finding_that_is_not_good_has_a_fix():
    for finding in json.loads(doctor("--json").stdout):
        assert finding["found"], finding
        assert bool(finding["fix"]) == (finding["verdict"] != "ok"), finding


def test_machine_is_described_truly():
    machine = findings()["machine"]["found"]
    assert f"{os.cpu_count()} cores" in machine
    assert os.uname().release in machine


@pytest.mark.parametrize(
    ("variables", "subject", "words"),
    [
        ({"PACELINE_TOPK_RATO": "1"}, "settings", "did you mean PACELINE_TOPK_RATIO"),
        ({"RANK": "0"}, "launcher", "WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "launcher", "OMPI_COMM_WORLD_RANK=2"),
        ({"PACELINE_SECRET_FILE": "/nonexistent/secret"}, "secret", "'/nonexistent/secret': No such file"),
        ({"PACELINE_INTERFACE": "nosuchnic"}, "interface", "nosuchnic"),
        ({"NCCL_SOCKET_IFNAME": "nosuchnic"}, "interface", "NCCL_SOCKET_IFNAME='nosuchnic'"),
        ({"RANK": "0", "WORLD_SIZE": "2", **NOWHERE}, "meeting point", "'nosuch.host.invalid' can't be resolved"),
        (NOWHERE, "meeting point", "MASTER_ADDR=nosuch.host.invalid"),
        ({"PACELINE_RENDEZVOUS": "nosuch.host.invalid:1"}, "meeting point", "'nosuch.host.invalid' can't be resolved"),
        ({"PACELINE_RENDEZVOUS": "nosuchport"}, "meeting point", "expected host:port"),
    ],
)
def test_what_would_stop_a_job_fails_by_name(variables, subject, words):
    done = doctor("--json", **variables)
    assert done.returncode == 1
    finding = {f["subject"]: f for f in json.loads(done.stdout)}[subject]
    assert finding["verdict"] == "FAILURE"
    assert words in finding["found"]


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["doctor", "--json"],
        ["doctor", "--settings"],
        ["doctor", "--settings", "--json"],
        ["doctor", "--settings", "--markdown"],
        ["lab", "--profiles"],
        ["bench", "--help"],
        ["--help"],
        ["--version"],
    ],
)
def test_a_page_that_a_full_disk_has_cut_is_no_success(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr.count("can't be written") == 1
    assert "standard output can't be written (No space left on device): free some space" in done.stderr


def test_a_misspelt_command_is_named_beside_those_that_there_are():
    done = subprocess.run([PROGRAM, "docter"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'docter'" in done.stderr and "doctor" in done.stderr and "lab-bytes" in done.stderr


HAND_SET = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "names_port", "verdict"),
    [
        # A torch script brings its own store, also where a person has set the variables.
        (HAND_SET, "PACELINE_PORT", "note"),
        # A script without a launcher may have a store of torch's; torchrun brings one.
        ({}, "PACELINE_PORT", "warning"),
        ({**HAND_SET, "TORCHELASTIC_RUN_ID": "none"}, "PACELINE_PORT", "note"),
        (HAND_SET, "PACELINE_RENDEZVOUS", "FAILURE"),
        (SLURM_HERE, "PACELINE_PORT", "FAILURE"),
        # Nothing of ours listens here.
        ({**HAND_SET, "RANK": "1"}, "PACELINE_PORT", None),
        ({**SLURM_HERE, "PMIX_NAMESPACE": "one"}, "PACELINE_PORT", None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "PACELINE_PORT", None),
        ({"PACELINE_RANK": "0", "PACELINE_SIZE": "2"}, "PACELINE_RENDEZVOUS", None),
    ],
)
def test_a_port_that_rank_0_needs_and_another_has(variables, names_port, verdict):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        chosen = {names_port: port if names_port == "PACELINE_PORT" else f"127.0.0.1:{port}"}
        done = doctor("--json", **variables, **chosen)
    found = {f["subject"]: f for f in json.loads(done.stdout)}
    if verdict is None:
        assert "meeting point" not in found
    else:
        meeting = found["meeting point"]
        assert meeting["verdict"] == verdict
        assert f"port {port} " in meeting["found"] and "taken" in meeting["found"]
        assert names_port in meeting["fix"]
        assert ("torch scripts meet in torch's own store" in meeting["found"]) == (verdict != "FAILURE")
    others = [f for f in found.values() if f["subject"] != "meeting point"]
    assert done.returncode == int("FAILURE" in [verdict, *(f["verdict"] for f in others)])
    # Nobody has it now.
    found = findings(**variables, **chosen)
    assert verdict is None or found["meeting point"]["verdict"] == "ok"


def test_torch_s_port_may_be_paceline_s_where_torch_s_store_is_used():
    """torchrun's store listens there already; a second listener of ours is not wanted."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = str(store.getsockname()[1])
        torchrun = {**HAND_SET, "MASTER_PORT": port, "PACELINE_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        done = doctor("--json", **torchrun)
    ports = {f["subject"]: f for f in json.loads(done.stdout)}["ports"]
    assert ports["verdict"] == "note" and f"both {port}" in ports["found"] and "PACELINE_PORT" in ports["fix"]
    assert done.returncode == doctor("--json").returncode


def test_a_switch_that_is_off_is_named():
    done = doctor("--json", PACELINE_DISABLE="1")
    said = [f for f in json.loads(done.stdout) if "PACELINE_DISABLE" in f["found"]]
    assert [f["verdict"] for f in said] == ["note"] and "unset PACELINE_DISABLE" in said[0]["fix"]
    assert "PACELINE_DISABLE" not in doctor("--json", PACELINE_DISABLE="0").stdout


def test_a_codec_that_may_not_keep_up_is_pointed_out():
    warning = findings(PACELINE_CODEC="topk", PACELINE_TOPK_RATIO="0.001")["codec"]
    assert warning["verdict"] == "warning"
    assert "0.1 %" in warning["found"] and "fp16" in warning["fix"]
    assert "codec" not in findings(PACELINE_CODEC="fp16")
    assert doctor(PACELINE_CODEC="topk").returncode == doctor().returncode


def test_values_that_are_no_text_are_shown_all_the_same():
    found = findings(PACELINE_CODEC="no\udcffcodec")["settings"]
    assert found["verdict"] == "FAILURE" and "no\N{REPLACEMENT CHARACTER}codec" in found["found"]
    rows = json.loads(doctor("--settings", "--json", PACELINE_INTERFACE="no\udcffnic").stdout)
    assert "no\N{REPLACEMENT CHARACTER}nic" in [row["value"] for row in rows]


def test_the_lab_without_root_is_judged_as_the_lab_does():
    """Where user namespaces work, links can be shaped without root."""
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"] if os.geteuid() == 0 else []

    def asked(*command):
        return subprocess.run([*nobody, *command], capture_output=True, text=True, cwd="/", timeout=60, check=False)

    with tempfile.TemporaryDirectory(prefix="paceline-program-") as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(PROGRAM, f"{folder}/paceline")
        lab = asked(program, "lab", "--no-calibration", "--quiet", "--", "true")
        found = {f["subject"]: f for f in json.loads(asked(program, "doctor", "--json").stdout)}["paceline lab"]
    assert (found["verdict"] == "ok") == (lab.returncode == 0), (found, lab.stderr)


def test_too_many_threads_are_pointed_out():
    finding = findings(OMP_NUM_THREADS="64", LOCAL_WORLD_SIZE="8")["threads"]
    assert finding["verdict"] == "warning"
    assert "OMP_NUM_THREADS=" in finding["fix"]


#: Where a machine with a GPU has its device; no more is looked at.
WITH_A_DEVICE = (
    *("unshare", "--mount", "sh", "-c"),
    'cd /dev && mount -t tmpfs tmpfs /dev && touch /dev/nvidia0 && exec "$@"',
    "sh",
)


def fake_driver(folder, version, lacks=None, error=0):
    """A libcuda.so.1 with the loader's functions, but `lacks`; only the version's may be called."""
    source = (ROOT / "src" / "drivers" / "cuda" / "loader.cc").read_text()
    names = set(re.findall(r'PACELINE_BIND\(\w+, "(\w+)"\)', source))
    assert {"cuDriverGetVersion", lacks or "cuInit"} <= names
    code = f"int cuDriverGetVersion(int* version) {{ if ({error}) return {error}; *version = {version}; return 0; }}\n"
    code = "void abort(void);\n" + (code if lacks != "cuDriverGetVersion" else "")
    code += "".join(f"void {name}(void) {{ abort(); }}\n" for name in names - {"cuDriverGetVersion", lacks})
    (folder / "driver.c").write_text(code)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True, timeout=60)
    return library


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({"version": 11060}, ["too old: it offers CUDA 11.6;", "CUDA 11.7 or later"]),
        ({"version": 12040, "lacks": "cuStreamWaitValue32_v2"}, ["CUDA 12.4 and lacks cuStreamWaitValue32_v2;"]),
        ({"version": 12040, "lacks": "cuDriverGetVersion"}, ["lacks cuDriverGetVersion"]),
        ({"version": 12040, "error": 34}, ["libcuda.so.1 is no CUDA driver", "a toolkit's stub", "LD_LIBRARY_PATH"]),
    ],
    ids=["old", "a function less", "no version", "stub"],
)
def test_a_cuda_driver_that_does_not_do_is_named(tmp_path, driver, words):
    fake_driver(tmp_path, **driver)
    done = doctor("--json", under=WITH_A_DEVICE, LD_LIBRARY_PATH=str(tmp_path))
    gpu = {f["subject"]: f for f in json.loads(done.stdout)}["GPU"]
    assert (done.returncode, gpu["verdict"]) == (1, "FAILURE") and gpu["fix"]
    assert all(word in gpu["found"] for word in words), gpu


def test_a_cuda_driver_that_does_is_good(tmp_path):
    fake_driver(tmp_path, version=11070)
    done = doctor("--json", under=WITH_A_DEVICE, LD_LIBRARY_PATH=str(tmp_path))
    assert {f["subject"]: f for f in json.loads(done.stdout)}["GPU"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("options", "verdict", "found"),
    [
        (["-DPACELINE_NCCL_VERSION=22809"], "ok", "libnccl.so.2, version 2.28.9"),
        (["-DPACELINE_NCCL_VERSION=21304"], "note", "NCCL 2.13.4 (libnccl.so.2) is too old"),
        (["-DPACELINE_NCCL_VERSION=22809", "-DPACELINE_NCCL_LACKS"], "note", "it lacks ncclBroadcast"),
        (None, "note", "NCCL is missing"),
    ],
    ids=["new", "old", "a function less", "no library"],
)
def test_the_nccl_on_the_loader_s_path_is_named(tmp_path, options, verdict, found):
    fake_driver(tmp_path, version=12040)
    library, source = tmp_path / "libnccl.so.2", ROOT / "src" / "drivers" / "nccl" / "stand_in" / "old.cc"
    if options is None:
        library.touch()  # found before the system's, and no library
    else:
        subprocess.run(["c++", "-shared", "-fPIC", *options, "-o", library, source], check=True, timeout=60)
    done = doctor("--json", under=WITH_A_DEVICE, LD_LIBRARY_PATH=str(tmp_path))
    nccl = {f["subject"]: f for f in json.loads(done.stdout)}["NCCL"]
    assert nccl["verdict"] == verdict and found in nccl["found"], nccl
    assert ("PyTorch's wheels for CUDA bring their own" in nccl["fix"]) == (verdict != "ok")
    assert done.returncode == doctor("--json").returncode, "a job starts all the same"


def in_own(*spaces: str, then: str) -> tuple[str, ...]:
    """Namespaces in which the shell's `then` has its way before what follows."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *user, *spaces, "sh", "-c", f'{then} && exec "$@"', "sh")


def told(subject: str, under: tuple[str, ...]) -> dict:
    done = doctor("--json", under=under)
    assert done.returncode in (0, 1), done.stderr
    return {f["subject"]: f for f in json.loads(done.stdout)}[subject]


def test_a_node_without_an_interface_is_pointed_out():
    link = "mount -t sysfs none /sys && ip link add wire0 mtu 1400 type veth peer name other"
    link += " && ip address add 10.9.8.7/24 dev wire0 && ip link set lo up && ip link set wire0"
    spaces = ("--net", "--mount")
    network = told("network", in_own(*spaces, then=f"{link} up"))
    assert network["verdict"] == "ok" and network["found"].startswith("wire0 (MTU 1400"), network
    network = told("network", in_own(*spaces, then=f"{link} down"))
    assert network["verdict"] == "note" and network["found"] == "no interface besides loopback is up"
    assert "ip link set" in network["fix"]


@pytest.mark.parametrize(("largest", "verdict"), [(4 << 20, "ok"), ((4 << 20) - 1, "warning"), (212992, "warning")])
def test_small_buffers_of_tcp_are_pointed_out(largest, verdict):
    sizes = in_own("--net", then=f"echo 4096 16384 {largest} >/proc/sys/net/ipv4/tcp_wmem")
    buffers = told("TCP buffers", sizes)
    assert (buffers["verdict"], buffers["found"]) == (verdict, f"up to {largest // 1024} KiB a flow")
    assert ("sysctl -w net.ipv4.tcp_wmem=" in buffers["fix"]) == (verdict == "warning")


@pytest.mark.parametrize("known", [True, False])
def test_a_host_name_that_nobody_knows_is_pointed_out(tmp_path, known):
    """Only the file of hosts is asked, whatever this machine would ask besides."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "127.0.1.1 node7.invalid\n" * known)
    (tmp_path / "nsswitch.conf").write_text("hosts: files\n")
    mounts = [f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
    name = told("host name", in_own("--uts", "--mount", then=" && ".join(["hostname node7.invalid", *mounts])))
    if known:
        assert (name["verdict"], name["found"], name["fix"]) == ("ok", "node7.invalid", "")
    else:
        assert name["verdict"] == "note" and name["found"].startswith("node7.invalid does not resolve: ")
        assert "/etc/hosts" in name["fix"] and "MASTER_ADDR" in name["fix"]


@pytest.mark.parametrize("missing", [["ip"], ["tc"], ["ip", "tc"]])
def test_what_the_lab_lacks_is_named(missing):
    """Wherever it lies: something that nobody can run lies there instead."""
    folders = ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin", *os.environ["PATH"].split(":")]
    places = {os.path.realpath(path) for d in folders for t in missing if os.path.exists(path := f"{d}/{t}")}
    assert len(places) >= len(missing), "iproute2 is not installed"
    hidden = " && ".join(f"mount --bind /dev/null {place}" for place in places)
    lab = told("paceline lab", in_own("--mount", then=hidden))
    assert lab["verdict"] == "note" and "iproute2" in lab["fix"]
    named = lab["found"].removeprefix("cannot shape links here: no ").split(", ")
    assert [name for name in named if name not in ("root", "nor user namespaces")] == missing


REFUSING = (sys.executable, ROOT / "tests" / "launch" / "seccomp.py")
READ_ONLY = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"


@pytest.mark.parametrize(
    ("under", "missing"),
    [
        (in_own("--mount", then=READ_ONLY), "writable /proc/sys (Read-only file system)"),
        ((*in_own("--mount", then="true"), *REFUSING, f"mount:{errno.EACCES}", "--"), "mounts of its own (Permission"),
    ],
    ids=["read-only settings", "no mounts"],
)
def test_what_a_container_refuses_to_the_lab_is_named_as_the_lab_does(under, missing):
    """Though it has the capabilities for network namespaces."""
    found = told("paceline lab", under)
    assert found["verdict"] == "note" and found["found"].startswith(f"cannot shape links here: no {missing}"), found
    lab = subprocess.run(
        [*under, PROGRAM, "lab", "--", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    assert lab.returncode == 3 and f"gets no {missing}" in lab.stderr, lab
    fix, next_best = found["fix"].split(", with iproute2 installed. ")
    assert "--privileged" in fix and "--loopback" in next_best
    assert f"R{fix[1:]}. {next_best}" in lab.stderr, "the same advice"


def shared_memory_of(size: str) -> tuple[str, ...]:
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, "sh")


@pytest.mark.parametrize(
    ("small", "enough", "subject", "found", "fix"),
    [
        (("prlimit", "--nofile=1024"), ("prlimit", "--nofile=4096"), "open files", "1024", "ulimit -n 65536"),
        (shared_memory_of("64m"), shared_memory_of("1g"), "/dev/shm", "0.06 GiB free", "--shm-size=1g"),
        # More than this process has may be nobody's to give.
        (("prlimit", "--memlock=65536"), None, "locked memory", "65536", "--ulimit memlock=-1"),
    ],
)
def test_what_a_container_has_too_little_of_is_pointed_out(small, enough, subject, found, fix):
    done = doctor("--json", under=small)
    finding = {f["subject"]: f for f in json.loads(done.stdout)}[subject]
    assert (finding["verdict"], finding["found"]) == ("warning", found)
    assert fix in finding["fix"]
    assert done.returncode == doctor("--json").returncode, "a job starts all the same"
    if enough:
        found = {f["subject"]: f for f in json.loads(doctor("--json", under=enough).stdout)}
        assert found[subject]["verdict"] == "ok" and not found[subject]["fix"]


@pytest.mark.parametrize(
    ("call", "subject", "found", "fix"),
    [
        ("memfd_create", "shared memory", "anonymous shared files fail: Function not implemented", "fall back to TCP"),
        ("process_vm_readv", "reading sibling ranks", "process_vm_readv is refused", "--cap-add=SYS_PTRACE"),
    ],
)
def test_what_a_containers_filter_refuses_is_pointed_out(call, subject, found, fix):
    """Found beside a machine that lets it through, so that the finding is the filter's."""
    for under, verdict in [((), "ok"), ((*REFUSING, f"{call}:{errno.ENOSYS}", "--"), "warning")]:
        told = {f["subject"]: f for f in json.loads(doctor("--json", under=under).stdout)}[subject]
        assert told["verdict"] == verdict, told
    assert told["found"].startswith(found) and fix in told["fix"], told


def test_where_no_process_can_be_started_none_is_killed():
    """In a namespace of processes, so that nobody else would be: one that sleeps ends by our own signal."""
    beside = 'sleep 60 & "$@"; kill $!; wait $!; [ $? = 143 ]'
    own = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    namespace = ("unshare", *own, "--pid", "--fork", "--kill-child", "sh", "-c", beside, "sh")
    done = doctor("--json", under=(*namespace, *REFUSING, f"clone:{errno.EAGAIN}", "--"))
    told = {f["subject"]: f for f in json.loads(done.stdout)}["reading sibling ranks"]
    assert done.returncode == 0 and told["verdict"] == "warning", done


def test_a_secret_that_others_can_read_is_pointed_out(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o644)
    finding = findings(PACELINE_SECRET_FILE=str(path))["secret"]
    assert finding["verdict"] == "FAILURE" and "chmod 600" in finding["fix"]
    path.chmod(0o600)
    assert findings(PACELINE_SECRET_FILE=str(path))["secret"]["verdict"] == "ok"


def ranks(rank: str, size: str, **more: str) -> dict[str, str]:
    return {rank: "1", size: "4", **more}


KEY = "0123456789abcdef-fedcba9876543210"
MPICH = {"PMI_FD": "7", **ranks("PMI_RANK", "PMI_SIZE")}
OPEN_MPI = ranks("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
TORCH = ranks("RANK", "WORLD_SIZE")
SLURM = {"SLURM_STEP_ID": "0", **ranks("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}


@pytest.mark.parametrize(
    ("variables", "source", "keeps_out"),
    [
        ({"PACELINE_SECRET": KEY}, "PACELINE_SECRET (", "can't read the environment of your processes"),
        ({"PACELINE_SECRET": KEY, **MPICH}, "PACELINE_SECRET (", "can't read the environment of your processes"),
        ({"PACELINE_SECRET_FILE": "secret"}, "PACELINE_SECRET_FILE:", "can't read the file"),
        ({"PACELINE_SECRET_FILE": "secret", **OPEN_MPI}, "PACELINE_SECRET_FILE:", "can't read the file"),
        (
            {"OMPI_MCA_orte_precondition_transports": KEY, **OPEN_MPI},
            "Open MPI's transport key",
            "read your processes' environment or mpirun's own traffic",
        ),
        (OPEN_MPI, "made by rank 0", "as private as that space"),
        (MPICH, "made by rank 0", "as private as that space"),
        (TORCH, "made by rank 0", "everyone who can connect to MASTER_PORT"),
        ({"PMIX_NAMESPACE": "one", **SLURM}, "made by rank 0", "as private as that space"),
        # One host: what a rank of it needs no secret for.
        ({"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", **SLURM}, "derived from", "other machines"),
        ({"PMI_FD": "7", "PMI_RANK": "0", "PMI_SIZE": "1"}, "derived from", "other machines"),
    ],
)
def test_the_job_s_secret_and_what_it_keeps_out(tmp_path, variables, source, keeps_out):
    (tmp_path / "secret").write_text(KEY)
    (tmp_path / "secret").chmod(0o600)
    if "PACELINE_SECRET_FILE" in variables:
        variables = variables | {"PACELINE_SECRET_FILE": str(tmp_path / "secret")}
    secret = findings(**variables)["secret"]
    assert secret["verdict"] == "ok"
    assert secret["found"].startswith(source) and keeps_out in secret["found"]
    assert KEY not in secret["found"]


def test_without_a_launcher_the_sources_of_a_secret_stand_in_their_order():
    sources = ["PACELINE_SECRET (", "PACELINE_SECRET_FILE:", "Open MPI's", "made by rank 0", "derived from"]
    secret = findings()["secret"]
    assert secret["verdict"] == "ok" and "no launcher" in secret["found"]
    # An Open MPI key that no rank was given along with: it is some other job's.
    assert findings(OMPI_MCA_orte_precondition_transports=KEY)["secret"] == secret
    lines = secret["found"].splitlines()[1:]
    assert len(lines) == len(sources)
    for line, source in zip(lines, sources, strict=True):
        assert line.startswith(f"- {source}") and ("keeps out" in line or "as private as" in line)
    page = doctor().stdout.splitlines()
    assert [line[32:] for line in page if line[32:].startswith("- ")] == lines


def test_several_nodes_without_a_secret_are_told_what_to_set():
    secret = findings(SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE="2(x2)", **SLURM)["secret"]
    assert secret["verdict"] == "warning"
    assert secret["found"].startswith("Slurm") and "set PACELINE_SECRET" in secret["fix"]


@pytest.mark.parametrize(("content", "found"), [("", "holds 0 characters"), ("too short\n", "holds 9 characters")])
def test_a_secret_that_ranks_refuse_stops_a_job(tmp_path, content, found):
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(0o600)
    finding = findings(PACELINE_SECRET_FILE=str(path))["secret"]
    assert finding["verdict"] == "FAILURE" and found in finding["found"] and "openssl" in finding["fix"]


def test_settings_show_value_and_source():
    rows = {r["variable"]: r for r in json.loads(doctor("--settings", "--json", LIGHT_TOPK_RATIO="0.05").stdout)}
    assert rows["PACELINE_TOPK_RATIO"]["value"] == "0.05"
    assert rows["PACELINE_TOPK_RATIO"]["source"] == "LIGHT_TOPK_RATIO"
    assert rows["PACELINE_CODEC"]["source"] == ""


def test_wrong_settings_are_listed_beside_all_the_others():
    wrong = {"PACELINE_ZZZ": "1", "PACELINE_TOPK_RATO": "0.1", "PACELINE_CODEC": "fp8", "LIGHT_TOPK_RATIO": "0.05"}
    done = doctor("--settings", **wrong)
    assert done.returncode == 1
    page = done.stdout.splitlines()
    at = next(i for i, line in enumerate(page) if line.startswith("PACELINE_CODEC "))
    assert "PROBLEM: PACELINE_CODEC='fp8' is not one of" in page[at + 1]
    (ratio,) = (line.split() for line in page if line.startswith("PACELINE_TOPK_RATIO "))
    assert ratio[1:4] == ["0.05", "from", "LIGHT_TOPK_RATIO"]
    assert page[-1].startswith("NCCL_")
    problems = done.stderr.splitlines()
    assert len(problems) == 3
    for name in ("PACELINE_ZZZ is not a setting", "did you mean PACELINE_TOPK_RATIO?", "PACELINE_CODEC='fp8'"):
        assert name in done.stderr
    asked = doctor("--settings", "--json", **wrong)
    rows = {row["variable"]: row for row in json.loads(asked.stdout)}
    assert asked.returncode == 1 and asked.stderr == done.stderr
    assert "fp8" in rows["PACELINE_CODEC"]["problem"] and not rows["PACELINE_TOPK_RATIO"]["problem"]
    found = [f for f in json.loads(doctor("--json", **wrong).stdout) if f["subject"] == "settings"]
    assert [f["verdict"] for f in found] == ["FAILURE"] * 3
    assert doctor("--settings").returncode == 0 and not doctor("--settings").stderr


def test_settings_without_effect_say_so_and_by_which_names_they_come():
    page = doctor("--settings").stdout.splitlines()
    (check,) = (line for line in page if line.startswith("PACELINE_NAN_CHECK "))
    assert "no effect yet" in check and "PERSEUS_ALLREDUCE_NANCHECK, PERSEUS_ALLREDUCE_NANHECK" in check
    (codec,) = (line for line in page if line.startswith("PACELINE_CODEC "))
    assert "no effect" not in codec and "LIGHT_TOPK_ALLREDUCE" in codec
    (elastic,) = (line for line in page if line.startswith("HOROVOD_ELASTIC "))
    assert "elastic jobs, not built yet" in elastic


def test_the_secret_is_not_shown():
    for words in (["--settings"], ["--settings", "--json"]):
        done = doctor(*words, PACELINE_SECRET=KEY)
        assert done.returncode == 0 and "(hidden)" in done.stdout and KEY not in done.stdout + done.stderr


def test_nccl_s_variables_keep_their_meaning():
    page = doctor("--settings", "--markdown").stdout
    for name in ("ALGO", "DEBUG", "SOCKET_IFNAME", "IB_DISABLE", "IB_GID_INDEX", "NET_GDR_LEVEL"):
        assert f"- `NCCL_{name}`: " in page.split("NCCL's variables keep their meaning")[1]


def test_faces_have_their_own_defaults():
    rows = {r["variable"]: r for r in json.loads(doctor("--settings", "--json", "--face", "perseus").stdout)}
    assert rows["PACELINE_CODEC"]["value"] == "fp16"
    for arguments in ([], ["--settings"], ["--json"]):
        done = doctor("--face", "nobody", *arguments)
        assert done.returncode == 2 and "face 'nobody' is not one of" in done.stderr and not done.stdout


@pytest.mark.parametrize("face", ["horovod", "perseus"])
def test_the_checks_are_made_under_a_face(face):
    """Where two families' variables contradict each other its own counts, as for the ranks."""
    names = {"horovod": "HOROVOD_GLOO_IFACE", "perseus": "PERSEUS_GLOO_NETWORK_INTERFACE"}
    done = doctor("--json", "--face", face, **dict.fromkeys(names.values(), "nosuchnic"))
    found = {f["subject"]: f["found"] for f in json.loads(done.stdout)}
    assert names[face] in found["interface"] and face in found["settings"]


def test_the_manual_page_is_up_to_date():
    page = doctor("--settings", "--markdown").stdout
    assert (ROOT / "docs" / "settings.md").read_text() == page, (
        "run: build/bin/paceline doctor --settings --markdown >docs/settings.md"
    )
