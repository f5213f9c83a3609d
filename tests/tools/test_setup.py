"""The tree's Python environment and builds, as ./dev makes them (tools/dev/common.sh, tools/dev/wheel.sh)."""

import fcntl
import hashlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = ROOT / "tools" / "dev" / "common.sh"


@pytest.fixture
def tree(tmp_path):
    """A source tree, and a cache that holds its packages: nothing is downloaded."""
    tree = tmp_path / "tree"
    (tree / "requirements").mkdir(parents=True)
    (tree / "requirements" / "main.txt").write_text("")
    (tree / "python" / "probe").mkdir(parents=True)
    (tree / "python" / "probe" / "__init__.py").touch()
    base = tmp_path / "cache" / f"venv-main-{hashlib.sha256(b'').hexdigest()[:16]}"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", base], check=True, timeout=60)
    (base / "complete").touch()
    (base / "bin" / "tool").write_text("#!/usr/bin/env python3\nimport probe\nprint(probe.__file__)\n")
    (base / "bin" / "tool").chmod(0o755)
    return tree


def set_up(tree):
    """Returns when the environment was made."""
    script = f'PACELINE_CACHE="{tree.parent}/cache"; . "{COMMON}"; setup_python main'
    subprocess.run(["bash", "-euc", script], cwd=tree, check=True, timeout=60)
    return (tree / ".venv" / "base").stat().st_mtime_ns


