"""The face for CUDA models where there is no GPU: which way is chosen and what is said, the ABI's layouts, buckets."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT, SIMULATED, Launch, environment
from torch import nn

import paceline
import paceline.torch
from paceline import _cuda, _state
from paceline._torch import buckets, cuda

HEADER = ROOT / "include" / "paceline" / "cuda.h"
HAS_GPU = torch.cuda.is_available()
STRUCTS = {
    "paceline_cuda_collective_args": _cuda.CudaCollectiveArgs,
    "paceline_cuda_options": _cuda.CudaOptions,
    "paceline_cuda_args": _cuda.CudaArgs,
    "paceline_cuda_stats": _cuda.CudaStats,
}

# --- which way ------------------------------------------------------------------------------------------------------


def choose(folder=None, nodes="two", **extra):
    """Two ranks of two nodes (or one) ask; returns (lines of rank 0, everything)."""
    if nodes == "two":
        extra["CHECKS_NODES"] = "1"
    if folder is not None:
        extra["PACELINE_LIBRARY"] = str(folder / "libpaceline.so")
    done = Launch("checks_cuda_choice.py", 2, timeout=150, **extra).end()
    assert not done.hung, done.everything()
    for report in done.reports:
        assert report == {"the_choice": "ok", "it_ends_in_order": "ok"}, done.everything()
    return [line for line in done.logs[0].splitlines() if line.startswith("paceline: ")], done


def built(name):
    found = [p for p in (ROOT / "build" / "lib" / name,) if p.exists()]
    if not found:
        pytest.skip(f"{name} is not built")
    return found[0]


@pytest.fixture
def without_cuda_library(tmp_path):
    """A folder with libpaceline.so alone."""
    shutil.copy(built("libpaceline.so"), tmp_path)
    return tmp_path


def test_one_node_keeps_nccl_and_says_so():
    lines, _ = choose(nodes="one")
    assert len([line for line in lines if "share one node" in line]) == 1, lines


def test_the_setting_keeps_torch():
    lines, _ = choose(PACELINE_CUDA_PATH="torch")
    assert any("PACELINE_CUDA_PATH=torch" in line for line in lines), lines


def test_a_missing_library_is_named(without_cuda_library):
    lines, _ = choose(without_cuda_library)
    said = [line for line in lines if _cuda.NAME in line]
    assert len(said) == 1 and "keeps torch's own all-reduce" in said[0] and "./dev build" in said[0], lines


def test_a_library_of_another_version_is_named(without_cuda_library, tmp_path):
    source = tmp_path / "other.c"
    source.write_text("int nothing(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / _cuda.NAME), str(source)], check=True, timeout=60)
    lines, _ = choose(without_cuda_library)
    assert any("another version" in line for line in lines), lines


def test_asked_for_it_is_an_error_on_all_ranks(without_cuda_library):
    _, done = choose(without_cuda_library, PACELINE_CUDA_PATH="paceline")
    for log in done.logs:
        assert _cuda.NAME in log, log


def test_without_a_visible_device_the_reason_is_said():
    built(_cuda.NAME)
    lines, _ = choose(CUDA_VISIBLE_DEVICES="")
    said = [line for line in lines if "keeps torch's own all-reduce" in line]
    assert len(said) == 1, lines
    assert re.search(r"driver|device|libcuda", said[0]), said


def test_a_driver_that_is_too_old_is_named_with_what_to_install():
    built(_cuda.NAME)
    lines, _ = choose(LD_LIBRARY_PATH=str(SIMULATED.parent), SIMULATED_CUDA_VERSION="11060")
    said = [line for line in lines if "keeps torch's own all-reduce" in line]
    assert len(said) == 1, lines
    assert "the CUDA driver is too old: it offers CUDA 11.6; " in said[0], said
    assert "need a driver for CUDA 11.7 or later (515 and up)" in said[0], said


@pytest.mark.parametrize(("version", "lacking"), [("11060", False), ("11070", True), ("13020", True)])
def test_what_a_driver_lacks_is_missing(tmp_path, version, lacking):
    """By its version, or by a function that is not there, whatever the version says."""
    if lacking:
        source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
        has = "int cuInit(unsigned f) { return 0; }", f"int cuDriverGetVersion(int* v) {{ *v = {version}; return 0; }}"
        source.write_text("\n".join((*has, "")))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(driver), str(source)], check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", "from paceline import _cuda; print(_cuda.missing())"],
        env=environment(LD_LIBRARY_PATH=str(tmp_path if lacking else SIMULATED.parent), SIMULATED_CUDA_VERSION=version),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    offers = f"it offers CUDA {int(version) // 1000}.{int(version) % 1000 // 10}"
    lacks = " and lacks cuGetErrorName" if lacking else ""
    assert f"the CUDA driver is too old: {offers}{lacks}; stream memory" in done.stdout, done.stdout + done.stderr
    assert "a driver for CUDA 11.7 or later (515 and up)" in done.stdout, done.stdout


def test_missing_is_a_sentence():
    if not HAS_GPU:
        assert len(_cuda.missing()) > 10


# --- the C ABI --------------------------------------------------------------------------------------------------------


def test_structs_are_laid_out_as_in_the_header(tmp_path):
    lines = []
    for name, kind in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        fields = [field for field, _ in kind._fields_]
        lines += [f'printf("{name}.{f} %zu %zu\\n", offsetof({name}, {f}), sizeof((({name}*)0)->{f}));' for f in fields]
    source = tmp_path / "layout.c"
    body = "\n".join(lines)
    source.write_text(f"#include <paceline/cuda.h>\n#include <stdio.h>\nint main(void) {{\n{body}\nreturn 0;\n}}\n")
    program = tmp_path / "layout"
    subprocess.run(["cc", "-I", str(ROOT / "include"), "-o", str(program), str(source)], check=True, timeout=60)
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=20).stdout
    found = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in out.splitlines()}
    for name, kind in STRUCTS.items():
        assert found[name] == [ctypes.sizeof(kind)], name
        for field, _ in kind._fields_:
            place = getattr(kind, field)
            assert found[f"{name}.{field}"] == [place.offset, place.size], f"{name}.{field}"


def test_every_member_and_function_of_the_header_is_declared():
    text = HEADER.read_text()
    for name, kind in STRUCTS.items():
        body = re.search(r"typedef struct " + name + r" \{(.*?)\} " + name, text, re.S).group(1)
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        members = [m for line in body.split(";") for m in re.findall(r"(\w+)(?=\s*(?:,|$))", line.strip())]
        assert members == [field for field, _ in kind._fields_], name
    assert set(re.findall(r"\b(paceline_cuda_\w+)\(", text)) == set(_cuda.PROTOTYPES)


def test_a_built_library_has_every_function():
    library = ctypes.CDLL(str(built(_cuda.NAME)))
    for name in _cuda.PROTOTYPES:
        assert hasattr(library, name), name


# --- buckets ----------------------------------------------------------------------------------------------------------

GRADIENTS = st.lists(st.integers(1, 10**6).map(lambda n: 4 * n), min_size=1, max_size=200)


@given(GRADIENTS, st.integers(1, 10**6))
def test_buckets_hold_every_gradient_and_end_small(sizes, cap):
    last = max(1, cap // 8)
    caps = buckets.plan(sizes, cap, max(1, cap // 16), last)
    assert sum(caps) == sum(sizes) and all(caps)
    ends, total = set(), 0
    for size in sizes:
        total += size
        ends.add(total)
    total = 0
    for size in caps:
        total += size
        assert total in ends, "a bucket ends inside a gradient"
    assert caps[-1] <= max(last, sizes[-1]), "what is ready last is small, as far as gradients allow"


def test_buckets_begin_small():
    caps = buckets.plan([buckets.MIB] * 200, 48 * buckets.MIB, 4 * buckets.MIB, buckets.MIB // 8)
    assert [size // buckets.MIB for size in caps[:4]] == [4, 16, 48, 48]


def seen_buckets(model, **arguments):
    """Bytes of the buckets of the third backward pass, as DDP makes them on one rank."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model, **arguments)
        sizes = []

        def hook(_state, bucket):
            sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, hook)
        for _ in range(3):
            sizes.clear()
            ddp(torch.ones(1, 64)).sum().backward()
        return sizes
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("find_unused", [False, True])
def test_ddp_makes_the_buckets_that_were_planned(monkeypatch, find_unused):
    monkeypatch.setattr(buckets, "_LEAST", 1 << 17)
    monkeypatch.setattr(buckets, "_LAST", 1 << 14)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
    sizes = buckets.ready_order(model)
    given_ = {"module": model, "find_unused_parameters": find_unused}
    chosen = buckets.for_cuda(given_)
    planned = buckets.plan(sizes, 1 << 17, 1 << 17, 1 << 14)
    # DDP sees a layer's bias ready before its weight: ends differ by one gradient at most.
    made = seen_buckets(model, find_unused_parameters=find_unused, **chosen)
    assert len(made) == len(planned) > 5, (made, planned)
    assert made[-1] <= (1 << 14) + max(sizes) and made[-2] <= (1 << 16) + max(sizes), made


