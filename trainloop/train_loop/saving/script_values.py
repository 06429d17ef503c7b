"""Values that a script keeps in globals and class attributes, and its methods, hooks and criterion use; compare."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainloop._transfer.shared import shared_parts
from trainloop._transfer.users_modules import is_users
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import trained_modules
from trainloop.train_loop.progress.loop_state import LoopState

_MOST_BYTES, _MOST_ITEMS = 2**20, 100_000  # larger values are data
_ATOMS = (float, complex, str, bytes, np.generic)


class ScriptValue(NamedTuple):
    """A value, and the place from which the script's code reads it."""

    holder: Any
    """A class, the globals of a module, the attributes of a function, or the cell of an outer variable."""
    name: str
    value: Any

    def put(self, value: Any) -> None:
        """Assign another value; change a container in place, since other names may refer to it."""
        if type(self.value) is type(value) and isinstance(value, (list, dict, set, deque)):
            self.value.clear()
            self.value.extend(value) if isinstance(value, (list, deque)) else self.value.update(value)
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value
        elif isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            setattr(self.holder, self.name, value)


def script_values(
    loop: LoopState, adds: Callable[[Any], bool] = lambda value: False, also: Sequence[object] = ()
) -> dict[str, ScriptValue]:
    """Return the :func:`used_values` of the classes of modules, criterion, optimizers and callbacks, and of hooks.

    ``also``: other functions of the script, and objects of its classes.
    """
    return used_values([*given_functions(loop).values(), *also], [*_parts_of(loop), *also], adds)


def script_variables(used: Mapping[str, ScriptValue], apart: Mapping[int, object]) -> dict[str, Any]:
    """Return the values of the script's own global and outer variables among those ``used``, and their parts, by path.

    ``apart``: objects to leave out, by their id.
    """
    values = {path: own.value for path, own in used.items() if path.startswith("__main__.")}
    return shared_parts(values, apart)


