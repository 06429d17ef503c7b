"""A loader like another in all but a few of its parts."""

from __future__ import annotations

import multiprocessing
from typing import Any, TypeVar

from torch.utils.data import DataLoader

Loader = TypeVar("Loader", bound="DataLoader[Any]")


def twin(loader: Loader, **changes: Any) -> Loader:
    """A loader that is like another in all but ``changes``, whatever its class and that class's own arguments.

    Attributes are copied rather than the constructor called again: a subclass may have computed them from arguments
    that are gone. ``DataLoader`` forbids to set some of them later, but only because its own constructor has drawn
    conclusions from them, which the caller replaces too.
    """
    copy = object.__new__(type(loader))
    copy.__dict__.update(loader.__dict__)
    # The user's own persistent workers, and what it counted, stay with the user's loader.
    copy.__dict__.update(_iterator=None, _IterableDataset_len_called=None)
    copy.__dict__.update(changes)
    if copy.num_workers > 0 and copy.multiprocessing_context is None and _spawned_by_inheritance():
        copy.multiprocessing_context = multiprocessing.get_all_start_methods()[0]
    return copy


def with_workers(loader: Loader, num_workers: int) -> Loader:
    """The loader with another number of workers; with none, without what only workers have."""
    if num_workers:
        return twin(loader, num_workers=num_workers)
    context = {"_DataLoader__multiprocessing_context": None}
    return twin(loader, num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False, **context)


def _spawned_by_inheritance() -> bool:
    """Whether workers would be spawned only because this process, a rank, was.

    Python hands the method that started a process on to its children as their default. Spawned workers each import
    everything anew (seconds), get a copy of the data, and can't be sent what forked ones, which the same loader has
    outside of ranks, simply have.
    """
    platforms_own = multiprocessing.get_all_start_methods()[0]
    return multiprocessing.parent_process() is not None and multiprocessing.get_start_method() != platforms_own
