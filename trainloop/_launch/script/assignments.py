"""Find what the user's code assigns to attributes of libraries, such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from trainloop._transfer.users_modules import is_users

# Each process has its own streams and arguments of the command line, and environment variables are sent separately.
_EXCEPT = {"sys", "os"}


def assigned_in_libraries(users: Mapping[str, types.ModuleType]) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of libraries' modules and classes that the user's code assigns: module, path, and value.

    A rank imports the user's modules itself. So of ``users``, only the code of functions counts; of the script, which
    no rank runs, all of it.
    """
    names = set().union(*_of_script(sys.modules["__main__"]))
    for module in users.values():
        file = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py"):
            with contextlib.suppress(OSError):
                names |= _of_file(file, os.stat(file).st_mtime_ns, in_functions=True)
    for dotted in sorted(names):
        parts = dotted.split(".")
        length = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in sys.modules), 0)
        name, path = ".".join(parts[:length]), parts[length:]
        if not length or name in _EXCEPT or is_users(name):
            continue
        owner: Any = sys.modules[name]
        for part in path[:-1]:
            owner = vars(owner).get(part) if isinstance(owner, (types.ModuleType, type)) else None
        if type(owner) is types.ModuleType or isinstance(owner, type):
            value = vars(owner).get(path[-1], owner)  # deleted since
            if value is not owner and not isinstance(value, types.ModuleType):
                yield name, ".".join(path), value


def _of_script(main: types.ModuleType) -> Iterator[frozenset[str]]:
    file = getattr(main, "__file__", None)
    if file is not None:
        with contextlib.suppress(OSError):
            yield _of_file(file, os.stat(file).st_mtime_ns, in_functions=False)
    else:
        cells = getattr(main, "In", [])  # IPython's
        yield assigned_names("\n".join(cell for cell in cells if _is_python(cell)), in_functions=False)


def _is_python(cell: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError):
        return bool(ast.parse(cell))
    return False


@functools.cache
def _of_file(file: str, time_ns: int, *, in_functions: bool) -> frozenset[str]:
    """Return what a file assigns; ``time_ns`` distinguishes its versions."""
    with open(file, "rb") as source:
        return assigned_names(source.read(), in_functions=in_functions)


def assigned_names(source: str | bytes, *, in_functions: bool) -> frozenset[str]:
    """Return the dotted names of attributes to which code assigns, as they are called where they were imported from."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                imported[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = [inner for top in (functions if in_functions else [tree]) for inner in ast.walk(top)]
    assigned = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(name for node in assigned if (name := _dotted(node, imported)))


def _dotted(node: ast.expr, imported: Mapping[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, imported)
        return owner and f"{owner}.{node.attr}"
    return imported.get(node.id, "") if isinstance(node, ast.Name) else ""
