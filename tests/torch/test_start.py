"""One line more in an unchanged script, by every way of starting it; other products' import names."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
from ranks import free_port
from support import HERE, MODERN, ROOT, SIMULATED, Launch, as_in_a_wheel, environment

SCRIPT = str(HERE / "script_plain.py")
# Debian's torch 1.13 on Python 3.11 can't start a job whose redirects are one number: a mapping works.
REDIRECTS = [] if MODERN else ["-r", "9:1", "-t", "9:1"]
TIACC = "import tiacc_training.torch.distributed as tdist; tdist.init_tiacc_training()"


def start(command, target=None, **extra):
    env = environment(**extra)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if target:
        env["PYTHONPATH"] += os.pathsep + str(target)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def torchrun(*arguments, module="torch.distributed.run", ranks=2):
    base = [sys.executable, "-m", module, "--nproc_per_node", str(ranks), "--master_port", str(free_port()), *REDIRECTS]
    return [*base, *arguments]


def forked(line="import paceline.torch", script="script_plain.py", ranks=2, arguments=(), **extra):
    """The same where no launcher and no order of imports matters: ranks see what torchrun sets, and start at once."""
    done = Launch(script, ranks, arguments, timeout=120, SCRIPT_IMPORT=line, **extra).end()
    failed = [status for status in done.statuses if status != "0"]
    return (int(failed[0] or -1) if failed else 0), "".join(done.logs) + done.output


def expect(code, output, hook, backend="gloo"):
    assert code == 0, output
    for rank in (0, 1):
        assert f"rank {rank} of 2 hook '{hook}' backend '{backend}'" in output, output


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A folder with the packages perseus and tiacc_training, installed as a user does."""
    folder = tmp_path_factory.mktemp("compat")
    for name in ("perseus", "tiacc_training"):
        code, output = start([sys.executable, "-m", "paceline.compat", "--install", name, "--target", str(folder)])
        assert code == 0, output
    return folder


def test_torchrun():
    code, output = start(torchrun(SCRIPT), SCRIPT_IMPORT="import paceline.torch")
    expect(code, output, "paceline")
    assert output.count("paceline: 2 ranks") == 1, output


NODE_PER_RANK = "os.environ['PACELINE_NODE_ID'] = 'node ' + os.environ['RANK']; import paceline.torch"


@pytest.mark.parametrize(
    ("line", "codec", "where", "way"),
    [
        ("import paceline.torch", "none", "1 node", "shared memory( \\(.+\\))? · direct, exact"),
        (NODE_PER_RANK, "none", "2 nodes", "tcp, \\d+ flows? · ring, exact"),
        (NODE_PER_RANK, "fp16", "2 nodes", "tcp, \\d+ flows? · direct, fp16 between nodes"),
    ],
    ids=["one node", "two nodes", "two nodes, fp16"],
)
def test_the_line_at_the_start(line, codec, where, way):
    """How many ranks on how many nodes, started by what; the wire; the plan, the codec, and why this plan."""
    code, output = forked(line, PACELINE_CODEC=codec)
    expect(code, output, "paceline")
    said = [text for text in output.splitlines() if text.startswith("paceline: ")]
    why = f"2 ranks on {where}, 4 MiB: \\w.+"
    assert len(said) == 1, output
    asked = "\\(PACELINE_CODEC\\)"
    assert re.fullmatch(f"paceline: 2 ranks on {where} \\(torch's launcher\\) · {way} {asked}: {why}", said[0]), said


BY_IMPORT = "import paceline.torch"
BY_NAME = "" if MODERN else BY_IMPORT  # newer torch finds a wheel's backend by itself


@pytest.mark.parametrize(("line", "quiet"), sorted({(BY_IMPORT, "0"), (BY_NAME, "0"), (BY_NAME, "1")}))
def test_a_script_that_names_the_backend_says_the_line_once(tmp_path, line, quiet):
    """As it makes the process group, on rank 0, and again for no group; not at all where that is asked for."""
    if not line:
        as_in_a_wheel(tmp_path)
    command = torchrun(str(HERE / "script_group.py"), ranks=3)
    code, output = start(command, tmp_path, SCRIPT_IMPORT=line, PACELINE_QUIET=quiet)
    assert code == 0 and all(f"rank {rank} of 3 is done" in output for rank in range(3)), output
    said = [text for text in output.splitlines() if "paceline" in text]
    assert len(said) == (quiet == "0"), output
    if said:
        way = "3 ranks on 1 node \\(torch's launcher\\) · shared memory.* · direct, exact: "
        assert re.fullmatch(f"paceline: {way}3 ranks on 1 node, 4 MiB: .+", said[0]), said


