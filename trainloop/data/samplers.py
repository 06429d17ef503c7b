"""A rank's indices of every global batch, from any sampler or batch sampler."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainloop.data.randomness import Aside, SeedOnArrival
from trainloop.rng import derive_seed
from trainloop.sharding import BatchPlan, IdentityOrder, Order, PermutedOrder, index_blocks, shard_size

RankSizes = tuple[int, ...]
"""Samples of each rank in one global batch; -1 where only the rank itself will know."""

# Of these the order is settled when the epoch begins: reading ahead can't change it. A user's own sampler may look at
# what the training has done so far, and is asked for one global batch at a time.
_SETTLED = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
    np.ndarray,
)
_READ_AHEAD = 4096


def length_of(sized: Any) -> int | None:
    """``len(sized)``; None where it has no length, or says so when asked."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def order_by_position(sampler: Any, key: int | None) -> Order | None:
    """The sampler's order, where it can be computed at any position; None where the sampler must be iterated.

    Parameters
    ----------
    sampler
        Any iterable of indices.
    key : int or None
        Of the shuffled order, which is then not the sampler's own. None: no order but the sampler's own will do.
    """
    if type(sampler) is SequentialSampler:
        return IdentityOrder(len(sampler))
    if type(sampler) is range and sampler.step == 1 and sampler.start == 0:
        return IdentityOrder(len(sampler))
    # A generator is the user's word on where the order comes from.
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None and key is not None:
        return PermutedOrder(len(sampler.data_source), key, len(sampler))
    return None


