"""Where reports go, the demo's and the benchmarks': they get there, or the program ends with what to do."""

from __future__ import annotations

import errno
import io
import sys
import tempfile
from pathlib import Path

NEEDED = 2 << 20  # of the demo's two clusters: pictures, and the page that holds them again
#: What would help, by what is wrong.
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space or give {}"),
    errno.ENOENT: "make its directory or give {}",
}


def _end(path: Path, error: OSError, program: str, option: str) -> None:
    fix = _FIXES.get(error.errno, f"give another {option}")
    sys.exit(f"{program}: can't write {path}: {error.strerror}; {fix.format(option)}")


def prepare(folder: Path, program: str = "demo", option: str = "--out") -> None:
    """Makes the folder, and tries whether it can hold the report, which comes after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(NEEDED))
    except OSError as error:
        _end(folder, error, program, option)


def check(path: Path | None, program: str, option: str = "--json") -> None:
    """Tries whether the file of an option can be opened, before minutes of measuring; it is left as it was."""
    if path is None:
        return
    try:
        new = not path.exists()
        with open(path, "ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        _end(path, error, program, option)


def write(path: Path, data: str | bytes, program: str = "demo", option: str = "--out") -> None:
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        _end(path, error, program, option)


def drawn(figure, kind: str = "png") -> bytes:
    """A picture of matplotlib's, for write(), which says what is wrong with its file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=110)
    return buffer.getvalue()
