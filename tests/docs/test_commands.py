"""Commands that pages name are there, with the options that stand beside them, and so are the variables before them.

Most of these commands measure, for minutes and on other machines, so what they do is not tried here.
"""

import functools
import json
import re
import shlex
import subprocess
import sys

import pytest
from pages import ROOT, text_of
from test_links import PAGES

PROGRAM = ROOT / "build" / "bin" / "paceline"
_VARIABLE = r"[A-Z][A-Z0-9_]*=\S*"
_PROGRAMS = r"paceline(?= [a-z])|dev(?= )|(?:bench|tools)/\S+\.py"
_OURS = re.compile(rf"^(?:{_VARIABLE} )*(?:python3? )?(?:\S*/)?({_PROGRAMS})(?= |$)")


def commands(page):
    """The words of each line of a fenced block and of each span in backticks that begins with a program of ours. What
    a job runs on its ranks is a command of its own."""
    text = text_of(page)
    fences = re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for fence in fences for line in fence.replace("\\\n", " ").splitlines()]
    lines += [" ".join(span.split()) for span in spans]
    for line in lines:
        for part in re.split(r" -- |[;|]{1,2} |&& ", line.split(" # ")[0].strip()):
            if _OURS.match(part.strip()):
                yield part.strip()


@functools.cache
def help_of(program, verb=""):
    command = [str(PROGRAM), verb] if program == "paceline" else [sys.executable, str(ROOT / program)]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, f"{program} {verb} --help ends with {done.returncode}\n{done.stderr}"
    return done.stdout


@functools.cache
def help_of_dev():
    done = subprocess.run([str(ROOT / "dev"), "help"], capture_output=True, text=True, timeout=60, check=True)
    # The demo's options are its program's.
    return (
        done.stdout
        + subprocess.run(
            [sys.executable, str(ROOT / "tools" / "demo" / "demo.py"), "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    )


@functools.cache
def settings():
    done = subprocess.run([str(PROGRAM), "doctor", "--settings", "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    return {row["variable"] for row in rows}


def complaint(command):
    """What is wrong with it, or nothing."""
    words = shlex.split(command.replace("…", ""))
    program = _OURS.match(command).group(1)
    start = next(i for i, word in enumerate(words) if word.endswith(program))
    unknown = {word.split("=")[0] for word in words[:start] if word.startswith("PACELINE_")} - settings()
    if unknown:
        return f"no setting {', '.join(sorted(unknown))}"
    verb = words[start + 1] if program in ("paceline", "dev") else ""
    if program.endswith(".py") and not (ROOT / program).exists():
        return f"no file {program}"
    if program == "dev":
        known = help_of_dev()
        if not re.search(rf"^\./dev {re.escape(verb)}\b", known, re.MULTILINE):
            return f"no verb {verb}"
    else:
        known = help_of(program, verb)
    for option in words[start + 1 :]:
        name = option.split("=")[0]
        if re.fullmatch(r"--?[a-zA-Z][\w-]*", name) and not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", known):
            return f"{program} {verb} has no {name}"
        if option.endswith(".py") and program == "paceline":
            break  # what follows a script is the script's
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_are_there(page):
    wrong = {command: why for command in commands(page) if (why := complaint(command))}
    assert not wrong


def test_what_is_not_there_is_noticed():
    assert sum(1 for page in PAGES for _ in commands(page)) > 80
    for command, why in {
        "paceline bench allreduce --np 2 --bites 4": "paceline bench has no --bites",
        "python bench/gpu/train.py --model bert": "bench/gpu/train.py  has no --model",
        "PACELINE_CODECS=fp16 paceline run -np 2 python train.py": "no setting PACELINE_CODECS",
        "./dev tests": "no verb tests",
        "./dev demo --budgets 3": "dev demo has no --budgets",
        "python bench/gpu/trains.py": "no file bench/gpu/trains.py",
        "python tools/demo/demo.py --budgets 3": "tools/demo/demo.py  has no --budgets",
    }.items():
        assert _OURS.match(command), command
        assert complaint(command) == why
    assert complaint("paceline run -np 2 python train.py --whatever") == ""
