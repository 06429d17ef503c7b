"""Determine a sampler's order of indices: its length, how it is drawn, and a checksum to compare it between ranks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeGuard, TypeVar

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from trainloop._support.rng import derive_seed
from trainloop._support.sharding import IdentityOrder, Order, PermutedOrder
from trainloop.data.batch.randomness import IsolatedRandomState

T = TypeVar("T")


def length_of(sized: Any) -> int | None:
    """Return ``len(sized)``; None if that raises an error."""
    try:
        return len(sized)
    except Exception:  # an error of the user's code
        return None


def order_by_position(sampler: Any, key: int | None) -> Order | None:
    """Return the sampler's order if it can be computed at any position; None if the sampler must be iterated.

    Parameters
    ----------
    sampler
        Any iterable of indices.
    key : int or None
        Key of a shuffled order that replaces the sampler's order; None if only the sampler's own order is acceptable.
    """
    if type(sampler) is SequentialSampler:
        return IdentityOrder(len(sampler))
    if type(sampler) is range and sampler.step == 1 and sampler.start == 0:
        return IdentityOrder(len(sampler))
    # With a generator, the user controls the order. If the sampler yields several permutations, or a part of one, it
    # must be iterated.
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None or key is None:
        return None
    return PermutedOrder(len(sampler), key) if len(sampler) == len(sampler.data_source) else None


def size_of(item: Any) -> int:
    """Return the number of indices in an item of a sampler: a list, an array, a range ...; -1 for a single index."""
    several = isinstance(item, Collection) and not isinstance(item, str) and getattr(item, "ndim", 1) > 0
    return len(item) if several else -1


def digest_of(indices: list[Any]) -> int:
    """Return a checksum of indices, or of lists of them; equal on ranks that read the same order."""
    return derive_seed(repr(_plain(indices)))


def _plain(index: Any) -> Any:
    if size_of(index) >= 0:
        return [_plain(part) for part in index]
    try:
        return operator.index(index)
    except TypeError:
        # The repr of other objects may contain addresses, which differ.
        return index if isinstance(index, str) else type(index).__name__


def rest_of(iterator: Iterator[T]) -> Iterator[T]:
    """Yield the rest of an iterator by ``next`` only: at ``iter``, some iterators start again and return themselves.

    (Speech samplers such as lhotse's do this, and so do litdata's streams.) ``for`` and ``itertools`` call ``iter``.
    """
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def cuts_torchs_order(batches: Any) -> TypeGuard[BatchSampler]:
    """Return True for torch's own batch sampler over its sequential or random sampler: lengths and draws are known."""
    return type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, RandomSampler)


def batches_of(sampler: Iterable[T]) -> Iterator[T]:
    """Return ``iter(sampler)``; for torch's ``BatchSampler``, an iterator of the same batches.

    Since torch 2.7, ``BatchSampler`` calls ``iter`` again for each batch: an endless loop if that starts again.
    """
    return iter(sampler) if type(sampler) is not BatchSampler or sampler.drop_last else _cut(sampler)


def _cut(sampler: BatchSampler) -> Iterator[Any]:
    indices = iter(sampler.sampler)
    rest = rest_of(indices) if indices is sampler.sampler else indices
    while batch := [*islice(rest, sampler.batch_size)]:
        yield batch


def read_isolated(iterable: Iterable[Any], at_once: int, seed: int | None) -> Iterator[list[Any]]:
    """Yield lists of ``at_once`` items, drawn under an isolated random state that depends only on the seed.

    Without a seed, the items are drawn from the global generators, like in plain iteration.
    """
    isolated = nullcontext() if seed is None else IsolatedRandomState(seed)
    with isolated:
        iterator = rest_of(batches_of(iterable))
    while True:
        with isolated:
            chunk = list(islice(iterator, at_once))
        if not chunk:
            return
        yield chunk
