"""Which sources clang-tidy looks at in every run of the tests, and which files the quick checks."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "dev"))

import lint


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Adds a line to files of a repository and commits them."""

    def git(*words):
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(*names):
        for name in names:
            with open(tmp_path / name, "a") as file:
                file.write("int x;\n")
        git("add", ".")
        git("commit", "-m", "more")

    git("init")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    return commit


def looked_at():
    return sorted(path.name for path in lint.changed_lately())


def test_what_the_last_commits_changed(commit, monkeypatch):
    monkeypatch.setattr(lint, "LAST_COMMITS", 2)
    commit("old.cc")
    commit("one.cc", "one_test.cc", "one.h", "gone.cc")
    commit("notes.md")
    commit("two.cc", "bytes_fuzz.cc")
    (lint.ROOT / "gone.cc").unlink()
    assert looked_at() == ["one.cc", "two.cc"]  # commits that change no source are not counted


def test_what_nobody_has_committed_yet_comes_first(commit, monkeypatch):
    monkeypatch.setattr(lint, "MOST_RECENT", 2)
    commit("old.cc", "older.cc")
    (lint.ROOT / "new.cc").write_text("int y;\n")
    (lint.ROOT / "old.cc").write_text("int y;\n")
    assert looked_at() == ["new.cc", "old.cc"]


@pytest.mark.parametrize("name", ["a.cc", "a.h", "a.cu", "a.cuh"])
def test_the_device_s_code_has_the_same_form(commit, name):
    commit(name)
    assert lint.clang_format(fix=False) == []
    (lint.ROOT / name).write_text("int   x ;\n")
    problems = lint.clang_format(fix=False)
    assert problems and all(f"{name}:1:" in problem for problem in problems)
    lint.clang_format(fix=True)
    assert (lint.ROOT / name).read_text() == "int x;\n"


@pytest.mark.parametrize(
    "name", ["a.cc", "a.cuh", "sub/a.cu", "sub/a.toml", ".ci/run", "dev", "CMakeLists.txt", "a.md"]
)
def test_promises_are_found_wherever_people_write(commit, name):
    (lint.ROOT / name).parent.mkdir(exist_ok=True)
    commit(name)
    assert lint.forbidden_words() == []
    (lint.ROOT / name).write_text("int x;\n# " + "TO" + "DO: mend it\n")
    assert lint.forbidden_words() == [f"{name}:2: # " + "TO" + "DO: mend it"]
