"""Find the names that a module derives from the rank when it is imported: each rank keeps its own values of these."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from trainloop._transfer.users_modules import in_library

_RANKS_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
_RANKS_NAMES = {
    *("get_rank", "get_world_size", "get_node_local_rank", "is_initialized", "is_global_zero"),
    *("getpid", "getppid", "current_process", "parent_process"),
}


def rank_dependent(module: str) -> frozenset[str]:
    """Return the names that a module derives from the rank when it is imported, as in ``os.environ["RANK"]``."""
    sources: dict[str, _Source] = {}  # of the module and of the user's modules that it imports, directly or not
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in sources and (source := _source(name)) is not None:
            sources[name] = source
            waiting += source.imported & sys.modules.keys()
    found: dict[str, set[str]] = {name: set() for name in sources}
    before, number = -1, 0
    while number > before:  # modules may import each other, and a statement may use names that a later one binds
        for name, source in reversed(sources.items()):
            names = found[name]
            others: set[str] = set().union(*found.values())  # also of modules that imported modules import
            for paths, own, words in source.units:
                if "*" in words:
                    names |= others
                # Not all of them with the names of others: a variable here may have the name of one there.
                elif own & names or words & others or (own | words) & _RANKS_NAMES:
                    names |= paths
        before, number = number, sum(map(len, found.values()))
    return frozenset(found.get(module, ()))


class _Source(NamedTuple):
    """What a module's file says."""

    imported: frozenset[str]
    """Names of the modules that it may import."""
    units: tuple[tuple[set[str], set[str], set[str]], ...]
    """The names that each statement binds, the names in it, and its words that may be names in other modules."""


def _source(name: str) -> _Source | None:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or in_library(file):
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return _parsed(file, getattr(module, "__package__", None) or "", status.st_mtime_ns, status.st_size)


@functools.cache
def _parsed(file: str, package: str, time_ns: int, size: int) -> _Source | None:
    """Return what a file says; ``time_ns`` and ``size`` distinguish versions of the file."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None
    imported = frozenset(part for statement in tree.body for part in _imported(statement, package))
    return _Source(imported, tuple(_names_by_statement(tree.body)))


def _imported(statement: ast.stmt, package: str) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _names_by_statement(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[set[str], set[str], set[str]]]:
    """Yield the names that each statement binds, the names in it, and its attributes and what it imports."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _names_by_statement(statement.body, f"{prefix}{statement.name}.")
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                name = (alias.asname or alias.name).partition(".")[0]
                yield {prefix + name}, set(), {alias.name.rpartition(".")[2]}
            continue
        bound, names, words = set(), set(), set()
        if is_function := isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(statement.name)
        for node in ast.walk(statement):
            if isinstance(node, ast.Global):
                bound.update(node.names)
            elif isinstance(node, ast.Name):
                names.add(node.id)
                if isinstance(node.ctx, ast.Store) and not is_function:  # a function's variables are its own
                    bound.add(node.id)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.alias):
                if not is_function:
                    bound.add((node.asname or node.name).partition(".")[0])
                words.add(node.name.rpartition(".")[2])
            elif isinstance(node, ast.Constant) and node.value in _RANKS_VARIABLES:
                words.add("get_rank")
        yield {prefix + name for name in bound}, names, words
