"""Describe a graph of objects: values, types, and which of them are one object or share memory."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type)
_OF_MODULES = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}


def described(roots: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Return a line for each object that can be reached from ``roots``, by its first path.

    Equal graphs have equal lines. Attributes named in ``without`` are left out.
    """
    paths: dict[int, str] = {}
    memory: dict[int, str] = {}
    kept = []  # so that no two objects have one id
    lines = []
    left = [*roots.items()][::-1]
    while left:
        path, value = left.pop()
        if isinstance(value, _PLAIN):
            lines.append(f"{path} = {value!r}")
        elif id(value) in paths:
            lines.append(f"{path} is {paths[id(value)]}")
        else:
            paths[id(value)] = path
            kept.append(value)
            lines.append(f"{path}: {type(value).__qualname__} {_shown(value, path, memory)}".rstrip())
            left += [(f"{path}{name}", part) for name, part in _parts(value, without)][::-1]
    return lines


def _shown(value: Any, path: str, memory: dict[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        address = value.untyped_storage().data_ptr()
        of = memory.setdefault(address, path) if address else ""
        return f"{value.dtype} {value.requires_grad} in {of} {value.tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, torch.Generator):
        return str(value.get_state().sum().item())
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(repr, value)))
    return str(bytes(value)) if isinstance(value, bytearray) else ""


def _parts(value: Any, without: Collection[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from (
            (f"[{key!r}]" if isinstance(key, _PLAIN) else f"[{i}]", v) for i, (key, v) in enumerate(value.items())
        )
        yield from ((f".key {i}", key) for i, key in enumerate(value) if not isinstance(key, _PLAIN))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".function", value.__func__.__name__), (".self", value.__self__))
        return
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell.cell_contents) for name, cell in cells)
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    yield from ((f".{name}", getattr(value, name)) for name in slots)
    left_out = {*without, *(_OF_MODULES if isinstance(value, nn.Module) else ())}
    yield from ((f".{name}", v) for name, v in getattr(value, "__dict__", {}).items() if name not in left_out)
