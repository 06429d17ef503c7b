"""Compute a checksum of the names and positions that a loader's datasets hold, to compare it between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainloop._support.rng import derive_seed
from trainloop.data.loader.parts import datasets_of, parts_of_loader
from trainloop.data.order.orders import length_of

_MOST = 200  # values of one list: a shuffled list differs in nearly all of them


def contents_of(loader: Any) -> int:
    """Return a checksum of what a loader's datasets hold for each sample; -1 if it is unknown.

    Only texts count (of a path, the file's name), the indices of a ``Subset``, the labels of a frame's rows, and
    distinct integers in a list of samples: they are the same on ranks that have the same data. Other values may differ
    a little, or belong to one rank.

    Examples
    --------
    >>> contents_of(DataLoader(["a/1.png", "a/2.png"])) == contents_of(DataLoader(["b/1.png", "b/2.png"])) != -1
    True
    >>> contents_of(DataLoader([0.5, 0.6]))
    -1
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return -1
    found = [*chain.from_iterable(map(_held_by, datasets_of(parts_of_loader(loader)).values()))]
    return derive_seed(*found) if found else -1


def _held_by(dataset: Any) -> list[int | str]:
    if isinstance(dataset, (list, tuple)):
        return _distinctive(dataset)
    length = length_of(dataset)
    found: list[int | str] = []
    for value in list(getattr(dataset, "__dict__", {}).values()):
        with suppress(Exception):  # of whatever methods the value's class has
            one = _sequence(value)
            # Other integers may be drawn for each sample, such as seeds.
            are_positions = isinstance(dataset, Subset) or hasattr(value, "iloc")
            items = _distinctive(one) if one is not None and len(one) == length else []
            found += [item for item in items if are_positions or isinstance(item, str)]
    return found


def _sequence(value: Any) -> Any:
    """Return a value that may have an entry for each sample, as something that can be sliced; or None."""
    if isinstance(value, (np.ndarray, Tensor)):
        return value if value.ndim == 1 else None
    if hasattr(value, "iloc"):  # a frame or series of pandas: the labels of its rows
        return value.index
    return value if isinstance(value, (list, tuple, range)) else None


def _distinctive(values: Any) -> list[int | str]:
    some = values[:: -(-len(values) // _MOST) or 1]
    items: Sequence[Any] = some.tolist() if hasattr(some, "tolist") else some
    if len(items) > 1 and all(isinstance(item, (int, np.integer)) for item in items):
        numbers = [int(item) for item in items]
        return [*numbers] if len(set(numbers)) == len(numbers) else []
    return [os.path.basename(text) for item in items for text in _texts(item)]


def _texts(item: Any) -> list[str]:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else (item,)
    return [str(part) for part in parts if isinstance(part, (str, os.PathLike))]
