"""Split the indices of loaders of indexed datasets over ranks: each rule gives a rank's shard of every global batch.

* :class:`ShardSampler`: of each global batch of samples, every ``world_size``-th sample.
* :class:`BatchShardSampler`: of the user's own batches, every ``world_size``-th.
* :class:`~trainloop.data.order.whole_batches.WholeBatches`: the same for evaluation, which puts rows into the dataset's
  order.
* :class:`PreshardedShard`: all batches of a sampler that already gives each rank a shard.

:class:`LoggedBatchSampler` passes a shard's indices to the loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainloop._support.rng import derive_seed
from trainloop._support.sharding import BatchPlan, Order, index_blocks, shard_size, shard_sizes
from trainloop.data.batch.randomness import SeedOnArrival
from trainloop.data.order.orders import digest_of, length_of, order_by_position, read_isolated, size_of

RankSizes = tuple[int | None, ...]
"""Samples of each rank in one global batch; None if the rank has no part in it, -1 if only that rank can know."""

# The order of these samplers is fixed when the epoch begins, so reading ahead can't change it. A user's own sampler may
# depend on the training so far, and is read one global batch at a time.
_SETTLED = (
    RandomSampler,
    SequentialSampler,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    list,
    range,
    np.ndarray,
)
_READ_AHEAD = 4096


class RankShard:
    """A rank's shard of every global batch of a pass; the base class of all rules."""

    rank: int
    num_replicas: int
    """Number of ranks. (This is torch's name for it.)"""

    seed: Any  # torch's sampler accepts ints only
    """Seed common to all ranks; None (in one process only) to draw orders from the global generators."""

    epoch: int = 0
    digest: int | None = None
    """Checksum of the order, which must agree on all ranks; None before the order is read, or if the order can't
    differ."""

    sizes_known: bool = True
    """True if :meth:`batches` yields the sizes of all ranks, False if it yields only the size of this rank."""

    @property
    def rule(self) -> str:
        """Name of the method that obtains the order; ranks with different methods would do different exchanges."""
        return type(self).__name__

    @property
    def draws_order(self) -> bool:
        """True if the order may depend on the seed."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in epoch ``epoch`` from the next iteration on; every rank calls it."""
        self.epoch = epoch

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """Yield, from ``first_batch`` on, this rank's indices in each global batch, and each rank's number of samples.

        See :data:`RankSizes` for ranks without a part, and for sizes that are unknown before loading.
        """
        raise NotImplementedError

    def positions_digest(self) -> int | None:
        """Return the :attr:`digest` of an order that is known by position; None for others."""
        return None

    def batch_seed(self, batch_index: int) -> int:
        """Return the seed for random draws while this rank's part of the global batch ``batch_index`` is loaded."""
        assert self.seed is not None  # without a seed, nothing is seeded
        return derive_seed(self.seed, "batch", self.epoch, self.rank, batch_index)

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """Return the permutation of rows from batch order to dataset order; None if the rule does not define one."""
        return None