def used_values(
    given: Iterable[object], objects: Iterable[object], adds: Callable[[Any], bool]
) -> dict[str, ScriptValue]:
    """Return plain values, containers and objects of the script's classes, small ones only, by path.

    These are attributes of the objects' classes, and the globals, outer variables, attributes of functions, modules and
    other classes, and defaults that are containers, which their methods and the ``given`` functions use, also within
    functions that they call. Of other values, those for which ``adds`` returns True.
    """
    found: dict[str, ScriptValue] = {}
    functions = deque(one for one in map(_inner, given) if isinstance(one, types.FunctionType))

    def add(path: str, own: ScriptValue) -> None:
        while path in found and found[path].holder is not own.holder:  # of another class or function of this name
            path += "'"
        with suppress(Exception):  # of whatever methods the value's class has
            if _is_light(own.value, [_MOST_ITEMS]) or adds(own.value):
                found[path] = own

    for path, cls in _classes_of(objects).items():
        for name, value in list(vars(cls).items()):
            if not name.startswith("__"):
                add(f"{path}.{name}", ScriptValue(cls, name, value))
        functions.extend(_methods_of(cls))
    seen: set[tuple[int, ...]] = set()
    while functions:
        function = functions.popleft()
        key = (id(function.__code__), *map(id, function.__closure__ or ()))
        if key in seen:
            continue
        seen.add(key)
        for name, value in _own_values(function):
            add(f"{function.__module__}.{function.__qualname__}.{name}", ScriptValue(vars(function), name, value))
        names = dict.fromkeys(_names_in(function.__code__))
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
        holders: dict[str, Any] = dict.fromkeys(used, function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                used[name], holders[name] = cell.cell_contents, cell
        for name, value in used.items():
            # An outer variable may have the name of a global.
            of = function.__module__ + (".<locals>" if isinstance(holders[name], types.CellType) else "")
            home = value.__module__ if isinstance(value, type) else getattr(value, "__name__", "")
            if isinstance(value, (types.ModuleType, type)) and is_users(home):
                path = f"{home}.{value.__name__}" if isinstance(value, type) else home
                holder = value if isinstance(value, type) else vars(value)
                if isinstance(value, type) and home == "__main__":  # sent with its methods, and what they use
                    functions.extend(_methods_of(value))
                for inner, held in [(inner, vars(value)[inner]) for inner in names if inner in vars(value)]:
                    called = getattr(held, "__func__", held)  # of static and class methods
                    if isinstance(called, types.FunctionType):
                        functions.append(called)
                    elif not inner.startswith("__"):
                        add(f"{path}.{inner}", ScriptValue(holder, inner, held))
            elif isinstance(value, types.FunctionType) and is_users(value.__module__):
                functions.append(value)
            else:
                add(f"{of}.{name}", ScriptValue(holders[name], name, value))
    return found


def _methods_of(cls: type) -> Iterator[types.FunctionType]:
    for value in list(vars(cls).values()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)  # properties, static methods
        if isinstance(inner, types.FunctionType):
            yield inner


def _own_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's attributes, and the containers that are defaults of its arguments."""
    yield from list(vars(function).items())
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    for name, default in {**defaults, **(function.__kwdefaults__ or {})}.items():
        if isinstance(default, (list, dict, set, deque)):
            yield name, default


def given_functions(loop: LoopState) -> dict[str, Any]:
    """Return the script's hooks of modules, parameters and optimizers, and its criterion if it is a function, by path.

    They are functions, methods and partials of functions, or objects that can be called.
    """
    found: dict[str, Any] = {}
    for root, whole in enumerate(trained_modules(loop.model, loop.criterion)):
        holders: list[tuple[str, Any]] = [*whole.named_modules(), *whole.named_parameters()]
        for path, holder in holders:
            kinds = vars(holder) if isinstance(holder, nn.Module) else _HOOKS_OF_TENSORS
            found.update((f"{root}.{path}.{key}", hook) for key, hook in _hooks(holder, kinds))
    for i, optimizer in enumerate(optimizers_of(loop.optimizer)):
        found.update((f"optimizer.{i}.{key}", hook) for key, hook in _hooks(optimizer, vars(optimizer)))
    return {path: one for path, one in {**found, "criterion": loop.criterion}.items() if _is_scripts(one)}


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks(holder: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        hooks = getattr(holder, name, None) if name.endswith("_hooks") else None
        if isinstance(hooks, dict):
            yield from ((f"{name}.{i}", hook) for i, hook in enumerate(hooks.values()))


def _inner(function: Any) -> Any:
    """Return the function of a partial or of a method; any other object unchanged."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _is_scripts(function: Any) -> bool:
    inner = _inner(function)
    named = inner if isinstance(inner, types.FunctionType) else type(inner)
    return callable(function) and not isinstance(function, nn.Module) and is_users(named.__module__ or "")


def put_script_values(loop: LoopState, values: Mapping[str, Any]) -> None:
    """Assign the values of another process's :func:`script_values`, also those that this process does not have yet."""
    found = script_values(loop)
    classes = _classes_of(_parts_of(loop))
    for path, value in values.items():
        of, _, name = path.rpartition(".")
        holder = classes.get(of) or _object_at(of)
        if path in found:
            found[path].put(value)
        elif holder is not None and name not in vars(holder) and not name.endswith("'"):  # one of several of this name
            setattr(holder, name, value)


def _object_at(path: str) -> Any:
    """Return the module or the function of this path, or None."""
    module, _, name = path.rpartition(".")
    return sys.modules.get(path) or getattr(sys.modules.get(module), name, None)


def _parts_of(loop: LoopState) -> list[Any]:
    modules = [part for module in trained_modules(loop.model, loop.criterion) for part in module.modules()]
    return [*modules, loop.criterion, *optimizers_of(loop.optimizer), *loop.callbacks]


def _classes_of(parts: Iterable[object]) -> dict[str, type]:
    """Return the script's classes, by path; the second one of a name has a quote after it."""
    found: dict[str, type] = {}
    for cls in dict.fromkeys(cls for kind in dict.fromkeys(map(type, parts)) for cls in kind.__mro__):
        if is_users(cls.__module__):
            # Pickled by value, a class loses the name of the function around it.
            path = f"{cls.__module__}.{cls.__name__}"
            while path in found:
                path += "'"
            found[path] = cls
    return found


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_light(value: Any, left: list[int], depth: int = 3) -> bool:
    """Return True for a value to keep; ``left`` is the number of items that may still be looked at.

    Flags and ``None`` are not kept: they mostly say what a process has (``_opened = True``), such as a file.
    """
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, _ATOMS):
        return not isinstance(value, (str, bytes)) or len(value) <= _MOST_BYTES
    if value is None or isinstance(value, bool):
        return depth < 3
    if isinstance(value, int):
        return True
    if type(value) is Tensor:
        return value.layout == torch.strided and value.grad_fn is None and value.nbytes <= _MOST_BYTES
    if type(value) is np.ndarray:
        return value.nbytes <= _MOST_BYTES and value.dtype.kind in "biufc"
    if isinstance(value, (torch.Generator, np.random.Generator)):
        return True
    if not depth:
        return False
    if isinstance(value, (list, tuple, set, deque)):
        return all(_is_light(item, left, depth - 1) for item in list(value))
    if isinstance(value, dict):
        return all(_is_light(item, left, depth - 1) for item in list(value.values()))
    is_code = isinstance(value, (type, nn.Module, types.FunctionType, types.ModuleType))
    if is_code or not is_users(type(value).__module__):
        return False
    return all(_is_light(one, left, depth - 1) for one in list(getattr(value, "__dict__", {}).values()))
