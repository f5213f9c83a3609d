"""What this process decided once: the face (the settings' family), whether Paceline is on, what was said already."""

import os
import sys

_TRUE = ("1", "true", "yes", "on")

face = "paceline"
_face_chosen = False
_said = set()


def choose_face(name):
    """The first import decides the settings' family; a second, different compat name is an error."""
    global face, _face_chosen
    if _face_chosen and face != name and name != "paceline":
        raise ImportError(
            f"'{name}' was imported after '{face}': their settings differ; import one of them only in this process"
        )
    if not _face_chosen:
        face, _face_chosen = name, True


def disabled():
    return os.environ.get("PACELINE_DISABLE", "").strip().lower() in _TRUE


def quiet():
    return os.environ.get("PACELINE_QUIET", "").strip().lower() in _TRUE


def say_once(rank, sentence):
    """One line on rank 0's standard error, once a process; nothing under PACELINE_QUIET=1."""
    if rank != 0 or quiet() or sentence in _said:
        return
    _said.add(sentence)
    print(f"paceline: {sentence}", file=sys.stderr, flush=True)
