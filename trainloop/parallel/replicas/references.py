"""Let a replica's lists of layers, bound methods, closures and hooks run the replica's layers, not the model's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

_DEEPEST, _LONGEST = 3, 1000  # a deeper or longer container is data
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {*_HOOKS}


def refer_to_copies(module: nn.Module, replica: nn.Module) -> None:
    """Replace references to a module's parts by those to the replica's parts, in attributes and hooks of a replica.

    torch copies registered parts only. What else refers to them (``self.layers = [self.first, self.second]``,
    ``self.act = self.own_act``, a replaced ``forward``) would run the module's own: on another device, and BatchNorm
    would take its statistics of each part of a batch.

    Parameters
    ----------
    module : nn.Module
    replica : nn.Module
        Copy of it with the same parts in the same order. Only its attributes are changed.
    """
    copies = dict(zip(map(id, module.modules()), replica.modules(), strict=True))
    for part in copies.values():
        found = {
            name: _referring(value, copies, _DEEPEST)
            for name, value in part.__dict__.items()
            if (type(value) in _REFERRING or id(value) in copies) and value and name not in _OF_ANY_MODULE
        }
        part.__dict__.update(found)


def _referring(value: Any, copies: Mapping[int, nn.Module], depth: int) -> Any:
    """Return a value that refers to the copies; the same object if it refers to none of these modules."""
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if kind is MethodType:
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if kind not in _REBUILT or not depth:
        return value
    parts = _REBUILT[kind][0](value)
    if not 0 < len(parts) <= _LONGEST:
        return value
    now = [_referring(part, copies, depth - 1) for part in parts]
    if all(new is old for new, old in zip(now, parts, strict=True)):
        return value
    return _REBUILT[kind][1](value, now)


def _cells(function: FunctionType) -> list[Any]:
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return cell


def _with_cells(function: FunctionType, contents: list[Any]) -> FunctionType:
    cells = tuple(
        cell if content is _content(cell) else CellType(content)
        for cell, content in zip(function.__closure__ or (), contents, strict=True)
    )
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(function.__dict__)
    return made


def _with_values(kind: type) -> Callable[[Any, list[Any]], Any]:
    return lambda value, now: kind(zip(value, now, strict=True))


_REBUILT: dict[type, tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], Any]]] = {
    list: (list, lambda _, now: now),
    tuple: (list, lambda _, now: tuple(now)),
    dict: (lambda value: list(value.values()), _with_values(dict)),
    OrderedDict: (lambda value: list(value.values()), _with_values(OrderedDict)),
    partial: (
        lambda value: [value.func, *value.args, *value.keywords.values()],
        lambda value, now: partial(
            now[0], *now[1 : 1 + len(value.args)], **dict(zip(value.keywords, now[1 + len(value.args) :], strict=True))
        ),
    ),
    FunctionType: (_cells, _with_cells),
}
_REFERRING = frozenset((MethodType, *_REBUILT))
