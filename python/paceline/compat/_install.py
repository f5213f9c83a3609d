"""Writes and removes the packages that carry other products' names: a few lines each, with metadata for pip."""

import importlib.util
import os
import shutil
import site
import sysconfig
from pathlib import Path

import paceline

_MARK = "__paceline_compat__ = True"
NAMES = {
    "perseus": {
        "__init__.py": f"{_MARK}\nfrom paceline.compat.perseus import *  # noqa: E402,F403\n",
    },
    "tiacc_training": {
        "__init__.py": f"{_MARK}\n",
        "torch/__init__.py": "from paceline.compat import tiacc_training as _paceline  # noqa: F401\n",
        "torch/distributed.py": "from paceline.compat.tiacc_training import __getattr__, init_tiacc_training\n\n"
        '__all__ = ["__getattr__", "init_tiacc_training"]\n',
    },
}
_EXAMPLES = ("pytorch_native_ddp_demo.py", "pytorch_ddp_benchmark.py")


class CompatError(Exception):
    """What stands in the way, and what to do."""


def where(name):
    """The folder that `import name` would load, or None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return Path(next(iter(spec.submodule_search_locations or []), spec.origin or ""))


def install(name, target=None):
    """Makes `import name` Paceline's. Refuses where another package has that name. Returns the folder."""
    there = where(name)
    if there is not None and not is_ours(there):
        raise CompatError(
            f"a package '{name}' that is not Paceline's is installed at {there}; uninstall it first (pip uninstall "
            f"{name}), Paceline never hides a real package"
        )
    base = Path(target) if target else _site_packages()
    package = base / name
    if package.exists() and not is_ours(package):
        raise CompatError(f"{package} exists and is not Paceline's; remove it or choose another --target")
    _remove(base, name)
    try:
        written = [_write(package / file, text) for file, text in NAMES[name].items()]
        written += [_copy(source, package / "examples" / source.name) for source in _examples()]
        written += _write_metadata(base, name, written)
    except OSError as error:
        raise CompatError(
            f"{error.filename} can't be written ({error.strerror}); choose a folder with --target"
        ) from None
    return package


def uninstall(name, target=None):
    """Takes the name back. Returns the folder that was removed."""
    there = where(name)
    if there is None and not target:
        raise CompatError(
            f"'{name}' is not installed; where it is not on the import path name its folder with --target"
        )
    base = Path(target) if target else there.parent
    if not (base / name).exists():
        raise CompatError(f"'{name}' is not installed in {base}")
    if not is_ours(base / name):
        raise CompatError(f"{base / name} is not Paceline's; it stays")
    _remove(base, name)
    return base / name


def is_ours(package):
    try:
        return _MARK in (Path(package) / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return False


def _site_packages():
    base = Path(sysconfig.get_path("purelib"))
    if os.access(base, os.W_OK):
        return base
    if not site.ENABLE_USER_SITE:  # most virtual environments; nothing would be imported from there
        raise CompatError(
            f"{base} can't be written, and this Python does not look at a user's own packages; install as who owns it, "
            "or choose a folder on the import path with --target"
        )
    return Path(site.getusersitepackages())


def _examples():
    package = Path(paceline.__file__).parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        found = [folder / name for name in _EXAMPLES if (folder / name).exists()]
        if found:
            return found
    return []


def _dist_info(base, name):
    return base / f"{name}-{paceline.__version__}.dist-info"


def _write_metadata(base, name, written):
    folder = _dist_info(base, name)
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {paceline.__version__}\n"
        f"Summary: The import name '{name}', provided by Paceline\nRequires-Dist: paceline\n"
    )
    files = [_write(folder / "METADATA", metadata), _write(folder / "INSTALLER", "paceline\n")]
    record = [f"{path.relative_to(base)},," for path in [*written, *files, folder / "RECORD"]]
    return [*files, _write(folder / "RECORD", "\n".join(record) + "\n")]


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _copy(source, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    return path


def _remove(base, name):
    shutil.rmtree(base / name, ignore_errors=True)
    for folder in base.glob(f"{name}-*.dist-info"):
        shutil.rmtree(folder, ignore_errors=True)
