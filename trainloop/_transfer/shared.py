"""Write changes of objects from one process into their copies in another.

Both sides walk the same objects from the same roots: modules, tensors, arrays, random generators, optimizers, lists,
sets, dictionaries and instances, at any depth. A part that both have keeps its identity: its contents are written into
the same object that was sent, so that after ``fit`` an averaged model or an optimizer's state is in the owner's
original object.
"""

from __future__ import annotations

import enum
import functools
import math
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from trainloop._support.nested import own_attributes, slot_names
from trainloop._support.user_line import warn
from trainloop._transfer.pickling import Fingerprint, contents_of_cell
from trainloop._transfer.torch_objects import attributes_in, kept_state, optimizer_state

_MOST_PARTS = 20_000
_LONG = 1000  # items; a longer list is treated as data, and is sent as a whole
_MISSING = object()


class _Kept(enum.Enum):
    KEPT = enum.auto()


KEPT = _Kept.KEPT
"""In place of an entry that can't be sent: the receiver keeps the entry that it has."""

# Attributes of every nn.Module that torch maintains; the dictionaries of parts are walked.
_TORCH_OWN = frozenset(nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_DATA = (np.generic, torch.dtype, torch.device, DataLoader, Dataset, Sampler)
_ITEMS = (list, deque, set, bytearray)

_OTHERS = ("torch._", "logging", "threading", "multiprocessing")  # modules whose objects contain no user data


def shared_parts(roots: Mapping[str, object], apart: Mapping[int, object]) -> dict[str, Any]:
    """Return all parts of ``roots`` whose identity matters, each once, by path.

    Parameters
    ----------
    roots : mapping of str to object
        Objects by the names that paths start with.
    apart : mapping of int to object
        Objects to leave out, by their id: neither they nor their contents are parts.
    """
    # ``nested`` walks trees only. Here, objects may refer to each other in cycles, and the walk follows attributes,
    # closures and functions' arguments, too. It is breadth first, so that each part gets its shortest path.
    found: dict[str, Any] = {}
    seen = set(apart)
    queue = deque(roots.items())
    while queue and len(found) < _MOST_PARTS:
        path, obj = queue.popleft()
        if id(obj) in seen or isinstance(obj, (*_LEAVES, *_DATA)):
            continue
        seen.add(id(obj))
        if isinstance(obj, (np.ndarray, torch.Generator, np.random.Generator)):
            if _contents(obj) is not None:
                found[path] = obj
        elif type(obj).__module__.startswith(_OTHERS):
            if isinstance(obj, nn.Module):  # a wrapper by torch.compile: its only child is the original module
                queue.extend((f"{path}.{i}", part) for i, part in enumerate(obj.children()))
        elif isinstance(obj, torch.Tensor):
            found[path] = obj
        elif isinstance(obj, (types.FunctionType, types.MethodType, functools.partial, tuple)):
            if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:  # others are sent by their names
                found[path] = obj
            # Only the parts can be written to.
            queue.extend((path + suffix, part) for suffix, part in _changeable_parts(obj))
        elif isinstance(obj, types.CellType):
            contents = _contents(obj)
            if not contents or not isinstance(contents[0], _DATA):
                found[path] = obj
                queue.extend((f"{path}.contents", part) for part in contents)
        elif (contents := _contents(obj)) is not None:
            found[path] = obj
            if type(obj).__module__ != "builtins" and isinstance(obj, (*_ITEMS, dict)) and hasattr(obj, "__dict__"):
                queue.append((f"{path}.__dict__", vars(obj)))  # the attributes beside the items
            items = contents.items() if isinstance(contents, dict) else enumerate(contents)
            # Keys may be parameters, so the position of a key identifies it on both sides.
            queue.extend((f"{path}.{key if isinstance(key, str) else i}", v) for i, (key, v) in enumerate(items))
    return found


def _changeable_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, tuple):
        yield from ((f".{i}", part) for i, part in enumerate(obj[:_LONG]))
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, functools.partial):
        yield from ((f".args.{i}", part) for i, part in enumerate(obj.args))
        yield ".keywords", obj.keywords
        yield ".func", obj.func
    else:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f".{name}", cell
        defaults = {".__defaults__": obj.__defaults__, ".__kwdefaults__": obj.__kwdefaults__}
        yield from ((name, values) for name, values in defaults.items() if values)


def _contents(obj: Any, most: float = _LONG) -> Any:
    """Return the contents of an object, which may be overwritten; ``None`` for a value without contents.

    Containers of more than ``most`` items count as data, without contents.

    They are a dictionary of items or attributes, a list of items, or a tuple with the object's whole state.
    """
    if isinstance(obj, _ITEMS):
        return list(obj) if len(obj) <= most else None
    if isinstance(obj, dict):
        return dict(obj) if len(obj) <= most or any(isinstance(key, torch.Tensor) for key in obj) else None
    if isinstance(obj, types.FunctionType):
        return dict(vars(obj))
    if isinstance(obj, types.CellType):
        return contents_of_cell(obj)
    if isinstance(obj, np.ndarray):
        return (obj.view(),) if type(obj) is np.ndarray else None  # a view, since the array itself is a reference
    if isinstance(obj, torch.Generator):
        return None if obj is torch.default_generator else (obj.get_state(),)
    if isinstance(obj, np.random.Generator):
        return (obj.bit_generator.state,)
    if isinstance(obj, Optimizer):
        return {name: v for name, v in optimizer_state(obj, hooks=False).items() if vars(obj).get(name, _MISSING) is v}
    if (state := kept_state(obj)) is None:
        return None
    attributes, kept = own_attributes(obj), attributes_in(state)
    if hasattr(type(obj), "__setstate__"):
        # Only the class can read a state with other names or values than its attributes. None replaces, for example,
        # an open file, which is local to one process.
        as_it_is = all(
            name in attributes and (value is None or attributes[name] is value) for name, value in kept.items()
        )
        if not (attributes and kept) or not (as_it_is or isinstance(obj, nn.Module)):
            return (state,)
    torch_own = _TORCH_OWN if isinstance(obj, nn.Module) else ()
    return {
        name: value
        for name, value in kept.items()
        # Attributes that __getstate__ omits or replaces are local to one process.
        if name not in torch_own and attributes.get(name, _MISSING) is value
    }


