"""Nested containers: take a batch, a prediction or a state apart, and rebuild it; pack arrays for checkpoints.

A *container* is a mapping, a list, a tuple, a named tuple or a dataclass instance; anything else, including strings,
sets, tensors and arrays, is one value. Each function here handles one level; the caller continues with the parts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ARRAY = "__array__"
_MOST = 1000  # items; a container with more is data


def parts_of(value: Any) -> list[Any] | None:
    """Return the parts of a container, in its own order; None for a single value.

    Examples
    --------
    >>> parts_of({"x": 1, "y": [2, 3]}), parts_of("text")
    ([1, [2, 3]], None)
    """
    if isinstance(value, (list, tuple)):
        return list(iter(value))  # list(value) would ask for the length, which e3nn's Irreps refuses
    if isinstance(value, Mapping):
        return [value[key] for key in keys_of(value)]
    if _is_record(value):
        return [getattr(value, name) for name in _fields(value)]
    return None


def keys_of(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a mapping; iterating over it may yield something else: a tensordict yields its rows."""
    return list(mapping.keys())


def stored_items(container: Any) -> list[Any]:
    """Return the items of a list, tuple, set or deque, or the values of a dict, by the builtin class's own methods.

    Those of a subclass may compute, or refuse: e3nn's ``Irreps``, a tuple, has no length.
    """
    if isinstance(container, dict):
        return list(dict.values(container))
    base = next(kind for kind in (list, tuple, set, deque) if isinstance(container, kind))
    return list(base.__iter__(container))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, or the value itself if it is a tensor.

    Examples
    --------
    >>> [tensor.item() for tensor in tensors_of({"x": torch.tensor(1), "y": ["text", torch.tensor(2)]})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
        return
    for part in parts_of(value) or ():
        yield from tensors_of(part)


def paths_of(value: Any) -> list[str]:
    """Return the path from the container to each of :func:`parts_of`, for messages and as names.

    Examples
    --------
    >>> paths_of({"x": 1, "y": [2, 3]}), paths_of([2, 3])
    (["['x']", "['y']"], ['[0]', '[1]'])
    """
    if isinstance(value, (list, tuple)):
        return [f"[{i}]" for i, _ in enumerate(value)]
    if isinstance(value, Mapping):
        return [f"[{key!r}]" for key in keys_of(value)]
    return [f".{name}" for name in _fields(value)]


def with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Copy a container with other parts; its type and other attributes are kept.

    Parameters
    ----------
    value : container
        The container; it is not changed.
    parts : sequence
        The new parts, in the number and order of :func:`parts_of`.

    Returns
    -------
    container
        A dict, list or tuple if the type can't be built from its parts (e.g. ``torch.Size`` of tensors). A
        dataclass's ``__post_init__`` is not called again.
    """
    if isinstance(value, tuple):
        if hasattr(value, "_make"):
            return value._make(parts)
        return _of_type(type(value), tuple(parts))
    if isinstance(value, list):
        return _of_type(type(value), list(parts))
    if isinstance(value, Mapping):
        content = dict(zip(keys_of(value), parts, strict=True))
        if not isinstance(value, (dict, UserDict)):
            # Don't write to a shallow copy: it may share the object that contains its items.
            return _of_type(type(value), content)
        changed = copy.copy(value)  # keeps the type, such as defaultdict or BatchEncoding
        for key, part in content.items():
            changed[key] = part
        return changed
    changed = copy.copy(value)
    for name, part in zip(_fields(value), parts, strict=True):
        object.__setattr__(changed, name, part)  # works for a frozen dataclass, too; no other code has this copy yet
    return changed


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Copy a container with ``function`` applied to each part; return a single value unchanged.

    Examples
    --------
    >>> def doubled(value):
    ...     return 2 * value if isinstance(value, int) else map_parts(doubled, value)
    >>> doubled({"a": 1, "b": (2, [3, None])})
    {'a': 2, 'b': (4, [6, None])}
    """
    # The three usual types first, for speed: this runs for every batch.
    kind = type(value)
    if kind is list:
        return [function(part) for part in value]
    if kind is tuple:
        return tuple([function(part) for part in value])
    if kind is dict:
        return {key: function(part) for key, part in value.items()}
    parts = parts_of(value)
    return value if parts is None else with_parts(value, [function(part) for part in parts])


def map_together(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """Combine several containers of the same structure part by part; if they are single values, return the first.

    Parameters
    ----------
    function : callable
        Called with a list that has one part of each container.
    values : sequence
        At least one container. Mappings have the keys of the first container.

    Raises
    ------
    ValueError
        If containers differ in their number of parts.

    Examples
    --------
    >>> map_together(sum, [{"a": 1, "b": 2}, {"b": 20, "a": 10}])
    {'a': 11, 'b': 22}
    """
    first = values[0]
    if isinstance(first, Mapping):
        return with_parts(first, [function([value[key] for value in values]) for key in keys_of(first)])
    columns = [parts_of(value) for value in values]
    if columns[0] is None:
        return first
    return with_parts(first, [function(list(parts)) for parts in zip(*columns, strict=True)])


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[str]:
    """Return the names of the fields that are set; a field with ``init=False`` may not be."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _of_type(kind: Any, content: Any) -> Any:
    if type(content) is kind:
        return content
    try:
        return kind(content)
    except Exception:  # a type's constructor may require anything
        return content


# -- what else an object consists of -----------------------------------------------------------------------------------


def own_attributes(obj: object) -> dict[str, Any]:
    """Return the attributes in an object's ``__dict__`` and in its slots."""
    slots = {name: getattr(obj, name) for name in slot_names(type(obj)) if hasattr(obj, name)}
    return {**slots, **getattr(obj, "__dict__", {})}


def slot_names(kind: type) -> list[str]:
    """Return the names of a class's slots; empty if the class has a ``__reduce__`` of its own, as paths have."""
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return []
    with_slots = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for own in with_slots for name, v in own.items() if isinstance(v, MemberDescriptorType)]


def items_of(container: Any) -> dict[Any, Any]:
    """Return the items of a container of any kind, by name; empty for any other object.

    Examples
    --------
    >>> items_of({"a": 1}), items_of(deque([2])), items_of(SimpleNamespace(b=3)), items_of("text")
    ({'a': 1}, {0: 2}, {'b': 3}, {})
    """
    if isinstance(container, SimpleNamespace):
        return dict(vars(container))
    # A subclass may have no length, such as e3nn's Irreps.
    kind: Any = next((kind for kind in (list, tuple, deque, dict) if isinstance(container, kind)), None)
    if kind is not None and kind.__len__(container) > _MOST:
        return {}
    parts = list(container) if isinstance(container, deque) else parts_of(container)
    if not parts:
        return {}
    if isinstance(container, Mapping):
        return dict(zip(keys_of(container), parts, strict=True))
    is_sequence = isinstance(container, (list, tuple, deque))
    names = range(len(parts)) if is_sequence else [path.lstrip(".") for path in paths_of(container)]
    return dict(zip(names, parts, strict=True))


def entries_of(criterion: Any) -> dict[Any, Any]:
    """Return what a criterion consists of, by name; empty for a module, and for another object with attributes.

    A model that a function refers to is left out: it is trained as the model, not as a part of the criterion.

    Examples
    --------
    >>> loss = torch.nn.L1Loss()
    >>> list(entries_of({"a": loss})), list(entries_of(partial(loss, target=1))), list(entries_of(loss.forward))
    (['a'], ['func', 'target'], ['self'])
    """
    if isinstance(criterion, (FunctionType, MethodType, partial)):
        return {name: one for name, one in _referred(criterion).items() if not hasattr(one, "get_predictions")}
    return items_of(criterion)


def leaves_of(criterion: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules and other objects without :func:`entries_of` that a criterion consists of, each once, by path.

    Examples
    --------
    >>> [path for path, _ in leaves_of({"a": abs, "b": [max, 0.5]}, "criterion")]
    ['criterion[a]', 'criterion[b][0]', 'criterion[b][1]']
    """
    seen, left = set[int](), [(path, criterion)]
    while left:
        path, one = left.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            entries = entries_of(one)
            left = [(f"{path}[{name}]", part) for name, part in entries.items()] + left
            if not entries:
                yield path, one


def _referred(function: Any) -> dict[Any, Any]:
    if isinstance(function, MethodType):
        return {"self": function.__self__}
    if isinstance(function, partial):
        return {"func": function.func, **dict(enumerate(function.args)), **function.keywords}
    found = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            found[name] = cell.cell_contents
    return found


# -- arrays in checkpoints ---------------------------------------------------------------------------------------------


def packed(state: Any) -> Any:
    """Return a state with numpy arrays as marked tensors: checkpoints contain tensors only."""
    if isinstance(state, np.ndarray) and state.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(state.astype(state.dtype.newbyteorder("=")))}
    return map_parts(packed, state)


def unpacked(state: Any) -> Any:
    """Invert :func:`packed`."""
    if type(state) is dict and set(state) == {_ARRAY}:
        return state[_ARRAY].numpy().copy()
    return map_parts(unpacked, state)