def test_quiet():
    code, output = forked(PACELINE_QUIET="1")
    expect(code, output, "paceline")
    assert "paceline:" not in output, output


def test_a_setting_without_effect_is_warned_of_once():
    code, output = forked(HOROVOD_CYCLE_TIME="0")
    expect(code, output, "paceline")
    assert output.count("HOROVOD_CYCLE_TIME is known but has no effect yet") == 1, output


#: What is wrong, and the sentence that says what to do.
WRONG = [
    ({"PACELINE_TOPK_RATIOS": "0.1"}, "PACELINE_TOPK_RATIOS is not a setting; did you mean PACELINE_TOPK_RATIO?"),
    (
        {"PACELINE_TOPK_RATIO": "7"},
        "PACELINE_TOPK_RATIO='7' is not above 0 and at most 1; set it so, or unset it",
    ),
    (
        {"PACELINE_SECRET": "0123456789abcdef", "PACELINE_SECRET_FILE": "/dev/null"},
        "PACELINE_SECRET and PACELINE_SECRET_FILE are both set; unset one of them",
    ),
]
WRONG_IDS = ["unknown", "out of range", "contradictory"]


def alone(backend="gloo", **extra):
    """A job of one rank, whose models keep torch's way."""
    return forked("", "script_alone.py", 1, [backend], **extra)


@pytest.mark.parametrize(("settings", "sentence"), WRONG, ids=WRONG_IDS)
def test_a_wrong_setting_ends_a_job_of_one_rank(settings, sentence):
    code, output = alone(**settings)
    assert code != 0 and "trained" not in output, output
    assert f"InvalidArgumentError: {sentence}" in output, output
    code, output = alone(**settings, PACELINE_DISABLE="1")
    assert code == 0 and output == "trained\n", output


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize(("switch", "times"), [({}, 1), ({"PACELINE_QUIET": "1"}, 0)])
def test_a_setting_without_effect_is_warned_of_once_by_one_rank(backend, switch, times):
    """Also where its process group has warned before the model does."""
    code, output = alone(backend, HOROVOD_CYCLE_TIME="0", **switch)
    assert code == 0 and "trained" in output, output
    warning = "[paceline 0] warning: HOROVOD_CYCLE_TIME is known but has no effect yet; the job goes on without it"
    assert output.count("HOROVOD_CYCLE_TIME") == times == output.count(warning), output


def test_a_setting_without_effect_is_not_warned_of_when_switched_off():
    code, output = alone(HOROVOD_CYCLE_TIME="0", PACELINE_DISABLE="1")
    assert code == 0 and output == "trained\n", output


#: What only CUDA tensors get, by the variable that asks, and what is said of it where gradients are the CPU's.
LANES = "it changes nothing for those of the CPU, whose pieces overtake each other anyway"
CUDA_ALONE = {
    "PACELINE_CODEC=int8": "those of the CPU travel exactly: use fp16 or topk for them",
    "PACELINE_TOPK_MOMENTUM=0.9": "those of the CPU travel by top-k without a momentum: leave it to the optimizer",
    "PACELINE_LANES=3": LANES,
    "PERSEUS_ALLREDUCE_STREAMS=3": LANES,
    "TIACC_TRAINING_NUM_NCCL_STREAMS=3": LANES,
    "HOROVOD_NUM_NCCL_STREAMS=3": LANES,
}


@pytest.mark.parametrize(
    ("asked", "beside"),
    [
        (("PACELINE_CODEC=int8", "PERSEUS_ALLREDUCE_STREAMS=3"), {}),
        (("PACELINE_TOPK_MOMENTUM=0.9", "PACELINE_LANES=3"), {"LIGHT_TOPK_ALLREDUCE": "1"}),
        (("TIACC_TRAINING_NUM_NCCL_STREAMS=3",), {}),
        (("HOROVOD_NUM_NCCL_STREAMS=3",), {}),
    ],
)
def test_what_only_cuda_tensors_get_is_warned_of_where_gradients_are_the_cpus(asked, beside):
    settings = {**beside, **dict(pair.split("=") for pair in asked)}
    code, output = forked(**settings)
    expect(code, output, "paceline")
    assert output.count("warning: ") == len(asked), output
    for pair in asked:
        warning = f"[paceline 0] warning: {pair} is built for CUDA tensors; {CUDA_ALONE[pair]}"
        assert output.count(warning) == 1, output
    if "PACELINE_CODEC=int8" in asked:
        assert "exact (PACELINE_CODEC=int8 is for CUDA tensors): 2 ranks on 1 node" in output, output


