"""Find the modules of the user's program among all imported ones: not Python's own, and no library's."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def users_modules() -> dict[str, types.ModuleType]:
    """Return the imported modules that belong to the user's program, by name, without ``__main__``."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name not in ("__main__", "__mp_main__")
        and getattr(getattr(module, "__spec__", None), "name", None) == name
        and is_users(name)
    }


def is_users(name: str) -> bool:
    """Return True if a module belongs to the user's program, also as ``__main__``."""
    if name in ("__main__", "__mp_main__"):
        return True
    module, top = sys.modules.get(name), name.partition(".")[0]
    if module is None and _spec_of(top) is None:
        return top != "__torch__"  # code that the script executes (exec, a console); TorchScript's classes
    # A rank has a class that a function defines by value, without its module.
    file = _origin_of(top) if module is None else getattr(module, "__file__", None)
    return type(file) is str and not in_library(file) and not _library_generates(name, file)


def _library_generates(name: str, file: str) -> bool:
    """Return True if a module is part of a library's package, but its file is not in the package's folders."""
    package = sys.modules.get(name.rpartition(".")[0])
    origin = getattr(package, "__file__", None)
    return type(origin) is str and in_library(origin) and os.path.dirname(file) not in getattr(package, "__path__", ())


@functools.cache
def _spec_of(top: str) -> importlib.machinery.ModuleSpec | None:
    """Return the specification of a top-level module; None if there is no such module."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _origin_of(top: str) -> str | None:
    """Return a file of a top-level module that is not imported; None if there is none."""
    spec = _spec_of(top)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return os.path.join(folders[0], "__init__.py") if folders else spec.origin if spec.has_location else None


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of the interpreter's own modules and of installed packages."""
    import sysconfig  # 2 ms, which only launches need

    paths = [path for path in sysconfig.get_paths().values() if path]
    return tuple({path + os.sep for path in [*paths, *map(os.path.realpath, paths)]})


@functools.cache
def in_library(file: str) -> bool:
    """Return True if a file belongs to Python, to an installed package, or to this package."""
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return True
    if file.startswith((*_libraries(), _PACKAGE)) or os.path.realpath(file).startswith((*_libraries(), _PACKAGE)):
        return True
    folders = [folder for folder in map(os.path.abspath, sys.path) if file.startswith(folder + os.sep)]
    return any(file[len(folder) + 1 :].partition(os.sep)[0] in _installed_in(folder) for folder in folders)


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the top-level files and folders of the libraries in a folder of ``pip install --target``."""
    try:
        if not any(name.endswith(".dist-info") for name in os.listdir(folder)):
            return frozenset()
    except OSError:
        return frozenset()
    found = importlib.metadata.distributions(path=[folder])
    return frozenset(file.parts[0] for distribution in found for file in distribution.files or ())
