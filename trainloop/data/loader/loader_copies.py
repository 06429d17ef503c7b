"""Copies of a loader with some attributes changed, and a loader's persistent workers."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from trainloop._launch.rank_process import started_by_launch
from trainloop._support.rng import derive_seed
from trainloop._support.user_line import warn
from trainloop.data.order.columns import SplitBatches

Loader = TypeVar("Loader", bound="DataLoader[Any]")


def copy_loader(loader: Loader, **changes: Any) -> Loader:
    """Copy a loader, of any class, with some attributes changed.

    The attributes are copied, since a subclass may have computed them from constructor arguments that are not stored.
    ``DataLoader`` forbids setting some attributes later, but only because its constructor has derived other attributes
    from them. The caller replaces the derived attributes, too. Workers of the copy do not overtake each other, since
    batches are identified by the order in which they are requested.
    """
    copy = object.__new__(type(loader))
    copy.__dict__.update(loader.__dict__)
    # The user's loader keeps its persistent workers and its counts.
    copy.__dict__.update(_iterator=None, _IterableDataset_len_called=None)
    copy.__dict__.update({"in_order": True} if hasattr(loader, "in_order") else {}, **changes)
    if copy.num_workers > 0 and copy.multiprocessing_context is None and _spawned_by_inheritance():
        copy.multiprocessing_context = multiprocessing.get_all_start_methods()[0]
    return copy


def with_workers(loader: Any, num_workers: int) -> Any:
    """Return a copy of the loader with another number of workers; with 0, options for workers are reset."""
    if isinstance(loader, SplitBatches):
        return SplitBatches(with_workers(loader.loader, num_workers), loader.dim)
    if num_workers:
        return copy_loader(loader, num_workers=num_workers)
    context = {"_DataLoader__multiprocessing_context": None}
    return copy_loader(loader, num_workers=0, timeout=0, prefetch_factor=None, persistent_workers=False, **context)


def persistent_workers(loader: Any) -> Any:
    """Return the iterator of a loader's running persistent workers; None if no workers are running.

    While the workers are running, a pass draws no base seed.
    """
    loader = loader.loader if isinstance(loader, SplitBatches) else loader
    return loader._iterator if keeps_workers(loader) else None


def keeps_workers(loader: Any) -> bool:
    """Return True if a loader's workers are persistent."""
    loader = loader.loader if isinstance(loader, SplitBatches) else loader
    return isinstance(loader, DataLoader) and loader.persistent_workers


class WorkersDataset:
    """Warn of attributes of a dataset that have changed since persistent workers started, which have copies of it.

    Parameters
    ----------
    name : str
        The user's name for the loader.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._at_start: dict[str, Any] = {}
        self._warned = False

    def begin_pass(self, loader: Any, dataset: Any) -> None:
        """Call it before a pass over ``loader``, which reads ``dataset`` in this process's copy."""
        if not keeps_workers(loader):
            return
        now = {
            name: value
            for name, value in getattr(dataset, "__dict__", {}).items()
            if value is None or isinstance(value, (bool, int, float, str))
        }
        if persistent_workers(loader) is None:
            self._at_start = now
            return
        changed = [name for name, value in now.items() if repr(self._at_start.get(name, value)) != repr(value)]
        if changed and not self._warned:
            self._warned = True
            one = changed[0]
            warn(
                f"{self._name}.dataset.{one} was {self._at_start[one]!r} when the loader's persistent workers started, "
                f"and is {now[one]!r} now. Each worker has a copy of the dataset, in which it does not change. Use "
                "persistent_workers=False, or give the dataset a method set_epoch, for which new workers are started."
            )


@contextmanager
def isolated_base_seed(loader: Any) -> Iterator[None]:
    """Let a loader draw its workers' base seed from a generator that the loader's order does not use."""
    loader = loader.loader if isinstance(loader, SplitBatches) else loader
    if not isinstance(loader, DataLoader):
        yield
        return
    seed = derive_seed("workers", zlib.crc32(torch.get_rng_state().numpy().data))
    before, loader.generator = loader.generator, torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        loader.generator = before


def end_workers(loader: Any) -> None:
    """End a loader's persistent workers now.

    Workers would end by themselves when nothing refers to them. But if a traceback or a reference cycle refers to them,
    they end only when the garbage collector finds them. If the collector has closed their queues by then, torch waits
    several seconds for each worker, and kills it.
    """
    workers = persistent_workers(loader)
    if workers is not None:
        loader._iterator = None
        end_workers_of(workers)


def end_workers_of(iterator: Any) -> None:
    """End the workers of a loader's iterator, now; do nothing for an iterator of another kind."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _spawned_by_inheritance() -> bool:
    """Return True if workers would be spawned only because this process was spawned.

    In Python, children inherit their process's start method by default. Spawned workers import everything
    again (seconds), copy the data, and need it to be picklable. Outside of ranks, the same loader forks its workers,
    without these costs.
    """
    if multiprocessing.parent_process() is None:
        return False

    # Our ranks use the caller's start method.
    return not started_by_launch() and multiprocessing.get_start_method() != multiprocessing.get_all_start_methods()[0]