@pytest.mark.parametrize(
    "settings", [{"PACELINE_CODEC": "fp16", "PACELINE_LANES": "1"}, {"PACELINE_LANES": "3", "PACELINE_QUIET": "1"}]
)
def test_nothing_is_warned_of_where_nothing_is_lost_or_nobody_wants_to_hear(settings):
    code, output = forked(**settings)
    expect(code, output, "paceline")
    assert "warning: " not in output, output


@pytest.mark.parametrize(
    "settings",
    [
        {"PACELINE_CODEC": "int8", "HOROVOD_NUM_NCCL_STREAMS": "3"},
        {"PACELINE_CODEC": "topk", "PACELINE_TOPK_MOMENTUM": "0.9", "PACELINE_LANES": "3"},
    ],
)
def test_what_cuda_tensors_get_is_not_warned_of_where_they_do(settings):
    assert SIMULATED.exists(), f"{SIMULATED} is not built: ./dev build"
    done = Launch("simulated_step.py", 2, timeout=60, **settings).end()
    for log in done.logs:
        assert "trained by the path for CUDA tensors" in log and "warning: " not in log, done.everything()


@pytest.mark.parametrize("most", ["0", "4096"])
def test_top_k_is_named_where_only_long_parameters_take_it(most):
    """Buckets are parameters then, or those alone that are longer than a bucket."""
    wishes = {"LIGHT_TOPK_ALLREDUCE": "1", "HOROVOD_FUSION_THRESHOLD": most}
    code, output = forked(**wishes)
    expect(code, output, "paceline")
    assert "top-k 1 % from 1048576 bytes on" in output, output


@pytest.mark.parametrize(
    ("wishes", "groups"),
    [
        ({"LIGHT_TOPK_ALLREDUCE": "1", "LIGHT_2D_ALLREDUCE": "1"}, 2),  # exact inside a node, top-k between nodes
        ({"LIGHT_TOPK_ALLREDUCE": "1"}, 4),  # every rank's own top-k
    ],
)
def test_light_switches_on_two_nodes_of_two_ranks(wishes, groups):
    nodes = "import os; os.environ['PACELINE_NODE_ID'] = f\"node {int(os.environ['RANK']) // 2}\"; "
    code, output = forked(nodes + "import paceline.torch", ranks=4, **wishes)
    lines = [line for line in output.splitlines() if line.startswith("paceline:")]
    assert code == 0 and len(lines) == 1, output
    assert lines[0].startswith("paceline: 4 ranks on 2 nodes"), output
    assert "sparse, top-k 1 %" in lines[0] and lines[0].endswith(f"top-k between {groups} groups"), output


@pytest.mark.parametrize("line", ["import paceline.torch", "import perseus", TIACC])
def test_switched_off(names, line):
    """Also where the face would make Paceline carry the script's own collectives."""
    target = os.pathsep.join([str(HERE / "at_exit"), str(names)])
    untouched = "import torch.distributed as d; assert not hasattr(d.destroy_process_group, '_paceline_patched')"
    code, output = start(torchrun(SCRIPT), target, SCRIPT_IMPORT=f"{line}; {untouched}", PACELINE_DISABLE="1")
    assert code == 0 and "paceline" not in output, output
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 2 hook '\w*' backend 'gloo'", output), output


def test_torch_distributed_launch():
    command = torchrun("--use_env", SCRIPT, module="torch.distributed.launch")
    expect(*start(command, SCRIPT_IMPORT="import paceline.torch"), "paceline")


def test_spawn():
    command = [sys.executable, SCRIPT, "spawn", str(free_port())]
    expect(*start(command, SCRIPT_IMPORT="import paceline.torch"), "paceline")


def test_perseus_before_torch(names):
    code, output = start(torchrun(SCRIPT), names, SCRIPT_IMPORT="import perseus; assert 'torch' not in sys.modules")
    expect(code, output, "paceline")


def test_perseus_has_fp16_on_the_wire_by_default(names):
    code, output = start(torchrun(SCRIPT), names, SCRIPT_IMPORT="import perseus")
    line = next(text for text in output.splitlines() if text.startswith("paceline: 2 ranks"))
    assert code == 0 and "fp16" in line, output


def test_tiacc_redirects_collectives_too(names):
    """In time, and then once more: the second call changes nothing and has nothing to say."""
    code, output = start(torchrun(SCRIPT), names, SCRIPT_IMPORT=TIACC, SCRIPT_LATE=TIACC)
    expect(code, output, "paceline", "paceline")
    assert "came after" not in output, output


