"""The `paceline` command of an installed package: hands over to the program that came with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def program() -> Path:
    """Path of the `paceline` program: beside the package in a wheel, in build/bin in a source tree."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "bin" / "paceline", here.parent.parent / "build" / "bin" / "paceline"):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(
        f"the paceline program is in neither {here / 'bin'} nor a build folder: "
        "reinstall the package or run ./dev build"
    )


def main() -> None:
    try:
        path = program()
        # A wheel may have been unpacked by a tool that drops the executable bit.
        if not os.access(path, os.X_OK):
            path.chmod(0o755)
        # Where no environment is active nothing else would tell it which Python the package belongs to.
        if sys.executable:
            os.environ["PACELINE_PYTHON"] = sys.executable
        os.execv(path, ["paceline", *sys.argv[1:]])
    except OSError as error:
        named = f"{error.filename or path}: {error.strerror}" if error.strerror else str(error)
        sys.exit(f"paceline: {named}")


if __name__ == "__main__":
    main()
