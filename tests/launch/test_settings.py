"""Settings of the wire and of plans through the whole engine, in real processes: what they change, and right sums."""

import json
import random
import re

import pytest
from conftest import SUMS, WORKER, run
from not_built import expect_one_warning_each, names_and_values


@pytest.fixture
def sums(paceline, python, tmp_path):
    """What each rank of a job of so many found under these settings; the sums are checked in the ranks."""

    def launched(size, ranks_a_node, **settings):
        seed = random.randrange(1 << 30)
        result = run([paceline, "run", "-np", size, "--", python, SUMS, tmp_path, seed, ranks_a_node], **settings)
        assert result.returncode == 0, f"seed {seed}\n{result.stdout}{result.stderr}"
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]

    return launched


@pytest.fixture
def frames(paceline, python, tmp_path):
    """What two ranks have said to each other under these settings, as capture.py has it."""

    def captured(**settings):
        file, seed = tmp_path / "frames", random.randrange(1 << 30)
        command = [paceline, "run", "-np", 2, "--", python, SUMS, tmp_path, seed, 1]
        result = run(["unshare", "--net", python, SUMS.with_name("capture.py"), file, *command], **settings)
        assert result.returncode == 0, f"seed {seed}\n{result.stdout}{result.stderr}"
        return [json.loads(line) for line in file.read_text().splitlines()]

    return captured


def sent(found, memory="private", what="payload_sent"):
    """By all ranks together, as a multiple of the buffer."""
    return sum(one[memory][what] for one in found) / found[0]["bytes"]


@pytest.mark.parametrize("flows", [1, 4])
def test_flows(sums, flows):
    """To each of two other ranks so many connections, and one for control."""
    for found in sums(3, 1, PACELINE_FLOWS=flows):
        assert f"tcp, {flows} flow{'s' if flows > 1 else ''} · " in found["describe"]
        # In a ring a rank sends to its neighbour on one side, by whichever of the flows has room.
        busy = [count for count, _ in found["connections"] if count > 1 << 16]
        assert min(flows, 2) <= len(busy) <= flows, found["connections"]
        assert len(found["connections"]) == 2 * (flows + 1), found["connections"]
        assert sent([found]) == pytest.approx(4 / 3, rel=0.001)


@pytest.mark.parametrize("variable", ["PACELINE_LOG_LEVEL", "HOROVOD_LOG_LEVEL"])
def test_the_log_says_as_much_as_is_asked_for(paceline, python, tmp_path, variable):
    """A warning by default; of each rank how it joined; who else did, and every plan."""
    lines = {
        "warning": r"\[paceline 0\] warning: HOROVOD_AUTOTUNE is known .*",
        "joined": r"\[paceline [01]\] joined as rank [01] of 2 in [\d.]+ s, on node [01] of 2 \(host \S+\), at \S+; .*",
        "who": r"\[paceline 0\] rank [01] is process \d+ on node [01] \(host \S+\), at \S+",
        "plan": r"\[paceline [01]\] a plan for all-reduce of \d+ elements: .+",
    }
    expected = {"error": [0, 0, 0], None: [1, 0, 0], "info": [1, 2, 0], "debug": [1, 2, 2]}
    for level, counts in expected.items():
        asked = {"HOROVOD_AUTOTUNE": 1} | ({variable: level} if level else {})
        result = run([paceline, "run", "-np", 2, "--", python, SUMS, tmp_path, 1, 1], **asked)
        assert result.returncode == 0, result.stdout + result.stderr
        found = {name: len(re.findall(line, result.stderr)) for name, line in lines.items()}
        assert [found[name] for name in ("warning", "joined", "who")] == counts, result.stderr
        assert (found["plan"] > 0) == (level == "debug"), result.stderr


def test_what_only_cuda_tensors_get_is_mentioned_once_by_the_c_abi_too(paceline, python, tmp_path):
    """On rank 0, with the first gradients."""
    asked = {"PACELINE_CODEC": "int8", "PERSEUS_ALLREDUCE_STREAMS": 4}
    result = run([paceline, "run", "-np", 2, "--", python, SUMS, tmp_path, 1, 1], **asked)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.count("warning: ") == 2, result.stderr
    for name, value in asked.items():
        assert result.stderr.count(f"[paceline 0] warning: {name}={value} is built for CUDA tensors; ") == 1, (
            result.stderr
        )