class ShardSampler(RankShard, DistributedSampler[Any]):
    """This rank's shard of any sampler's order: each sample is on exactly one rank, without padding.

    Global batches are defined in :mod:`trainloop._support.sharding`. Every rank reads the sampler's full order,
    under the same random state, and takes its shard; orders that are known by position (sequential, and shuffled
    without a generator) are computed when needed and use no memory.

    Parameters
    ----------
    sampler : iterable of indices
        The user's sampler, with or without a length, finite or not.
    dataset
        The dataset that the indices refer to.
    batch_size : int
        Samples of one rank in a full global batch.
    rank, world_size : int
        The rank to read for, and the number of ranks.
    drop_last : bool
        True to leave out the last global batch if it is short.
    seed : int
        Seed common to all ranks.
    """

    def __init__(
        self, sampler: Any, dataset: Any, *, batch_size: int, rank: int, world_size: int, drop_last: bool, seed: int
    ) -> None:
        # Not DistributedSampler's __init__, which needs the length and plans the padding.
        self.base = sampler
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.num_replicas = world_size
        self.drop_last = drop_last
        self.seed = seed
        length = length_of(sampler)
        self.plan = None if length is None else BatchPlan(length, batch_size, world_size, drop_last)
        if self.plan is not None:
            self.num_samples = shard_size(self.plan.num_taken, rank, world_size)

    @property
    def order(self) -> Order | None:
        """This epoch's global order if it can be computed by position; else None."""
        return order_by_position(self.base, derive_seed(self.seed, "order", self.epoch))

    @property
    def rule(self) -> str:
        """``'by position'`` or ``'iterated'``."""
        return "iterated" if self.order is None else "by position"

    def positions_digest(self) -> int | None:
        order, size = self.order, self.batch_size * self.num_replicas
        return None if order is None else digest_of(order.at(np.arange(min(size, len(order)))).tolist())

    def __len__(self) -> int:
        if self.plan is None:
            raise TypeError(f"{type(self.base).__name__} has no length, so its shard has no length either")
        return self.num_samples

    def __iter__(self) -> Iterator[Any]:
        for indices, _ in self.batches():
            yield from indices

    def batches(self, first_batch: int = 0) -> Iterator[tuple[list[Any], RankSizes]]:
        """Yield, from ``first_batch`` on, this rank's indices in each global batch, and each rank's sample count."""
        order, plan = self.order, self.plan
        if order is None or plan is None:
            yield from self._iterated_batches(first_batch)
            return
        size = self.batch_size
        full = (size,) * self.num_replicas
        batch_index = first_batch
        for block in index_blocks(order, plan, self.rank, first_batch, _READ_AHEAD):
            indices = block.tolist()
            for start in range(0, len(indices), size):
                yield indices[start : start + size], full if batch_index < plan.num_full else plan.shares(batch_index)
                batch_index += 1
        if batch_index < plan.num_batches:
            yield [], plan.shares(batch_index)

    def _iterated_batches(self, first_batch: int) -> Iterator[tuple[list[Any], RankSizes]]:
        size, world_size = self.batch_size * self.num_replicas, self.num_replicas
        full = (self.batch_size,) * world_size
        # A sampler that may be read ahead enters the isolated random state once for many batches.
        at_once = max(1, _READ_AHEAD // size) if type(self.base) in _SETTLED else 1
        batch_index = 0
        self.digest = None
        for chunk in read_isolated(self.base, at_once * size, derive_seed(self.seed, "sampler", self.epoch)):
            if self.digest is None:
                self.digest = digest_of(chunk[:size])
            for start in range(0, len(chunk), size):
                batch_index += 1
                if batch_index <= first_batch:
                    continue
                indices = chunk[start : start + size]
                if len(indices) == size:
                    yield indices[self.rank :: world_size], full
                elif not self.drop_last:
                    yield indices[self.rank :: world_size], shard_sizes(len(indices), world_size)


class _UserBatches(RankShard, Sampler[Any]):
    """A rank's shard of the items of a user's sampler: lists of indices, or any index that the dataset accepts.

    Parameters
    ----------
    sampler : iterable
        A loader's batch sampler, or its sampler if it has none.
    rank, world_size : int
        The rank to read for, and the number of ranks.
    seed : int or None
        Seed common to all ranks; None in one process only.
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, seed: int | None) -> None:
        self.base = sampler
        self.rank = rank
        self.num_replicas = world_size
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        for index, _ in self.batches():
            if index is not None:
                yield index

    def _lists_of_items(self, at_once: int) -> Iterator[list[Any]]:
        """Yield the sampler's items, in lists of ``at_once``; an iterator over indices becomes a list."""
        seed = None if self.seed is None else derive_seed(self.seed, "sampler", self.epoch)
        for items in read_isolated(self.base, at_once, seed):
            yield [list(item) if isinstance(item, Iterable) and not isinstance(item, Sized) else item for item in items]


class BatchShardSampler(_UserBatches):
    """Every ``world_size``-th of the batches, or single elements, that a user's sampler yields."""

    def __len__(self) -> int:
        return shard_size(len(self.base), self.rank, self.num_replicas)

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """Yield this rank's batch of each round from ``first_batch`` on (None: no batch), and each rank's samples."""
        self.digest = None
        # Read one round at a time, since the sampler may depend on the training so far.
        for batch_index, group in enumerate(self._lists_of_items(self.num_replicas)):
            if self.digest is None:
                self.digest = digest_of(group)
            if batch_index >= first_batch:
                yield self.part_of(group)

    def part_of(self, group: list[Any]) -> tuple[Any, RankSizes]:
        """Return this rank's batch of one round, and each rank's samples."""
        sizes = tuple(map(size_of, group)) + (None,) * (self.num_replicas - len(group))
        return group[self.rank] if self.rank < len(group) else None, sizes


class PreshardedShard(_UserBatches):
    """The batches of a sampler that already gives each rank a shard, unchanged.

    Parameters
    ----------
    sampler, rank, world_size, seed
        As for :class:`BatchShardSampler`.
    equal_sizes : bool
        True if all ranks have batches of the same sizes.
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, seed: int | None, equal_sizes: bool) -> None:
        super().__init__(sampler, rank=rank, world_size=world_size, seed=seed)
        self.sizes_known = equal_sizes
        self.first_batch_digest = 0
        """Checksum of the first batch of the current pass, which should not be the same on all ranks; 0 before it."""

    def __len__(self) -> int:
        return len(self.base)

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """Yield this rank's batches from its ``first_batch`` on, and each rank's samples: -1 if unknown."""
        self.first_batch_digest = 0
        for (unit,) in islice(self._lists_of_items(1), first_batch, None):
            self.first_batch_digest = self.first_batch_digest or digest_of([unit])
            size = size_of(unit)
            others = size if self.sizes_known else -1
            yield unit, tuple(size if rank == self.rank else others for rank in range(self.num_replicas))


class LoggedBatchSampler(BatchSampler):
    """The batch sampler of a rank's loader: yields a shard's batches from any position on, and logs them.

    A loader with workers requests batches ahead. The code that reads the loader removes one entry of ``log`` for each
    batch that it gets.

    Parameters
    ----------
    shard : RankShard
        Source of the indices.
    batch_size, drop_last
        For code that reads these attributes of the loader.
    scalar : bool
        True to yield single indices, not lists (``batch_size=None``).
    seeds_workers : bool
        True if the indices are sent to workers, which must be seeded for each batch.
    """

    def __init__(
        self,
        shard: RankShard,
        batch_size: int | None,
        drop_last: bool,
        *,
        scalar: bool,
        seeds_workers: bool,
    ) -> None:
        self.sampler: Any = shard
        self.batch_size = batch_size  # type: ignore[assignment]  # None as in the loader, with a user's batch sampler
        self.drop_last = drop_last
        self.first_batch = 0
        self.log: deque[RankSizes] = deque()
        self.indices: deque[Any] = deque()
        """This rank's indices for each entry of ``log``."""
        self.passes = 0
        """Number of iterations since the loader's code set it to 0."""
        self.ended = False
        """True if the last iteration has reached its end."""
        self._scalar = scalar
        self._seeds_workers = seeds_workers

    def __iter__(self) -> Iterator[Any]:
        first_batch, log, shard = self.first_batch, self.log, self.sampler
        log.clear()
        self.indices.clear()
        self.passes, self.ended = self.passes + 1, False
        for batch_index, (index, sizes) in enumerate(shard.batches(first_batch), start=first_batch):
            if self._scalar:
                if isinstance(shard, ShardSampler):
                    index = index[0] if index else None
                if not isinstance(index, list):  # one index, maybe a tuple, of a sample or of a batch
                    sizes = tuple(size if size is None else -1 for size in sizes)
            log.append(sizes)
            self.indices.append(index)
            if sizes[shard.rank] is None:
                continue  # the pass ends here: only in the last global batch may a rank have no part
            yield SeedOnArrival(index, shard.batch_seed(batch_index)) if self._seeds_workers else index
        self.ended = True

    def __len__(self) -> int:
        shard = self.sampler
        return -(-len(shard) // shard.batch_size) if isinstance(shard, ShardSampler) else len(shard)
