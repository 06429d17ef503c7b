"""The rule for evaluation: ranks get whole batches, and one process's random numbers; rows return to dataset order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from trainloop._support.rng import derive_seed
from trainloop._support.sharding import IdentityOrder, Order
from trainloop.data.order.orders import digest_of, length_of, order_by_position, size_of
from trainloop.data.order.samplers import BatchShardSampler, RankSizes
from trainloop.errors import ConfigurationError

_ROUNDS_AT_ONCE = 64


class WholeBatches(BatchShardSampler):
    """Every ``world_size``-th batch of a batch sampler (or index of a sampler); records the contents of all batches.

    Parameters
    ----------
    sampler : iterable
        The user's sampler; every rank iterates all of it, or computes its part if the order is known by position.
    num_samples : int or None
        Size of the dataset; None if it has no length.
    rank, world_size, seed
        As for :class:`BatchShardSampler`.
    """

    sizes_known = False

    def __init__(self, sampler: Any, num_samples: int | None, *, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(sampler, rank=rank, world_size=world_size, seed=seed)
        self._num_samples = num_samples
        self._visited: list[Any] = []
        self._order: Order | None = None
        if type(sampler) is BatchSampler:
            key = None if seed is None else derive_seed(seed, "order")
            self._order = order_by_position(sampler.sampler, key)

    @property
    def rule(self) -> str:
        """Name of this rule and its kind of order. Ranks compare their orders only if they iterate the sampler."""
        return f"{super().rule} of {type(self._order).__name__}"

    @property
    def draws_order(self) -> bool:
        """True unless the sampler yields indices in dataset order."""
        return not isinstance(self._order, IdentityOrder)

    def batch_seed(self, batch_index: int) -> int:
        """Return a seed that depends only on the batch's index, so that ranks draw the numbers of a single process."""
        assert self.seed is not None  # without a seed, nothing is seeded
        return derive_seed(self.seed, "batch", batch_index * self.num_replicas + self.rank)

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """Yield this rank's batch of each round of ``world_size`` batches, and the batch's size (-1: unknown)."""
        self._visited, self.digest = [], None
        if self._order is not None:
            yield from self._by_position(self._order)
            return
        world_size = self.num_replicas
        # Without a seed, the sampler and the dataset draw alternately from the same generators.
        rounds = 1 if self.seed is None else _ROUNDS_AT_ONCE
        base, length, samples = self.base, length_of(self.base), self._num_samples
        own, size = (base.sampler, base.batch_size) if type(base) is BatchSampler else (base, 1)
        limit = length if length is not None or samples is None else samples // size + 1
        for units in self._lists_of_items(world_size * rounds):
            if limit is not None and len(self._visited) > 10 * limit + 1000:
                known = f"no length (the dataset has {samples})" if length is None else f"a length of {length}"
                raise ConfigurationError(
                    f"{type(own).__name__} has {known}, but has yielded {len(self._visited)} items in one pass, so an "
                    "evaluation may never end. Make its iterator end, or evaluate on a loader with another sampler."
                )
            for start in range(0, len(units), world_size):
                group = units[start : start + world_size]
                self._visited += map(_compact, group)
                yield self.part_of(group)
        if world_size > 1:  # one process has nothing to compare
            visited = [unit.tolist() if isinstance(unit, np.ndarray) else unit for unit in self._visited]
            self.digest = digest_of(visited)

    def _by_position(self, order: Order) -> Iterator[tuple[list[int], RankSizes]]:
        size, length = self.base.batch_size, len(order)
        stop = length - length % size if self.base.drop_last else length
        for start in range(self.rank * size, stop, self.num_replicas * size):
            indices = order.at(np.arange(start, min(start + size, stop))).tolist()
            yield indices, (len(indices),) * self.num_replicas

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """Return the permutation to dataset order; see :meth:`EvalFeed.row_order`."""
        if isinstance(self._order, IdentityOrder):
            return None
        indices: npt.NDArray[np.int64] | None
        if self._order is not None:
            rows = sum(sizes)
            complete = rows == len(self._order) == self._num_samples
            same_sizes = all(size == self.base.batch_size for size in sizes[:-1])
            indices = self._order.at(np.arange(rows)) if complete and same_sizes else None
        else:
            indices = self._visited_indices(sizes)
        if indices is None or len(indices) != sum(sizes):
            return None
        order = np.argsort(indices, kind="stable")
        return None if np.array_equal(order, np.arange(len(order))) else order.tolist()

    def _visited_indices(self, sizes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Return the dataset index of each row; None unless every index was visited exactly once."""
        visited = self._visited
        if len(visited) != len(sizes) or self._num_samples is None:
            return None
        if all(isinstance(unit, np.ndarray) for unit in visited):
            if any(len(unit) != size for unit, size in zip(visited, sizes, strict=True)) or not visited:
                return None
            indices = units = np.concatenate(visited)
        elif all(isinstance(unit, (int, np.integer)) for unit in visited):
            # batch_size=None: an index refers to a batch, whose rows stay together.
            units = np.asarray(visited, dtype=np.int64)
            indices = np.repeat(units, sizes)
        else:
            return None
        units = np.where(units < 0, units + self._num_samples, units)
        if len(units) != self._num_samples or not np.array_equal(np.sort(units), np.arange(self._num_samples)):
            return None
        return np.where(indices < 0, indices + self._num_samples, indices)


def _compact(unit: Any) -> Any:
    """Return a batch's indices as an array if they are integers, to save memory."""
    if size_of(unit) < 0:
        return unit
    try:
        return np.asarray(unit, dtype=np.int64)
    except (TypeError, ValueError):
        return unit