@pytest.mark.parametrize(("checksum", "has_sums"), [("on", True), ("off", False), ("auto", False)])
def test_checksums(frames, checksum, has_sums):
    """Everything that has a payload has its sum beside it on the wire, or nothing has."""
    seen = frames(PACELINE_CHECKSUM=checksum)
    assert {frame["type"] for frame in seen} >= {"eager", "piece"}
    assert {frame["has_sum"] for frame in seen} == {has_sums}
    assert {frame["is_right"] for frame in seen} == ({True, None} if has_sums else {None})


@pytest.mark.parametrize(
    ("asked", "least", "most"), [({}, 1 << 16, 1 << 19), ({"PACELINE_PIECE_BYTES": 8192}, 4096, 8192)]
)
def test_no_message_is_longer_than_a_piece(frames, asked, least, most):
    longest = max(frame["bytes"] for frame in frames(**asked))
    assert least < longest <= most


@pytest.mark.parametrize(("asked", "lends"), [("auto", False), ("0", False), ("1", True)])
def test_who_lends_the_network_its_memory(sums, asked, lends):
    """Between ranks of one machine only those that are told to."""
    assert [found["has_a_long_pipe"] for found in sums(2, 1, PACELINE_ZERO_COPY=asked)] == [lends] * 2


@pytest.mark.parametrize("variable", ["PACELINE_HIERARCHICAL_THRESHOLD", "LIGHT_HIERARCHICAL_THRESHOLD"])
def test_two_levels_only_up_to_the_threshold(paceline, python, tmp_path, variable):
    """70,001 float32 are just short enough, as many float64 and 200,003 float32 are not."""
    asked = {"PACELINE_ALGORITHM": "two_level", variable: 4 * 70_001, "PACELINE_LOG_LEVEL": "debug"}
    result = run([paceline, "run", "-np", 4, "--", python, SUMS, tmp_path, 1, 2], **asked)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        plans = re.findall(rf"\[paceline {rank}\] a plan for all-reduce of (\d+) elements: (\S+)", result.stderr)
        assert set(plans) == {
            ("1", "two-level"),
            ("1000", "two-level"),
            ("70001", "two-level"),
            ("70001", "ring"),
            ("200003", "ring"),
        }, result.stderr