def test_the_setting_sets_the_bucket(monkeypatch):
    model = nn.Linear(64, 64)
    monkeypatch.setenv("PACELINE_FUSION_THRESHOLD", "0")
    assert buckets.for_cuda({"module": model}) == {"bucket_cap_mb": 1 / buckets.MIB}
    monkeypatch.setenv("PACELINE_FUSION_THRESHOLD", "4096")
    chosen = buckets.for_cuda({"module": model})["bucket_cap_mb_list"]
    assert sum(chosen) * buckets.MIB == 65 * 64 * 4


# --- hardware queues --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_", "kept"), [(None, "32"), ("1", "1"), ("16", "16")])
def test_hardware_queues_are_asked_for_where_nobody_did(given_, kept):
    code = "import paceline.torch, os; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    env = environment()
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    env.update({} if given_ is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given_})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == kept


@pytest.mark.parametrize(("queues", "said"), [("1", True), ("7", True), ("8", False), ("32", False), ("", False)])
def test_lost_overlap_is_said(monkeypatch, capsys, queues, said):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.delenv("PACELINE_QUIET", raising=False)
    monkeypatch.setattr(_state, "_said", set())
    cuda._say_what_queues_cost()
    assert ("share a hardware queue" in capsys.readouterr().err) == said


def test_the_communicator_is_closed_after_what_was_built_on_it(tmp_path):
    """before_close() actions run first, in reverse order, once."""
    code = (
        "import paceline\n"
        "c = paceline.Communicator(rank=0, size=1)\n"
        "seen = []\n"
        "c.before_close(lambda: seen.append(('first', c.closed)))\n"
        "c.before_close(lambda: seen.append(('second', c.closed)))\n"
        "c.close(); c.close()\n"
        "print(seen)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[('second', False), ('first', False)]", done.stderr


def test_counts_that_are_not_one_a_rank_are_refused_before_c_reads_them():
    code = (
        "import ctypes, paceline\n"
        "from paceline import communicator as core\n"
        "c = paceline.Communicator(rank=0, size=1)\n"
        "buffer = (ctypes.c_int32 * 4)(7, 7, 7, 7)\n"
        "groups = 0, c.create_group([0])\n"
        "def run(group, **counts):\n"
        "    out = (ctypes.c_int32 * 4)()\n"
        "    collective = core.ALL_TO_ALL if 'send_counts' in counts else core.ALL_GATHER\n"
        "    c.run(collective, dtype=6, input=ctypes.addressof(buffer), output=ctypes.addressof(out), count=1,\n"
        "          group=group, **counts)\n"
        "    return list(out)\n"
        "for group in groups:\n"
        "    assert run(group, counts=[2]) == [7, 7, 0, 0]\n"
        "    for wrong in ([], [1, 2], [-1], [1 << 64]):\n"
        "        for counts in ({'counts': wrong}, {'send_counts': [1], 'receive_counts': wrong}):\n"
        "            try:\n"
        "                run(group, **counts)\n"
        "            except paceline.InvalidArgumentError as error:\n"
        "                assert f'counts is {wrong}: one number a rank of the group, 1 in all' in str(error), error\n"
        "            else:\n"
        "                raise AssertionError(counts)\n"
        "c.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


assert Path(HEADER).exists() and paceline.torch is not None
