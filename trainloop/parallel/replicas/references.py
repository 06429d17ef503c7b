"""Let a replica's lists of layers, bound methods, closures and hooks run the replica's layers, not the model's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainloop._support.nested import stored_items, with_parts
from trainloop._support.user_line import warn

_MOST = 1000  # items; a container with more is data
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {*_HOOKS}
_PLAIN = frozenset((bool, int, float, str, type(None), Tensor))  # for speed
_REFERRING = (list, tuple, dict, partial, MethodType, FunctionType, CellType)


def refer_to_copies(module: nn.Module, replica: nn.Module) -> None:
    """Replace references to a module's parts by those to the replica's parts, in attributes and hooks of a replica.

    torch copies registered parts only. What else refers to them (``self.layers = [self.first, self.second]``,
    ``self.act = self.own_act``, a replaced ``forward``) would run the module's own: on another device, and BatchNorm
    would take its statistics of each part of a batch.

    Parameters
    ----------
    module : nn.Module
    replica : nn.Module
        Copy of it with the same names of parts. Only its attributes are changed, but not those of TorchScript modules.
    """
    copies = copies_of(module, replica)
    made: dict[int, Any] = {}  # what has several names stays one object, also a variable of several functions
    for part in copies.values():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        found = {
            name: with_copies(value, copies, made)
            for name, value in part.__dict__.items()
            if type(value) not in _PLAIN and name not in _OF_ANY_MODULE and _may_refer(value, copies)
        }
        part.__dict__.update(found)


def copies_of(module: nn.Module, replica: nn.Module) -> dict[int, nn.Module]:
    """Return the parts of a replica by the ids of the module's parts; those within TorchScript modules are missing."""
    own = dict(replica.named_modules())
    return {id(part): own[path] for path, part in module.named_modules() if path in own}


@contextmanager
def warning_of_own_parts(module: nn.Module) -> Iterator[None]:
    """Warn if the block, in which replicas run, calls a part of the module itself: what refers to it was not found."""
    own = {id(part) for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)}
    called: dict[str, None] = {}

    def see(part: nn.Module, _: Any) -> None:
        if id(part) in own:
            called[type(part).__name__] = None

    try:
        with nn.modules.module.register_module_forward_pre_hook(see):
            yield
    finally:
        if called:
            warn(
                f"gpu_mode='dp': a replica calls {', '.join(called)} of the model itself, which a global variable or "
                "another object refers to, and not its own copy. On GPUs this is an error of torch, and BatchNorm "
                "counts each part of a batch as one. Reach the model by self in its methods, or by an argument, or use "
                "gpu_mode='ddp' or 'single'."
            )


def with_copies(value: Any, copies: Mapping[int, nn.Module], made: dict[int, Any]) -> Any:
    """Return a value that refers to the copies; the same object if it refers to none of these modules.

    ``made`` has the results by the ids of values; the call adds its own.
    """
    if id(value) in copies:
        return copies[id(value)]
    if id(value) in made:
        return made[id(value)]
    if not refers_to(value, copies):
        return value
    if type(value) in (list, dict, CellType):
        new = made[id(value)] = type(value)()  # before its content, which may contain it
        if isinstance(value, CellType):
            new.cell_contents = with_copies(value.cell_contents, copies, made)
        elif isinstance(value, dict):
            new.update((key, with_copies(part, copies, made)) for key, part in value.items())
        else:
            new.extend(with_copies(part, copies, made) for part in value)
        return new
    parts = [with_copies(part, copies, made) for part in _parts(value)]
    made[id(value)] = new = _with_parts(value, parts)
    return new


def refers_to(value: Any, modules: Container[int]) -> bool:
    """Return True if a value leads to one of the modules with these ids."""
    found, seen, left = [value], set[int](), _MOST
    for one in found:  # it grows meanwhile
        if id(one) in modules:
            return True
        if id(one) not in seen and isinstance(one, _REFERRING):
            seen.add(id(one))
            parts = _parts(one)
            left -= len(parts)
            if left >= 0:
                found += [part for part in parts if type(part) not in _PLAIN and _may_refer(part, modules)]
    return False


def _may_refer(value: Any, modules: Container[int]) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict, OrderedDict):
        return bool(value)
    return id(value) in modules or isinstance(value, _REFERRING)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # the variable has no value yet
            return []
    return stored_items(value)


def _with_parts(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, MethodType):
        return MethodType(*parts)
    if isinstance(value, partial):
        end = 1 + len(value.args)
        bound = partial(parts[0], *parts[1:end], **dict(zip(value.keywords, parts[end:], strict=True)))
        bound.__dict__.update(value.__dict__)
        return bound
    if not isinstance(value, FunctionType):
        return with_parts(value, parts)
    cells, defaults = len(value.__closure__ or ()), len(value.__defaults__ or ())
    closure, rest = tuple(parts[:cells]), parts[cells:]
    made = FunctionType(value.__code__, value.__globals__, value.__name__, tuple(rest[:defaults]) or None, closure)
    made.__kwdefaults__ = dict(zip(value.__kwdefaults__ or (), rest[defaults:], strict=True)) or None
    made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
    made.__annotations__ = value.__annotations__
    made.__dict__.update(value.__dict__)
    return made