def test_tiacc_redirects_groups_by_device_and_by_position():
    done = Launch("redirected.py", 2, timeout=60).end()
    ways = "the first group, by position, by name" + (", by device" if MODERN else "")
    assert [f"carried: {ways}\n" in log for log in done.logs] == [True] * 2, done.everything()


def test_tiacc_after_the_process_group_says_what_it_is_too_late_for(names):
    code, output = start(torchrun(SCRIPT), names, SCRIPT_LATE=TIACC)
    expect(code, output, "paceline", "gloo")
    assert output.count("init_tiacc_training() came after init_process_group()") == 1, output


@pytest.mark.parametrize("launcher", ["mpirun.openmpi", "mpirun.mpich"])
@pytest.mark.parametrize("line", ["import perseus", TIACC])
def test_plain_mpirun(names, launcher, line):
    assert shutil.which(launcher), f"{launcher} is one of ./dev's packages"
    flags = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in launcher else []
    command = [launcher, *flags, "-np", "2", sys.executable, SCRIPT]
    expect(*start(command, names, SCRIPT_IMPORT=line), "paceline", "gloo" if "perseus" in line else "paceline")


def test_pip_knows_the_names(names):
    code, output = start([sys.executable, "-m", "pip", "show", "perseus"], names)
    assert code == 0 and "Name: perseus" in output, output


def test_a_real_package_is_never_hidden(tmp_path):
    real = tmp_path / "real" / "perseus"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("theirs = True\n")
    other = tmp_path / "other"
    install = [sys.executable, "-m", "paceline.compat", "--install", "perseus", "--target"]
    code, output = start([*install, str(other)], tmp_path / "real")
    assert code != 0 and "never hides a real package" in output and str(real) in output, output
    code, output = start([*install, str(tmp_path / "real")])
    assert code != 0 and "not Paceline's" in output, output
    assert (real / "__init__.py").read_text() == "theirs = True\n"


def test_names_can_be_taken_back(tmp_path):
    base = [sys.executable, "-m", "paceline.compat"]
    assert start([*base, "--install", "perseus", "--target", str(tmp_path)])[0] == 0
    _, output = start([*base, "--list"], tmp_path)
    assert f"perseus: {tmp_path / 'perseus'}" in output and "tiacc_training: not installed" in output, output
    assert (tmp_path / "perseus" / "examples" / "pytorch_native_ddp_demo.py").exists()
    assert start([*base, "--uninstall", "perseus", "--target", str(tmp_path)])[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cant_be_written_is_named():
    code, output = start([sys.executable, "-m", "paceline.compat", "--install", "perseus", "--target", "/proc/none"])
    assert code != 0 and "/proc/none" in output and "--target" in output, output


def test_a_user_s_folder_that_is_not_looked_at_is_no_place_to_install(tmp_path):
    """A virtual environment of somebody else's: the name would be installed where no import finds it."""
    lines = "import os, sys; os.access = lambda *a, **k: False; sys.argv[1:] = ['--install', 'perseus']"
    run = [sys.executable, "-s", "-c", f"{lines}; import runpy; runpy.run_module('paceline.compat', alter_sys=True)"]
    code, output = start(run, PYTHONUSERBASE=str(tmp_path))
    assert code != 0 and "--target" in output, output
    assert not list(tmp_path.iterdir())


def test_benchmark_example():
    short = ["--num-iters", "2", "--num-batches-per-iter", "2"]
    code, output = start(torchrun(str(ROOT / "examples" / "pytorch_ddp_benchmark.py"), *short))
    assert code == 0 and "paceline: 2 ranks" in output, output
    assert re.search(r"Total img/sec on 2 CPU\(s\): \d+", output), output


def test_demo_example():
    """Its data comes with scikit-learn; without it the demo says so."""
    code, output = start(torchrun(str(ROOT / "examples" / "pytorch_native_ddp_demo.py"), "--epochs", "3"))
    if importlib.util.find_spec("sklearn") is None:
        assert code != 0 and "pip install scikit-learn" in output, output
        return
    accuracy = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", output)]
    assert code == 0 and "paceline: 2 ranks" in output, output
    assert len(accuracy) == 3 and accuracy[-1] > 80, output


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])  # DETAIL: torch would put something around every backend
def test_subgroups_that_end_leave_nothing_behind(debug):
    done = Launch("subgroups.py", 2, timeout=60, TORCH_DISTRIBUTED_DEBUG=debug).end()
    for log in done.logs:
        assert "nothing left" in log, done.everything()
