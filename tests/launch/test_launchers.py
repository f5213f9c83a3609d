"""The same small program under every launcher, as real processes on this machine."""

import re
import secrets
import socket
import subprocess
import uuid

import pytest
from conftest import ROOT, WORKER, clean_environment, expect_ranks, run


def test_a_process_on_its_own(python):
    expect_ranks(run([python, WORKER]), 1)


@pytest.mark.parametrize("size", [2, 5])
def test_paceline_run(paceline, python, size):
    expect_ranks(run([paceline, "run", "-np", size, python, WORKER]), size)


def test_destroy_and_make_again(paceline, python):
    expect_ranks(run([paceline, "run", "-np", 3, "--", python, WORKER, "--rounds", 4]), 3)


@pytest.mark.parametrize("wire", ["auto", "tcp"])
def test_forked_children_with_a_communicator_of_their_own(paceline, python, wire):
    result = run([paceline, "run", "-np", 3, "--", python, WORKER.with_name("forked.py")], PACELINE_WIRE=wire)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"{who} {r} of 3 ok" for who in ("child", "parent") for r in range(3)]


def test_open_mpi(python):
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", 4, python, WORKER]
    expect_ranks(run(command), 4)


def test_open_mpi_again_in_one_process(python):
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", 2, python, WORKER, "--rounds", 3]
    expect_ranks(run(command), 2)


def test_open_mpi_s_transport_key_authenticates(python):
    """A rank that holds another key than mpirun gave the others does not get in."""
    other = "-".join(secrets.token_hex(8) for _ in range(2))  # as mpirun writes them
    script = (
        f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export OMPI_MCA_orte_precondition_transports={other}; '
        f"exec {python} {WORKER}"
    )
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", 2, "sh", "-c", script]
    result = run(command)
    assert result.returncode != 0, result.stdout
    assert "UnauthenticatedError" in result.stderr and "does not hold the secret" in result.stderr, result.stderr
    assert other not in result.stderr


def test_mpich(python):
    expect_ranks(run(["mpirun.mpich", "-np", 4, python, WORKER]), 4)


def test_mpich_again_in_one_process(python):
    expect_ranks(run(["mpirun.mpich", "-np", 2, python, WORKER, "--rounds", 3]), 2)


def test_the_secret_in_mpichs_space_authenticates(python):
    """A rank that does not hold what rank 0 put there does not get in."""
    forger = WORKER.with_name("pmi_forger.py")
    worker = f"{python} {WORKER} --timeout 5"  # rank 0 goes on waiting for one that holds it
    script = f'[ "$PMI_RANK" = 1 ] && exec {python} {forger} {worker}; exec {worker}'
    result = run(["mpirun.mpich", "-np", 2, "sh", "-c", script])
    assert "a secret was changed on its way" in result.stderr, result.stderr
    assert result.returncode != 0, result.stdout
    assert "UnauthenticatedError" in result.stderr and "does not hold the secret" in result.stderr, result.stderr
    assert " ok" not in result.stdout, result.stdout


MPIRUN = [["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"], ["mpirun.mpich"]]


@pytest.mark.parametrize("mpirun", MPIRUN, ids=["Open MPI", "MPICH"])
@pytest.mark.parametrize("variable", ["PACELINE_USE_DDP_LAUNCHER", "PERSEUS_USE_DDP_LAUNCHER"])
def test_which_launcher_comes_first_where_torchs_variables_are_there_too(python, mpirun, variable):
    """As in an image that sets them: torch's, which make every process a job of its own, or mpirun's, as one asks."""
    torchs = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    of_mpirun, of_torch = [f"rank {r} size 2 nodes 1 ok" for r in (0, 1)], ["rank 0 size 1 nodes 1 ok"] * 2
    for first, lines in (("0", of_mpirun), ("1", of_torch)):
        result = run([*mpirun, "-np", 2, python, WORKER], **torchs, **{variable: first})
        assert result.returncode == 0, result.stderr
        assert sorted(re.findall(r"rank \d size \d nodes \d ok", result.stdout)) == lines, result.stdout


