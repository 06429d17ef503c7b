"""Detect changes of a loader between passes: another dataset, sampler or batch size, or other lengths."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from io import IOBase
from typing import Any

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainloop.data.loader.loaders import has_own_length, is_stream, plain_batches, users_worker_init
from trainloop.data.loader.parts import parts_of_loader
from trainloop.data.order.columns import SplitBatches
from trainloop.data.order.orders import length_of

# Classes of torch whose attributes determine what is read; for other classes, only their lengths are compared, since an
# attribute of the user's may change with every sample.
_TORCHS = (
    *(BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(ConcatDataset, Subset, TensorDataset),
)
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
# The loop sets them: the epoch in each epoch, and a function around the user's, which is compared separately.
_OWN = frozenset({"epoch", "worker_init_fn"})
_PLAIN = (int, float, bool, str)


class LoaderMarks:
    """What a loader was when its feed was made, to detect what callbacks and users have changed since.

    The marks refer to the objects that they compare, so that a new object is never mistaken for an old one.

    Parameters
    ----------
    loader
        A ``DataLoader`` of any kind, or any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._attributes: list[tuple[dict[str, Any], int, dict[str, Any]]] = []
        self._lengths: list[tuple[Any, int | None]] = []
        self._worker_init: tuple[DataLoader[Any], Any] | None = None
        if isinstance(loader, SplitBatches):
            self._note_attributes(loader)
            loader = loader.loader
        if isinstance(loader, DataLoader):
            self._note_attributes(loader, "_DataLoader__multiprocessing_context")
            self._note_parts(loader)
            self._worker_init = loader, users_worker_init(loader)

    def _note_attributes(self, part: Any, *further: str) -> None:
        attributes = vars(part)
        kept = {name: v for name, v in attributes.items() if (name[0] != "_" and name not in _OWN) or name in further}
        self._attributes.append((attributes, len(attributes), kept))

    def _note_parts(self, loader: DataLoader[Any]) -> None:
        batches = plain_batches(loader)
        sized: list[Any] = [] if batches is None else [batches.sampler]
        sized += [] if is_stream(loader) else [loader.dataset]
        self._lengths = [(part, length_of(part)) for part in sized]
        seen: set[int] = set()
        parts: list[Any] = [loader.batch_sampler, loader.sampler, loader.dataset]
        while parts:
            part = parts.pop()
            if type(part) in _TORCHS and id(part) not in seen:
                seen.add(id(part))
                self._note_attributes(part)
                parts += [getattr(part, name) for name in _PARTS if hasattr(part, name)]
                parts += getattr(part, "datasets", ())

    def changed(self, *, by_epoch: bool = True) -> bool:
        """Return True if the loader would be read in another way now. Values of data are not compared.

        With ``by_epoch=False``, ignore lengths if a part has ``set_epoch``, which the loop calls.
        """
        for attributes, count, kept in self._attributes:
            if len(attributes) != count:
                return True
            if all(map(operator.is_, map(attributes.get, kept), kept.values())):  # the usual case first
                continue
            for name, before in kept.items():
                now = attributes.get(name)
                if now is not before and not (type(now) is type(before) and type(now) in _PLAIN and now == before):
                    return True
        if self._worker_init is not None:
            loader, init = self._worker_init
            if users_worker_init(loader) is not init:
                return True
        if not by_epoch and any(callable(getattr(part, "set_epoch", None)) for part, _ in self._lengths):
            return False
        return any(length_of(part) != length for part, length in self._lengths)


class KeptIterators:
    """Detect that a loader or its stream keeps an iterator, so that an epoch continues where the last one ended.

    Parameters
    ----------
    loaders
        The user's loader, which may be any iterable of batches, and the copy of it that is read.
    name : str
        Name of the loader in messages.
    """

    def __init__(self, loaders: Iterable[Any], name: str) -> None:
        self._parts: dict[str, Any] = {}
        for loader in loaders:
            for path, part in parts_of_loader(loader).items():
                is_loader = part is loader or isinstance(part, DataLoader)
                if is_loader and type(part) is not DataLoader and not _repeats(part):
                    self._parts[path.replace("loader", name, 1)] = part
            if is_stream(loader):
                self._parts[f"{name}.dataset"] = loader.dataset
        self._before: dict[str, Callable[[], Any]] = {}

    def after_epoch(self) -> str:
        """Return a warning if an attribute has the iterator that it had at the last epoch's end; empty if none has."""
        if not self._parts or any(hasattr(part, "load_state_dict") for part in self._parts.values()):
            return ""
        own = {
            f"{name}.{attribute}": (part, value)
            for name, part in self._parts.items()
            for attribute, value in getattr(part, "__dict__", {}).items()
            # torch's own attribute is the iterator of persistent workers, which begins again
            if hasattr(type(value), "__next__") and not isinstance(value, IOBase) and attribute != "_iterator"
        }
        kept = [name for name, (_, value) in own.items() if name in self._before and self._before[name]() is value]
        self._before = {name: _reference(value) for name, (_, value) in own.items()}
        if not kept:
            return ""
        return (
            f"{kept[0]} is the same iterator in each epoch, so an epoch continues where the last one ended. "
            "Checkpoints do not contain this position, and it stays in ranks, or in the copy of a loader that is read "
            "with a seed: a resumed run, and then another fit, begin with the first batch. Define state_dict and "
            f"load_state_dict in {type(own[kept[0]][0]).__name__} for the position, or create the iterator in __iter__."
        )


def _repeats(loader: Any) -> bool:
    """Return True for a loader of whole passes of one iterator, which never ends, such as timm's or ultralytics'."""
    if is_stream(loader) or not has_own_length(loader):
        return False
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    of_a_pass = [length_of(batches), length_of(getattr(batches, "sampler", None))]  # the endless one may have no length
    return next((length for length in of_a_pass if length is not None), None) == length_of(loader)


def _reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference if possible: a loader may have replaced an iterator that has workers."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
