"""Where the demo's files go: whole, or the demo ends with what to do."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

NEEDED = 2 << 20  # of two clusters: pictures, and the page that holds them again


def _end(path: Path, error: OSError) -> None:
    sys.exit(f"demo: can't write {path}: {error.strerror}; free some space or give --out")


def prepare(folder: Path) -> None:
    """Makes the folder, and tries whether it can hold the report, which comes after minutes of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(NEEDED))
    except OSError as error:
        _end(folder, error)


def write(path: Path, data: str | bytes) -> None:
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        _end(path, error)