def torchrun(python, port, *more, address="127.0.0.1"):
    return [python, "-m", "torch.distributed.run", "--nproc_per_node", 3, "--master_addr", address,
            "--master_port", port, *more]  # fmt: skip


def test_torchrun(python, free_port, rendezvous_port):
    result = run([*torchrun(python, free_port), WORKER], PACELINE_PORT=rendezvous_port)
    expect_ranks(result, 3)


@pytest.mark.parametrize("joined", [[], ["--joined"]])
def test_torchrun_restart(python, free_port, rendezvous_port, tmp_path, joined):
    mark = tmp_path / "failed-once"
    command = [*torchrun(python, free_port, "--max_restarts", 1), WORKER, "--fail-once", mark, *joined]
    result = run(command, PACELINE_PORT=rendezvous_port)
    assert mark.exists()
    expect_ranks(result, 3)


def ranks_by_hand(python, environments, timeout=60, program=(WORKER,)):
    """Real processes with the variables that a launcher which can't run here would set."""
    processes = [
        subprocess.Popen(
            [python, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT
        )
        for env in environments
    ]
    try:
        return [(p.communicate(timeout=timeout)[0], p.returncode) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()


def test_slurms_variables(python, free_port):
    results = ranks_by_hand(
        python,
        [
            clean_environment(
                SLURM_PROCID=r,
                SLURM_NTASKS=3,
                SLURM_STEP_NUM_TASKS=3,
                SLURM_LOCALID=r,
                SLURM_JOB_ID=41,
                SLURM_STEP_ID=0,
                SLURM_STEP_NODELIST="localhost",
                PACELINE_PORT=free_port,
            )
            for r in range(3)
        ],
    )
    for rank, (text, code) in enumerate(results):
        assert code == 0 and f"rank {rank} size 3 nodes 1 ok" in text, text


def test_a_host_that_takes_its_own_name_for_loopback(python, free_port, tmp_path):
    """As Debian's installer writes /etc/hosts: rank 0 must be where the other hosts look for it."""
    address = "198.51.100.7"
    (tmp_path / "hosts0").write_text("127.0.0.1 localhost\n127.0.1.1 node0\n")
    (tmp_path / "hosts1").write_text(f"127.0.0.1 localhost\n{address} node0\n")
    rank = "mount --bind {folder}/hosts{r} /etc/hosts && SLURM_PROCID={r} SLURM_NODEID={r} exec {python} {worker}"
    ranks = [rank.format(folder=tmp_path, r=r, python=python, worker=WORKER) for r in (0, 1)]
    script = (
        f"ip link set lo up && ip addr add {address}/32 dev lo && "
        f"{{ unshare -m sh -c '{ranks[0]}' & unshare -m sh -c '{ranks[1]}'; code=$?; wait $! && exit $code; }}"
    )
    result = run(
        ["unshare", "-n", "sh", "-c", script],
        SLURM_STEP_NUM_TASKS=2,
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        SLURM_LOCALID=0,
        SLURM_JOB_ID=43,
        SLURM_STEP_ID=0,
        SLURM_STEP_NODELIST="node[0-1]",
        PACELINE_PORT=free_port,
        PACELINE_SECRET="0123456789abcdef0123456789abcdef",
    )
    expect_ranks(result, 2)


def test_ranks_under_another_kernel_are_on_another_node(paceline, python, tmp_path):
    """Told apart by the boot id alone: rank 1 shares rank 0's host name, network and memory."""
    (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")
    elsewhere = f"mount --bind {tmp_path}/boot_id /proc/sys/kernel/random/boot_id && exec {python} {WORKER}"
    script = f"""[ "$PACELINE_RANK" = 1 ] && exec unshare --mount sh -c '{elsewhere}'; exec {python} {WORKER}"""
    result = run([paceline, "run", "-np", 2, "--", "sh", "-c", script])
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank} size 2 nodes 2 ok" in result.stdout, result.stdout + result.stderr


def test_contradictory_environment_is_named(python):
    result = run([python, WORKER], RANK=4, WORLD_SIZE=4)
    assert result.returncode != 0
    assert "RANK=4" in result.stderr and "WORLD_SIZE=4" in result.stderr, result.stderr


def test_a_rank_that_never_comes_is_named(python, free_port):
    environment = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    script = (
        "from paceline.communicator import Communicator\n"
        "try:\n  Communicator(timeout=2)\nexcept Exception as e:\n  print(type(e).__name__, e)\n"
    )
    processes = [
        subprocess.Popen(
            [python, "-c", script], stdout=subprocess.PIPE, text=True, env=clean_environment(RANK=r, **environment)
        )
        for r in (0, 1)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=60)
        assert "rank 2 of 3 never came" in text, text


#: Some rank is started and does not come; the others say what they wait for.
PATIENCE = """
import os, sys
from paceline import _launch
from paceline.communicator import Communicator
try:
    WAIT
except Exception as e:
    os.write(1, f"{type(e).__name__} {e}\\n".encode())  # whole lines: mpirun splices what ranks print
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("wait", "missing", "settings"),
    [
        ("Communicator(timeout=5)", 3, {}),
        ("Communicator(timeout=5)", 0, {"PACELINE_SECRET": "0123456789abcdef0123456789abcdef"}),
        ("_launch.supply_environment()", 3, {"PACELINE_START_TIMEOUT": 5}),
    ],
)
@pytest.mark.parametrize("mpirun", MPIRUN, ids=["Open MPI", "MPICH"])
def test_a_rank_that_never_comes_under_mpirun_is_named(python, mpirun, wait, missing, settings):
    """Although nothing that ranks put in the launcher's space can be read until all of them have come."""
    script = 'if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = "$1" ]; then exec sleep 60; fi; exec "$2" -c "$3"'
    program = PATIENCE.replace("WAIT", wait)
    command = [*mpirun, "-np", 4, "sh", "-c", script, "sh", missing, python, program]
    lines = [line for line in run(command, **settings).stdout.splitlines() if "Error" in line]
    assert lines  # an mpirun ends all as soon as one of them has given up
    for line in lines:
        assert line.startswith(f"TimeoutError after 5 s rank {missing} of 4 never came"), line


def test_who_serves_is_named_where_nobody_can_be_asked_for_the_others(python, free_port):
    environment = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    program = PATIENCE.replace("WAIT", "Communicator(timeout=2)")
    ranks = [clean_environment(RANK=r, **environment) for r in (1, 2)]
    for text, _ in ranks_by_hand(python, ranks, program=("-c", program)):
        assert text.startswith("TimeoutError after 2 s nobody can say which of 3 ranks have come: tcp://127."), text
        assert "can't be reached: Connection refused. Rank 0 or `paceline run`, which serves it, has not come" in text
        assert "rank 1" not in text and "rank 2" not in text, text


MP_SPAWN = """
import sys, torch.multiprocessing as mp
sys.path.insert(0, {tests!r})
import worker
from paceline import communicator

def main(rank, size):
    comm = communicator.Communicator(rank=rank, size=size, timeout=60)
    worker.all_reduce(comm, 1000)
    print(f"rank {{comm.rank}} size {{comm.size}} nodes {{comm.identity.node_count}} ok", flush=True)
    comm.close()

if __name__ == "__main__":
    mp.spawn(main, (3,), 3)
"""


def test_mp_spawn(python, free_port, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(MP_SPAWN.format(tests=str(WORKER.parent)))
    result = run([python, script], MASTER_ADDR="127.0.0.1", PACELINE_PORT=free_port)
    expect_ranks(result, 3)


LAUNCH = """
from paceline import _launch
_launch.supply_environment()
import os, pathlib, sys
e = os.environ
pathlib.Path(sys.argv[1], e["RANK"]).write_text(
    f"rank {e['RANK']} of {e['WORLD_SIZE']} local {e['LOCAL_RANK']} at {e['MASTER_ADDR']}:{e['MASTER_PORT']}")
"""


@pytest.mark.parametrize("mpirun", MPIRUN)
def test_torchs_variables_under_plain_mpirun(python, mpirun, tmp_path):
    # Through files: mpirun may splice the lines that ranks print at the same time.
    result = run([*mpirun, "-np", 3, python, "-c", LAUNCH, tmp_path])
    assert result.returncode == 0, result.stdout + result.stderr
    lines = sorted(path.read_text() for path in tmp_path.iterdir())
    assert [line.split(" at ")[0] for line in lines] == [f"rank {r} of 3 local {r}" for r in range(3)]
    places = {line.split(" at ")[1] for line in lines}
    assert len(places) == 1, places
    host, port = places.pop().rsplit(":", 1)
    assert host and 0 < int(port) < 65536


DDP = """
import paceline.torch
import os, pathlib, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.randn(3, 4)).sum().backward()
from paceline._torch.ddp import attachment_of
attachment_of(model)  # raises where the model does not travel through Paceline
gradient = model.module.weight.grad.flatten().tolist()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{dist.get_world_size()} {gradient}")
dist.destroy_process_group()
"""


FORGED = """
import os, torch.distributed as dist
if os.environ["RANK"] == "1":
    as_it_is = dist.PrefixStore.get
    def get(store, key):
        value = as_it_is(store, key)
        if not key.endswith("/secret"):
            return value
        print("a secret was changed on its way", flush=True)
        return bytes([value[0] ^ 1]) + value[1:]
    dist.PrefixStore.get = get
"""


def test_the_secret_in_torchruns_store_authenticates(python, free_port, tmp_path):
    """A rank that does not hold what rank 0 put there does not get in."""
    (tmp_path / "script.py").write_text(FORGED + DDP)
    (tmp_path / "out").mkdir()
    result = run([*torchrun(python, free_port), tmp_path / "script.py", tmp_path / "out"])
    assert "a secret was changed on its way" in result.stdout, result.stdout + result.stderr
    assert result.returncode != 0 and not list((tmp_path / "out").iterdir()), result.stderr
    assert "UnauthenticatedError" in result.stderr and "does not hold the secret" in result.stderr, result.stderr


def test_a_torch_script_does_not_need_paceline_s_port(python, rendezvous_port, free_port, tmp_path):
    """With torch's variables set by hand: it meets in the store that torch makes."""
    by_hand = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "PACELINE_PORT": rendezvous_port}
    with socket.create_server(("127.0.0.1", rendezvous_port)):
        environments = [clean_environment(RANK=rank, LOCAL_RANK=rank, **by_hand) for rank in range(2)]
        for text, code in ranks_by_hand(python, environments, program=("-c", DDP, tmp_path)):
            assert code == 0, text
    expect_same_gradients(tmp_path, 2)


def expect_same_gradients(folder, size):
    texts = [path.read_text() for path in folder.iterdir()]
    assert len(texts) == size and len(set(texts)) == 1, texts
    assert texts[0].startswith(f"{size} ["), texts


@pytest.mark.parametrize("mpirun", MPIRUN)
def test_a_script_for_torchs_launcher_under_plain_mpirun(python, mpirun, tmp_path):
    result = run([*mpirun, "-np", 2, python, "-c", DDP, tmp_path])
    assert result.returncode == 0, result.stdout + result.stderr
    expect_same_gradients(tmp_path, 2)


IMAGES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": 1}  # fmt: skip
#: What a process that a rank starts makes of torch's variables, on import of the same face.
CHILDS = """
import json, os, subprocess, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
own = [os.environ[name] for name in names]
childs = f"import FACE, json, os; print(json.dumps([os.environ[name] for name in {names}]))"
for _ in range(2):
    assert json.loads(subprocess.check_output([sys.executable, "-c", childs], timeout=60)) == own
assert own[0] == own[2] and own[1] == own[3] == "2", own
"""


@pytest.mark.parametrize("mpirun", MPIRUN, ids=["Open MPI", "MPICH"])
@pytest.mark.parametrize("variable", ["PACELINE_USE_DDP_LAUNCHER", "PERSEUS_USE_DDP_LAUNCHER"])
@pytest.mark.parametrize("face", ["paceline.torch", "paceline.compat.perseus"])
def test_which_launcher_comes_first_for_a_torch_script(python, mpirun, variable, face, tmp_path):
    """In an image that sets torch's variables. What a rank starts in its turn keeps what the rank has."""
    script = DDP.replace("dist.destroy_process_group()", CHILDS + "dist.destroy_process_group()")
    script = script.replace("paceline.torch", face).replace("FACE", face)
    result = run([*mpirun, "-np", 2, python, "-c", script, tmp_path], **IMAGES, **{variable: 0})
    assert result.returncode == 0, result.stdout + result.stderr
    expect_same_gradients(tmp_path, 2)
    kept = f"import {face}, os; assert all(os.environ[name] == str(value) for name, value in {IMAGES}.items())"
    result = run([*mpirun, "-np", 2, python, "-c", kept], **IMAGES, **{variable: 1})
    assert result.returncode == 0, result.stdout + result.stderr


OFF = DDP.replace("import paceline.torch", "import FACE").replace(
    "attachment_of(model)  # raises where the model does not travel through Paceline",
    """
try:
    attachment_of(model)
    raise AssertionError("it travels through Paceline")
except communicator.UnsupportedError:
    pass
assert not communicator.open_communicators()
assert "_paceline_patched" not in vars(torch.nn.parallel.DistributedDataParallel)
""",
)
# A thread of torch's own Gloo, which trains here, may end the process by std::terminate() while Python ends.
OFF += "import time; time.sleep(1)\n"


@pytest.mark.parametrize(
    ("face", "wrong"),
    [("paceline.torch", {}), ("paceline.compat.perseus", {"PACELINE_TOPK_RATIO": 7, "PERSEUS_NO_SUCH_NAME": 1})],
)
@pytest.mark.parametrize("mpirun", MPIRUN, ids=["Open MPI", "MPICH"])
def test_switched_off_a_script_for_torchs_launcher_still_starts_under_plain_mpirun(
    python, mpirun, wrong, face, tmp_path
):
    """With torch's variables from us, and nothing else of ours: no setting is looked at."""
    script = "from paceline import communicator\n" + OFF.replace("FACE", face)
    result = run([*mpirun, "-np", 2, python, "-c", script, tmp_path], PACELINE_DISABLE=1, **wrong)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "paceline" not in result.stdout + result.stderr
    expect_same_gradients(tmp_path, 2)


@pytest.mark.parametrize(("switch", "starts"), [({"PACELINE_DISABLE": 1}, True), ({}, False)])
def test_switched_off_no_library_is_needed(python, tmp_path, switch, starts):
    """A script that has torch's variables from elsewhere goes on."""
    script = "import paceline.torch, sys, pathlib; pathlib.Path(sys.argv[1]).touch()"
    mark = tmp_path / "imported"
    command = [*MPIRUN[0], "-np", 1, python, "-c", script, mark]
    result = run(command, PACELINE_LIBRARY=tmp_path / "none.so", **switch)
    assert mark.exists() == starts == (result.returncode == 0), result.stderr
    assert ("LibraryNotFoundError" in result.stderr) != starts, result.stderr


def test_a_script_for_torchs_launcher_under_srun(python, free_port, tmp_path):
    processes = [
        subprocess.Popen(
            [python, "-c", DDP, tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=clean_environment(
                SLURM_PROCID=r,
                SLURM_NTASKS=2,
                SLURM_STEP_NUM_TASKS=2,
                SLURM_LOCALID=r,
                SLURM_JOB_ID=42,
                SLURM_STEP_ID=0,
                SLURM_STEP_NODELIST="localhost",
                PACELINE_PORT=free_port,
            ),
        )
        for r in range(2)
    ]
    try:
        for process in processes:
            text, _ = process.communicate(timeout=60)
            assert process.returncode == 0, text
    finally:
        for process in processes:
            process.kill()
            process.wait()
    expect_same_gradients(tmp_path, 2)