class ShardSampler(DistributedSampler[Any]):
    """This rank's shard of any sampler's order: each sample on one rank, none padded, none left out.

    Global batches are as :mod:`trainloop.sharding` draws them. Every rank reads the sampler's whole order, under the
    same random state, and takes its own; orders that are known by position (sequential, and shuffled without a
    generator) are computed where they are needed and cost no memory.

    Parameters
    ----------
    sampler : iterable of indices
        The user's own, with or without a length, finite or not.
    dataset
        What the indices are of.
    batch_size : int
        Samples of one rank in a full global batch.
    rank, world_size : int
        Whose shard, of how many.
    drop_last : bool
        Leave out the last global batch where it is short.
    seed : int
        Common to all ranks.
    """

    def __init__(
        self, sampler: Any, dataset: Any, *, batch_size: int, rank: int, world_size: int, drop_last: bool, seed: int
    ) -> None:
        # Not DistributedSampler's own, which needs the length and plans the padding.
        self.base = sampler
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.num_replicas = world_size
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self.shuffle = not isinstance(sampler, SequentialSampler)
        self.digest: int | None = None
        """Of the epoch's first global batch, where only iterating the sampler told what is in it."""
        length = length_of(sampler)
        self.plan = None if length is None else BatchPlan(length, batch_size, world_size, drop_last)
        if self.plan is not None:
            self.num_samples = shard_size(self.plan.num_taken, rank, world_size)
            self.total_size = self.plan.num_taken

    @property
    def order(self) -> Order | None:
        """This epoch's global order, where it is known by position."""
        return order_by_position(self.base, derive_seed(self.seed, "order", self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in epoch ``epoch`` from the next iteration on; every rank calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.plan is None:
            raise TypeError(f"{type(self.base).__name__} has no length, and so its shard has none")
        return self.num_samples

    def __iter__(self) -> Iterator[Any]:
        for indices, _ in self.batches():
            yield from indices

    def batches(self, first_batch: int = 0) -> Iterator[tuple[list[Any], RankSizes]]:
        """This rank's indices of each global batch from ``first_batch`` on, and how many each rank has in it.

        A rank without samples in the last one gets an empty list for it.
        """
        order = self.order
        if order is None or self.plan is None:
            yield from self._iterated_batches(first_batch)
            return
        plan, size = self.plan, self.batch_size
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
        at_once = max(1, _READ_AHEAD // size) if type(self.base) in _SETTLED else 1
        batch_index = 0
        self.digest = None
        for chunk in read_aside(self.base, at_once * size, derive_seed(self.seed, "sampler", self.epoch)):
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
                    shares = tuple(shard_size(len(indices), rank, world_size) for rank in range(world_size))
                    yield indices[self.rank :: world_size], shares


class BatchShardSampler(Sampler[Any]):
    """This rank's shard of the batches, or single elements, that a user's own sampler gives: every ``world_size``-th.

    Parameters
    ----------
    sampler : iterable
        Of lists of indices, or of what else the dataset takes for an index.
    rank, world_size, seed
        As for :class:`ShardSampler`.
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, seed: int) -> None:
        self.base = sampler
        self.rank = rank
        self.num_replicas = world_size
        self.seed = seed
        self.epoch = 0
        self.digest: int | None = None
        """Of the epoch's first units, of all ranks."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in epoch ``epoch`` from the next iteration on; every rank calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return shard_size(len(self.base), self.rank, self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        for index, _ in self.batches():
            if index is not None:
                yield index

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """This rank's unit of each global batch from ``first_batch`` on (None: no unit), and each rank's samples."""
        units = read_aside(self.base, self.num_replicas, derive_seed(self.seed, "sampler", self.epoch))
        self.digest = None
        for batch_index, group in enumerate(units):
            if self.digest is None:
                self.digest = digest_of(group)
            if batch_index < first_batch:
                continue
            shares = tuple(len(unit) if isinstance(unit, (list, tuple)) else -1 for unit in group)
            shares += (0,) * (self.num_replicas - len(group))
            yield group[self.rank] if self.rank < len(group) else None, shares


class GivenShard(Sampler[Any]):
    """The batches of a sampler that gives each rank its own share already: taken as they are.

    Parameters
    ----------
    sampler : iterable
        A loader's batch sampler, or its sampler where there is none.
    rank, world_size, seed
        As for :class:`ShardSampler`.
    equal_shares : bool
        Whether all ranks have batches of the same sizes.
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, seed: int, equal_shares: bool) -> None:
        self.base = sampler
        self.rank = rank
        self.num_replicas = world_size
        self.seed = seed
        self.epoch = 0
        self._equal_shares = equal_shares
        self.digest = None  # each rank has indices of its own

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in epoch ``epoch`` from the next iteration on; every rank calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        for index, _ in self.batches():
            yield index

    def batches(self, first_batch: int = 0) -> Iterator[tuple[Any, RankSizes]]:
        """This rank's batches from its ``first_batch`` on, and each rank's samples: -1 where they are unknown."""
        units = read_aside(self.base, 1, derive_seed(self.seed, "sampler", self.epoch))
        for (unit,) in islice(units, first_batch, None):
            size = len(unit) if isinstance(unit, (list, tuple)) else -1
            others = size if self._equal_shares else -1
            yield unit, tuple(size if rank == self.rank else others for rank in range(self.num_replicas))


def digest_of(indices: list[Any]) -> int:
    """A checksum of indices, or of lists of them: equal on ranks that read the same."""
    return derive_seed(repr(_plain(indices)))


def _plain(index: Any) -> Any:
    if isinstance(index, (list, tuple)):
        return [_plain(part) for part in index]
    try:
        return operator.index(index)
    except TypeError:
        # The text of other objects may hold their addresses, which differ.
        return index if isinstance(index, str) else type(index).__name__


def read_aside(iterable: Iterable[Any], at_once: int, seed: int) -> Iterator[list[Any]]:
    """The items in lists of ``at_once``, drawn under a random state of their own, the same for the same seed."""
    aside = Aside(seed)
    with aside:
        iterator = iter(iterable)
    while True:
        with aside:
            chunk = list(islice(iterator, at_once))
        if not chunk:
            return
        yield chunk


class LoggedBatchSampler(BatchSampler):
    """What a rank's loader asks for indices: a shard's batches from any place on, with a log of what was given out.

    A loader with workers asks ahead; whoever reads the loader takes one entry of ``log`` with each batch.

    Parameters
    ----------
    shard : ShardSampler, BatchShardSampler or GivenShard
        Where the indices come from.
    batch_size, drop_last
        For whoever asks the loader.
    scalar : bool
        Give single indices rather than lists (``batch_size=None``).
    seeds_workers : bool
        Whether the indices are sent to workers, which are to be seeded for each batch.
    """

    def __init__(
        self,
        shard: ShardSampler | BatchShardSampler | GivenShard,
        batch_size: int | None,
        drop_last: bool,
        *,
        scalar: bool,
        seeds_workers: bool,
    ) -> None:
        self.sampler = shard
        self.batch_size = batch_size  # type: ignore[assignment]  # None as in the loader, with a user's batch sampler
        self.drop_last = drop_last
        self.first_batch = 0
        self.log: deque[RankSizes] = deque()
        self._scalar = scalar
        self._seeds_workers = seeds_workers

    def batch_seed(self, batch_index: int) -> int:
        """Of what is drawn while this rank's part of the global batch ``batch_index`` is loaded."""
        shard = self.sampler
        return derive_seed(shard.seed, "batch", shard.epoch, shard.rank, batch_index)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:
        first_batch, log = self.first_batch, self.log
        log.clear()
        shard: Any = self.sampler
        for batch_index, (index, shares) in enumerate(shard.batches(first_batch), start=first_batch):
            if self._scalar and isinstance(shard, ShardSampler):
                index, shares = (index[0] if index else None), tuple(-1 if share else 0 for share in shares)
            log.append(shares)
            if shares[shard.rank] == 0:
                return  # an empty share is in an epoch's last global batch only
            yield SeedOnArrival(index, self.batch_seed(batch_index)) if self._seeds_workers else index

    def __len__(self) -> int:
        shard: Any = self.sampler
        return -(-len(shard) // shard.batch_size) if isinstance(shard, ShardSampler) else len(shard)


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader's owner gave it, by where they hang; each once."""
    holders = {"loader": loader}
    for name in ("sampler", "batch_sampler"):
        holder = getattr(loader, name, None)
        holders[name] = holder
        holders[f"{name}.sampler"] = getattr(holder, "sampler", None)
    found: dict[str, torch.Generator] = {}
    for name, holder in holders.items():
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found.values()):
            found[name] = generator
    return found