SMALL = """
import array, sys
from paceline import communicator as core
comm, COUNT = core.Communicator(timeout=60), 100_001
mine = array.array("f", [1e-8 * (comm.rank + 1)] * COUNT)
comm.run(core.ALL_REDUCE, dtype=core.DTYPES["float32"], input=mine.buffer_info()[0], output=mine.buffer_info()[0],
         count=COUNT, codec=core.CODEC_SETTINGS, segments=[(7, 0, COUNT)], name="small")
assert len(set(mine)) == 1, mine
sys.stdout.write(f"sum {mine[0] * 1e8:.2f}\\n")
comm.close()
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.0),
        ({"PACELINE_GRADIENT_SCALE": 65536}, 3.0),
        ({"PERSEUS_ALLREDUCE_GRADIENT_SCALE": 65536}, 3.0),
        ({"PACELINE_GRADIENT_SCALE": 1, "PERSEUS_ALLREDUCE_GRADIENT_SCALE": 65536}, 0.0),
    ],
)
def test_scaled_gradients_are_not_lost_in_fp16(paceline, python, tmp_path, settings, expected):
    """Unscaled 1e-8 and 2e-8 are less than half of the least number that fp16 has."""
    (tmp_path / "small.py").write_text(SMALL)
    nodes = "PACELINE_NODE_ID=$RANK exec " + str(python) + f" {tmp_path}/small.py"
    result = run([paceline, "run", "-np", 2, "--", "sh", "-c", nodes], PACELINE_CODEC="fp16", **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    found = [float(text) for text in re.findall(r"sum (\S+)", result.stdout)]
    assert found == [pytest.approx(expected, abs=0.01)] * 2, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("pull", "private", "shared"),
    [("auto", 1, 0), ("mapped", 3, 0), ("process_vm_readv", 0, 0), ("copy", 4, 4)],
)
def test_how_ranks_of_a_node_read_each_other_s_memory(sums, pull, private, shared):
    """How many of the four buffers that a sum sends in a ring of three are copied for it, of private memory and of
    shared. What is read in place is not, nor is a sum that comes back in the slots that brought its last addend."""
    found = sums(3, 3, PACELINE_SHM_PULL=pull)
    for memory, copied in (("private", private), ("shared", shared)):
        assert sent(found, memory) == pytest.approx(4, rel=0.001)
        assert sent(found, memory, "wire_sent") == pytest.approx(copied, abs=0.05)


#: Ranks, ranks a node, settings, what the line at the start says, and by how much the sum of a buffer is more than it.
INNER = [
    # Two groups of two nodes each: half of the buffer inside, a half to and fro between them, half of it inside again.
    (4, 1, {"PACELINE_INNER_SIZE": 2}, "two-level, exact: 4 ranks on 4 nodes, 4 MiB: 2 groups", 4 * 1.5),
    # Dense codecs are for what goes between the groups, whoever has a node to itself.
    (4, 1, {"PACELINE_INNER_SIZE": 2, "PACELINE_CODEC": "fp16"}, "two-level, fp16 between nodes", 4 * 1.25),
    (4, 1, {"PACELINE_INNER_SIZE": 1, "PACELINE_CODEC": "fp16"}, "fp16 between nodes", 4 * 0.75),
    # Two groups on one node; a third rank alone in its group shares its one rail.
    (4, 4, {"PACELINE_INNER_SIZE": 2}, "two-level, exact: 4 ranks on 1 node, 4 MiB: 2 groups", 4 * 1.5),
    (3, 3, {"PACELINE_INNER_SIZE": 2}, "two-level, exact: 3 ranks on 1 node, 4 MiB: 2 groups", 4),
    # Groups that lie across nodes, and one group of all.
    (4, 2, {"PACELINE_INNER_SIZE": 3}, "two-level, exact: 4 ranks on 2 nodes, 4 MiB: 2 groups", 6),
    (4, 2, {"PACELINE_INNER_SIZE": 4, "PACELINE_ALGORITHM": "two_level"}, "PACELINE_ALGORITHM asks for it", 4 * 1.5),
]


@pytest.mark.parametrize(("size", "ranks_a_node", "settings", "said", "buffers"), INNER)
def test_inner_groups(sums, size, ranks_a_node, settings, said, buffers):
    found = sums(size, ranks_a_node, **settings)
    assert all(said in one["describe"] for one in found), found[0]["describe"]
    assert sent(found) == pytest.approx(buffers, rel=0.001)


@pytest.mark.parametrize(("inner", "groups"), [(1, 4), (2, 2)])
def test_top_k_between_inner_groups(sums, inner, groups):
    """Of everything, so that the sums are exact: each entry once more for its place."""
    light = {"LIGHT_TOPK_ALLREDUCE": 1, "LIGHT_2D_ALLREDUCE": 1, "LIGHT_INTRA_SIZE": inner, "LIGHT_TOPK_RATIO": 1}
    light["LIGHT_TOPK_THRESHOLD"] = 0
    found = sums(4, 4, **light)
    assert all(one["describe"].endswith(f"top-k between {groups} groups") for one in found), found[0]["describe"]


DDP = """
import FACE
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
model(torch.full((1, 4), float(rank))).sum().backward()
assert model.module.weight.grad.flatten().tolist() == [(size - 1) / 2] * 4
from paceline._torch.ddp import attachment_of
attachment_of(model)  # raises where the model does not travel through Paceline
print(f"rank {rank} size {size} ok", flush=True)
dist.destroy_process_group()
"""


TIACC = "paceline.compat.tiacc_training as tdist; tdist.init_tiacc_training()"


@pytest.mark.parametrize("face", ["C ABI", "paceline.torch", "paceline.compat.perseus", TIACC])
def test_what_is_known_but_not_built_is_mentioned_once_on_rank_0(paceline, python, tmp_path, face):
    """All of those names at once, and the job works."""
    (tmp_path / "script.py").write_text(DDP.replace("FACE", face))
    script = WORKER if face == "C ABI" else tmp_path / "script.py"
    asked = names_and_values()
    result = run([paceline, "run", "-np", 3, "--", python, script], **asked)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(3):
        assert f"rank {rank} size 3 " in result.stdout, result.stdout + result.stderr
    expect_one_warning_each(asked, result.stdout + result.stderr)


#: What makes a rank's communicator; DDP's by its model.
MAKES = {
    "C ABI": "from paceline import communicator; communicator.Communicator(timeout=60)",
    "paceline.torch": (
        "import paceline.torch, torch, torch.distributed as dist; dist.init_process_group('gloo'); "
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))"
    ),
}
STOPPED = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    MAKES
except Exception as error:
    (folder / "new").mkdir(exist_ok=True)
    mine = folder / "new" / os.environ["RANK"]
    mine.write_text(f"{type(error).__name__}: {error}")
    mine.rename(folder / os.environ["RANK"])
    end = time.monotonic() + 20  # who leaves first has the others ended
    while time.monotonic() < end and not all((folder / str(r)).exists() for r in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    raise
"""
WRONG = {
    "unknown": ({"PACELINE_CODECS": "fp16"}, "PACELINE_CODECS is not a setting; did you mean PACELINE_CODEC?"),
    "like nothing": ({"LIGHT_WEIGHT_CHAMPIONSHIP": 1}, "LIGHT_WEIGHT_CHAMPIONSHIP is not a setting; unset it"),
    "out of range": (
        {"LIGHT_TOPK_RATIO": 1.5},
        "LIGHT_TOPK_RATIO='1.5' is not above 0 and at most 1; set it so, or unset it",
    ),
    "two names of one": (
        {"HOROVOD_HIERARCHICAL_ALLREDUCE": 1, "LIGHT_2D_ALLREDUCE": 1, "PERSEUS_ALLREDUCE_MODE": 0},
        "LIGHT_2D_ALLREDUCE and PERSEUS_ALLREDUCE_MODE contradict each other (two_level against ring); "
        "unset one of them",
    ),
    "codec and plan": (
        {"PACELINE_CODEC": "fp16", "PACELINE_ALGORITHM": "tree"},
        "PACELINE_CODEC asks for fp16 and PACELINE_ALGORITHM for the plan 'tree', which carries elements as they are; "
        "unset one of them",
    ),
}


