"""What one rank tells the others by files: neither Paceline nor torch is asked, and nobody's end ends it."""

import os
import time
from pathlib import Path


def tell(word):
    _file(word).touch()


def hear(word):
    """Waits until a rank has said it."""
    while not _file(word).exists():
        time.sleep(0.001)


def _file(word):
    return Path(f"{os.environ['CHECKS_REPORT']}.said {word}")
