"""Calls back when a module has been imported (now if it has been already, else right after), or could not be."""

import importlib.abc
import sys

_waiting = {}
_translations = {}


def when_imported(name, callback):
    """callback(module), once."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _install()
    _waiting.setdefault(name, []).append(callback)


def when_import_fails(name, translate):
    """Raises translate(error) in place of the error with which a module's import ends, one that is not there too."""
    _install()
    _translations[name] = translate


def _install():
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in _waiting and fullname not in _translations:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, fullname)
                return spec
        if fullname in _translations:
            raise _translations[fullname](ModuleNotFoundError(f"No module named {fullname!r}", name=fullname))
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, and the callbacks after it."""

    def __init__(self, loader, name):
        self._loader, self._name = loader, name

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except Exception as error:
            if self._name not in _translations:
                raise
            raise _translations[self._name](error) from error
        for callback in _waiting.pop(self._name, []):
            callback(module)