def module_of(command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("relocate", [lambda a, b: shutil.copytree(a, b, symlinks=True), shutil.move])
def test_a_tree_that_was_copied_or_moved_uses_its_own_python(tree, relocate):
    set_up(tree)
    other = tree.parent / "other"
    relocate(tree, other)
    set_up(other)
    own = str(other / "python" / "probe" / "__init__.py")
    assert module_of([other / ".venv/bin/python3", "-c", "import probe; print(probe.__file__)"]) == own
    assert module_of([other / ".venv/bin/tool"]) == own


@pytest.mark.parametrize("name", ["with a blank", "n" * 150])
def test_a_tree_whose_path_the_kernel_does_not_take_for_an_interpreter(tree, name):
    """Neither the tree's nor the cache's: pip's own scripts then begin with lines for the shell."""
    (base,) = (tree.parent / "cache").iterdir()
    beginning = f"#!/bin/sh\n'''exec' \"{base}/bin/python3\" \"$0\" \"$@\"\n' '''\n"
    (base / "bin" / "other").write_text(beginning + "import probe, sys\nprint(probe.__file__, *sys.argv[1:])\n")
    (base / "bin" / "other").chmod(0o755)
    other = tree.parent / name / "tree"
    other.parent.mkdir()
    shutil.move(tree, other)
    shutil.move(tree.parent / "cache", other.parent / "cache")
    set_up(other)
    own = str(other / "python" / "probe" / "__init__.py")
    assert module_of([other / ".venv/bin/tool"]) == own
    assert module_of([other / ".venv/bin/other", "a word", "b"]) == f"{own} a word b"


def test_an_environment_that_fits_stays(tree):
    assert set_up(tree) == set_up(tree)
    assert module_of([tree / ".venv/bin/tool"]) == str(tree / "python" / "probe" / "__init__.py")


def test_two_trees_fill_one_cache(tree):
    """The second comes while the first makes the environment."""
    cache = tree.parent / "cache"
    shutil.rmtree(cache)
    second = tree.parent / "second"
    shutil.copytree(tree, second)
    script = f'PACELINE_CACHE="{cache}"; . "{COMMON}"; setup_python main'
    first = subprocess.Popen(["bash", "-euc", script], cwd=tree)
    try:
        while not list(cache.glob("venv-main-*/bin/python3")):
            assert first.poll() is None
        set_up(second)
        assert first.wait(timeout=60) == 0
    finally:
        first.kill()
        first.wait()
    for one in (tree, second):
        own = str(one / "python" / "probe" / "__init__.py")
        assert module_of([one / ".venv/bin/python3", "-c", "import probe; print(probe.__file__)"]) == own


def test_a_cache_that_can_t_be_written_is_named(tree):
    (tree / "file").touch()
    script = f'PACELINE_CACHE="{tree}/file/cache"; . "{COMMON}"; setup_python main'
    done = subprocess.run(["bash", "-euc", script], cwd=tree, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "file/cache/lock can't be written; PACELINE_CACHE names another cache" in done.stderr


def test_a_second_run_of_the_suites_leaves_the_first_its_results(tmp_path):
    script = tmp_path / "tools" / "dev" / "run_suites.py"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tools/dev/run_suites.py", script)
    result = tmp_path / "build" / "test-results" / "first.xml"
    result.parent.mkdir(parents=True)
    result.touch()

    def second_run():
        command = [sys.executable, script, "--only", "^none$"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    with open(tmp_path / "build" / "test-results.lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        refused = second_run()
        assert refused.returncode == 1 and "another run is under way in this tree" in refused.stderr
        assert result.exists()
    assert second_run().stdout.endswith("0 passed, 0 failed\n") and not result.exists()


def test_device_code_does_not_need_the_wheels_compiler(tmp_path):
    """nvcc knows no cross compiler: it is given the one that the wheel's build names for it."""
    nvcc, log = tmp_path / "nvcc", tmp_path / "log"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --list-gpu-code ] && echo sm_90 && exit\necho "$@" >>{log}\n'
        'while [ $# -gt 0 ]; do case "$1" in -o|-MF) : >"$2" ;; esac; shift; done\n'
    )
    nvcc.chmod(0o755)
    named = re.findall(r'-DPACELINE_NVCC_CXX="[^"]*"', (ROOT / "tools/dev/wheel.sh").read_text())
    host = subprocess.run(["bash", "-c", f"echo {' '.join(named)}"], capture_output=True, text=True, check=True).stdout
    options = [f"-DPACELINE_NVCC={nvcc}", "-DPACELINE_TESTS=OFF", "-DCMAKE_CXX_COMPILER=clang++", *host.split()]
    for command in (
        ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", *options],
        ["ninja", "-C", tmp_path / "build", "src/device/cuda/dense.fatbin"],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    words = log.read_text().split()
    assert words[words.index("-ccbin") + 1] == shutil.which("g++")


def setup_nvcc(tree, wheels, **more):
    """./dev's way to nvcc where the system has none and pip knows these packages alone."""
    hide = 'if [ -d /usr/local/cuda/bin ]; then mount -t tmpfs none "$(readlink -f /usr/local/cuda)"; fi'
    script = f'{hide}; . "{COMMON}"; setup_nvcc build; printf "%s\\n" "${{NVCC_OPTION[@]}}"'
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PACELINE_CACHE": str(tree.parent / "cache"), "REQUIRE": ""} | more
    command = ["unshare", "--mount", "bash", "-euc", script]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False)


def nvcc_option(tree, wheels):
    """What it says, and gives to CMake last."""
    done = setup_nvcc(tree, wheels)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def package(folder, name, version, files):
    """A package of these files, as pip installs it."""
    about = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{about}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, text)
        wheel.writestr(f"{about}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}.dist-info/RECORD", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="hiding the system's nvcc needs root")
def test_where_the_system_has_no_nvcc_it_is_installed_once(tree, tmp_path):
    shutil.copy(ROOT / "requirements" / "cuda.txt", tree / "requirements")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    said = nvcc_option(tree, wheels)
    assert said[-1] == "-DPACELINE_NVCC=" and "no device code is built" in said[-2], said
    refused = setup_nvcc(tree, wheels, REQUIRE="nvcc")
    assert refused.returncode == 1 and "REQUIRE=nvcc asks for it" in refused.stdout + refused.stderr

    for line in (tree / "requirements" / "cuda.txt").read_text().split():
        name, version = line.split("==")
        package(wheels, name, version, {"nvidia/cu13/bin/nvcc": "#!/bin/sh\necho sm_90\n"} if "nvcc" in name else {})
    option = nvcc_option(tree, wheels)[-1]
    assert module_of([option.removeprefix("-DPACELINE_NVCC=")]) == "sm_90"
    shutil.rmtree(wheels)
    assert nvcc_option(tree, wheels) == [option]

    (tree / "build").mkdir(exist_ok=True)
    cache = tree / "build" / "CMakeCache.txt"
    cache.write_text(f"{option[2:].replace('=', ':FILEPATH=')}\n")
    assert nvcc_option(tree, wheels) == [option], "what an earlier build was given by ./dev"
    cache.write_text("PACELINE_NVCC:FILEPATH=/opt/cuda/bin/nvcc\n")
    assert nvcc_option(tree, wheels) == [""], "what was given by hand stays"


def test_the_help_names_every_verb_and_no_other():
    dev = (ROOT / "dev").read_text()
    labels = re.findall(r"^  ([^\s()]+)\)", dev[dev.index('case "$verb" in') : dev.index("\nesac")], re.MULTILINE)
    verbs = {verb for label in labels for verb in label.split("|")} - {"help", "-h", "--help", "*"}
    said = module_of([ROOT / "dev", "help"])
    assert re.findall(r"^\./dev (\S+)", said, re.MULTILINE) and "build" in verbs
    assert sorted(re.findall(r"^\./dev (\S+)", said, re.MULTILINE)) == sorted(verbs)
    wrong = subprocess.run([ROOT / "dev", "biuld"], capture_output=True, text=True, timeout=60, check=False)
    assert (wrong.returncode, wrong.stdout.strip()) == (2, f"dev: no verb 'biuld'\n{said}")


@pytest.mark.parametrize("clear", [["-u", "HOME"], ["HOME="]])
def test_without_a_home(clear):
    """As in services and some containers: the cache lies in the user's own folder all the same."""
    asked = ["env", "-u", "PACELINE_CACHE", *clear, "bash", "-euc", f'. "{COMMON}"; echo "$PACELINE_CACHE"']
    assert module_of(asked) == f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/paceline"
    assert "./dev test" in module_of(["env", *clear, ROOT / "dev", "help"])


@pytest.mark.parametrize("name", ["libpaceline.so", "libpaceline_cuda.so", "libpaceline_tensorflow.so"])
def test_libraries_are_looked_for_beside_each_other_alone(name):
    """As the wheel demands: a folder of the machine that built them may hold anything on another one."""
    header = module_of(["objdump", "-p", ROOT / "build" / "lib" / name])
    assert {line.split()[1] for line in header.splitlines() if "PATH  " in line} <= {"$ORIGIN"}


def test_a_tree_whose_path_has_a_blank_is_linked(tmp_path):
    """The linker gets the list of what is exported as one word."""
    tree, build = tmp_path / "my tree", tmp_path / "build"
    tree.symlink_to(ROOT)
    configure = ["cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DPACELINE_TESTS=OFF"]
    subprocess.run(configure, check=True, capture_output=True, timeout=300)
    for library, folder in (("libpaceline.so", "capi"), ("libpaceline_cuda.so", "gpu")):
        link = module_of(["ninja", "-C", build, "-t", "commands", "-s", f"lib/{library}"]).splitlines()[-1]
        assert f"-Wl,--version-script={tree}/src/{folder}/exports.map" in shlex.split(link)