@pytest.mark.parametrize("face", MAKES)
@pytest.mark.parametrize(("settings", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_stops_every_rank(paceline, python, tmp_path, face, settings, sentence):
    """By an error that names the variable and says what to do."""
    (tmp_path / "script.py").write_text(STOPPED.replace("MAKES", MAKES[face]))
    result = run([paceline, "run", "-np", 2, "--", python, tmp_path / "script.py", tmp_path], **settings)
    assert result.returncode != 0, result.stdout + result.stderr
    for rank in range(2):
        said = tmp_path / str(rank)
        assert said.exists(), f"rank {rank} went on\n{result.stdout}{result.stderr}"
        assert said.read_text().startswith(f"InvalidArgumentError: {sentence}"), said.read_text()
    assert sentence in result.stderr, result.stderr


SPAWNED = """
import torch.multiprocessing as mp
from paceline import communicator

def main(rank, size):
    communicator.Communicator(rank=rank, size=size, timeout=60).close()

if __name__ == "__main__":
    mp.spawn(main, (3,), 3)
"""


@pytest.mark.parametrize("image", [{}, {"RANK": 0, "WORLD_SIZE": 1}])
def test_whose_rank_0_speaks_where_the_caller_says_who_is_who(python, free_port, tmp_path, image):
    """Whatever an image has set for all processes."""
    (tmp_path / "script.py").write_text(SPAWNED)
    place = {"MASTER_ADDR": "127.0.0.1", "PACELINE_PORT": free_port}
    result = run([python, tmp_path / "script.py"], HOROVOD_CYCLE_TIME="0", **place, **image)
    assert result.returncode == 0, result.stdout + result.stderr
    expect_one_warning_each(["HOROVOD_CYCLE_TIME"], result.stdout + result.stderr)


NO_LAUNCHER = """
import sys
import paceline.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def step(rank, group=None):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False), process_group=group)
    model(torch.full((1, 4), float(rank))).sum().backward()
    return model.module.weight.grad.flatten().tolist()

def main(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    if rank:
        assert step(rank, group) == [1.5] * 4
    assert step(rank) == [1.0] * 4
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (int(sys.argv[1]),), 3)
"""


def test_whose_rank_0_speaks_where_no_launcher_says_who_is_who(python, free_port, tmp_path):
    """The job's, not that of a group of some of its ranks, which is the first that they make."""
    (tmp_path / "script.py").write_text(NO_LAUNCHER)
    result = run([python, tmp_path / "script.py", free_port], HOROVOD_CYCLE_TIME="0")
    assert result.returncode == 0, result.stdout + result.stderr
    expect_one_warning_each(["HOROVOD_CYCLE_TIME"], result.stdout + result.stderr)
    told = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("paceline: ")]
    assert len(told) == 1 and told[0].startswith("paceline: 3 ranks"), told