def fingerprints(parts: Mapping[str, Any], known: list[object]) -> dict[str, Fingerprint | None]:
    """Return each part's fingerprint, for :func:`changed_parts`; ``None`` for a part that can't be pickled."""
    return {
        path: fingerprint(_contents(obj), known, fixed=True)
        for path, obj in parts.items()
        if not isinstance(obj, torch.Tensor)
    }


def fingerprint(value: Any, known: list[object], *, fixed: bool = False) -> Fingerprint | None:
    """Return a fingerprint to detect changes of a value; ``None`` if it can't be pickled.

    With ``fixed``, the fingerprint describes the value now; otherwise, large memory is read only at the comparison.
    """
    try:
        found = Fingerprint(value, known)
    except Exception:  # whatever a user's __reduce__ raises
        return None
    return found.fixed() if fixed else found


def changed_parts(
    parts: Mapping[str, Any], before: Mapping[str, Fingerprint | None], known: list[object]
) -> dict[str, Any]:
    """Return the contents of changed parts, for :func:`put_into`, and the values of all tensors, on the CPU."""
    changed: dict[str, Any] = {}
    for path, obj in parts.items():
        if isinstance(obj, torch.Tensor):
            if obj.is_meta:  # it has no values, as in a template for torch.func.functional_call
                continue
            changed[path] = (obj.detach().cpu(), obj.requires_grad)
            continue
        now = _contents(obj, math.inf)  # it may have grown
        mark = fingerprint(now, known)
        if mark is not None and mark != before.get(path):
            changed[path] = now
        elif mark is None and before.get(path) is not None:
            if not isinstance(now, dict):
                warn(f"{path} can no longer be pickled, so your process keeps the old value.")
                continue
            # Check the entries one by one.
            can = {key for key, value in now.items() if fingerprint((key, value), known) is not None}
            others = ", ".join(_shown_key(key) for key in now if key not in can)
            warn(f"{path}: {others} can no longer be pickled, so your process keeps the old value.")
            changed[path] = {key: value if key in can else KEPT for key, value in now.items()}
    return changed


def _shown_key(key: object) -> str:
    """Return a key as a warning shows it; an optimizer's state has parameters as keys."""
    return f"a parameter of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else str(key)


def put_into(parts: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Write the result of :func:`changed_parts` into the parts of the same paths."""
    for path, contents in changed.items():
        obj = parts[path]
        if isinstance(obj, torch.Tensor):
            _put_tensor(obj, *contents)
        elif isinstance(obj, _ITEMS):
            obj.clear()
            obj.update(contents) if isinstance(obj, set) else obj.extend(contents)
        elif isinstance(obj, dict):
            old = dict(obj)
            obj.clear()  # the order of the keys may have changed
            for key, value in contents.items():  # Counter.update would add
                if value is not KEPT:
                    obj[key] = value
                elif key in old:
                    obj[key] = old[key]
        elif isinstance(contents, tuple):
            _put_state(obj, *contents)
        else:
            _put_attributes(obj, contents)
    for obj in parts.values():
        if isinstance(obj, Optimizer):
            _state_to_parameters(obj)


def _put_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    slots, contents = slot_names(type(obj)), _contents(obj)
    if isinstance(contents, dict):  # otherwise, __getstate__ replaces values only on this side
        for name in contents.keys() - attributes.keys():  # deleted on the other side
            object.__delattr__(obj, name) if name in slots else vars(obj).pop(name, None)
        # An attribute for which __getstate__ puts None is local to this process.
        local = own_attributes(obj).keys() - contents.keys()
        attributes = {name: value for name, value in attributes.items() if value is not None or name not in local}
    for name, value in attributes.items():
        if value is KEPT:
            continue
        if name in slots:
            object.__setattr__(obj, name, value)  # of frozen dataclasses, too
        else:
            vars(obj)[name] = value


def _put_state(own: Any, *contents: Any) -> None:
    if isinstance(own, types.CellType):
        if contents:
            own.cell_contents = contents[0]
        return
    (state,) = contents
    if isinstance(own, torch.Generator):
        own.set_state(state)
    elif isinstance(own, np.random.Generator):
        own.bit_generator.state = state
    elif not isinstance(own, np.ndarray):
        own.__setstate__(state)
    elif own.flags.writeable and own.shape == state.shape and own.dtype == state.dtype:
        own[...] = state


def _put_tensor(own: torch.Tensor, value: torch.Tensor, requires_grad: bool) -> None:
    expanded = own.layout == torch.strided and 0 in own.stride()  # several elements share one memory location
    with torch.no_grad():
        if own.shape == value.shape and own.dtype == value.dtype and not own.is_inference() and not expanded:
            own.copy_(value)
        elif not torch.nn.parameter.is_lazy(own):
            own.data = value.to(own.device)
    if own.is_leaf and own.requires_grad != requires_grad:
        own.requires_grad_(requires_grad)


def _state_to_parameters(optimizer: Optimizer) -> None:
    """Move state from a rank's device to its parameter's device; step counters remain where torch puts them."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict) and parameter.device.type != "cpu":
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step" and value.device != parameter.device:
                    state[key] = value.to(parameter.device)
