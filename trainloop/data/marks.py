"""Detect changes of a loader between passes: another dataset, sampler or batch size, or other lengths."""

from __future__ import annotations

from collections.abc import Iterator
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

from trainloop.data.columns import SplitBatches
from trainloop.data.loaders import is_stream, plain_batches
from trainloop.data.orders import length_of

__all__ = ["LoaderMarks"]

# Classes of torch whose attributes determine what is read; for other classes, only their lengths are compared, since an
# attribute of the user's may change with every sample.
_TORCHS = (
    *(BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(ConcatDataset, Subset, TensorDataset),
)
_PARTS = ("batch_sampler", "sampler", "dataset", "data_source")
# Set in each epoch, and read in each epoch.
_OWN = frozenset({"epoch", "worker_init_fn"})


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
        self._marks = list(_marks_of(loader))

    def changed(self) -> bool:
        """Return True if the loader would be read in another way now. Values of data are not compared."""
        now = list(_marks_of(self.loader))
        return len(now) != len(self._marks) or not all(map(_same, now, self._marks))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in (int, float, bool, str) and one == other)


def _marks_of(loader: Any) -> Iterator[Any]:
    if isinstance(loader, SplitBatches):
        yield loader.dim
        yield from _marks_of(loader.loader)
        return
    if not isinstance(loader, DataLoader):
        yield loader
        return
    yield loader.multiprocessing_context
    yield from (value for name, value in vars(loader).items() if name[0] != "_" and name not in _OWN)
    batches = plain_batches(loader)
    if batches is not None:
        yield length_of(batches.sampler)
    if not is_stream(loader):
        yield length_of(loader.dataset)
    seen: set[int] = set()
    parts: list[Any] = [loader.batch_sampler, loader.sampler, loader.dataset]
    while parts:
        part = parts.pop()
        if type(part) not in _TORCHS or id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if name not in _OWN:
                yield value
                yield from value if type(value) is tuple else ()
        parts += [getattr(part, name) for name in _PARTS if hasattr(part, name)]
        parts += getattr(part, "datasets", ())
