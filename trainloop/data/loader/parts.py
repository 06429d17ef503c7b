"""Find what a loader consists of: its samplers, the loaders within a loader of the user, and its datasets."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainloop._support.keywords import why_not
from trainloop._support.rng import as_generator
from trainloop.data.order.columns import SplitBatches

# Lists of samplers are shorter; lists of indices may be long.
_MOST_ITEMS = 64
_CONTAINERS = (list, tuple, dict, deque, UserDict, UserList)


def has_state(thing: Any) -> bool:
    """Return True if an object has the methods ``state_dict()`` and ``load_state_dict``."""
    if thing is None or isinstance(thing, (type, nn.Module)):
        return False
    save, load = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    # Mosaic's and litdata's methods require the number of samples yielded, which only their own loader knows.
    return callable(save) and callable(load) and not why_not(save)


def parts_of_loader(loader: Any) -> dict[str, Any]:
    """Return a loader, its samplers, the samplers inside these, and the loaders that a loader of the user has.

    Of ``SplitBatches``, the loader is the one that it splits.
    """
    parts: dict[str, Any] = {}
    _add_loader(parts, "loader", loader.loader if isinstance(loader, SplitBatches) else loader)
    return parts


def _add_loader(parts: dict[str, Any], name: str, loader: Any) -> None:
    if _is_among(loader, parts):
        return
    parts[name] = loader
    for kind in ("sampler", "batch_sampler"):
        _add_samplers(parts, kind if name == "loader" else f"{name}.{kind}", getattr(loader, kind, None))
    if not isinstance(loader, DataLoader) and not has_state(loader):
        for key, one in attributes_of(loader).items():
            if isinstance(one, DataLoader) or _is_sampler(one):  # or another loader of the user's own
                _add_loader(parts, f"{name}.{key}", one)


def _is_among(one: Any, parts: Mapping[str, Any]) -> bool:
    return id(one) in map(id, parts.values())


def datasets_of(parts_of_it: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's dataset, and the datasets that it has as ``dataset`` or ``datasets``, by attribute.

    ``parts_of_it``: the result of :func:`parts_of_loader`.
    """
    parts: dict[str, Any] = {}
    loaders = [(name, one) for name, one in parts_of_it.items() if name == "loader" or isinstance(one, DataLoader)]
    left = [(f"{name}.dataset".removeprefix("loader."), getattr(one, "dataset", None)) for name, one in loaders]
    while left:
        name, dataset = left.pop()
        if dataset is None or _is_among(dataset, parts):
            continue
        parts[name] = dataset
        several = getattr(dataset, "datasets", None)
        if isinstance(several, _CONTAINERS):
            items = several.items() if isinstance(several, Mapping) else enumerate(several)
            left += [(f"{name}.datasets[{key}]", one) for key, one in items]
        left.append((f"{name}.dataset", getattr(dataset, "dataset", None)))
    return parts


def _add_samplers(parts: dict[str, Any], name: str, sampler: Any) -> None:
    """Add a sampler, and those that it has: as ``sampler``, or as other attributes of a class of the user."""
    if sampler is None or _is_among(sampler, parts):
        return
    parts[name] = sampler
    inner = {"sampler": getattr(sampler, "sampler", None)}
    if not type(sampler).__module__.startswith("torch.") and not has_state(sampler):
        inner.update((key, one) for key, one in attributes_of(sampler).items() if _is_sampler(one))
    for key, one in inner.items():
        _add_samplers(parts, f"{name}.{key}", one)


def _is_sampler(value: Any) -> bool:
    """Return True for PyTorch's samplers, and objects that can only be iterated, which are samplers within a sampler.

    It is no dataset or loader, though, whose order does not determine that of the sampler.
    """
    if isinstance(value, Sampler):
        return True
    only_iterated = hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__")
    others = (Iterator, Dataset, DataLoader, nn.Module)
    return only_iterated and hasattr(value, "__dict__") and not isinstance(value, others)


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return an object's attributes, and the samplers, loaders and generators in lists, tuples and dicts among them."""
    found: dict[str, Any] = {}
    for name, value in getattr(holder, "__dict__", {}).items():
        found[name] = value
        found.update(_parts_in(name, value))
    return {name: value for name, value in found.items() if value is not None}


def _parts_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the samplers, loaders and generators in nested lists, tuples and dicts by name.

    Only the first containers and the first items of each are read: the others are data.
    """
    containers = deque([(name, value)] if isinstance(value, _CONTAINERS) else [])
    for _ in range(_MOST_ITEMS):
        if not containers:
            return
        name, value = containers.popleft()
        for key, item in islice(value.items() if isinstance(value, Mapping) else enumerate(value), _MOST_ITEMS):
            if isinstance(item, _CONTAINERS):
                containers.append((f"{name}[{key}]", item))
            elif isinstance(item, DataLoader) or _is_sampler(item) or as_generator(item):
                yield f"{name}[{key}]", item
