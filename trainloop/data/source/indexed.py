"""Read loaders of indexed datasets: a copy of the user's loader reads only one rank's indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainloop._launch.rank_process import started_by_launch
from trainloop._support.rng import derive_seed
from trainloop._support.sharding import index_blocks, shard_size
from trainloop.data.batch.batches import SampleCounter, may_change_count
from trainloop.data.batch.randomness import IsolatedRandomState
from trainloop.data.batch.starting import start_reading
from trainloop.data.loader import libraries, loaders
from trainloop.data.loader.loader_copies import copy_loader
from trainloop.data.order.orders import length_of, order_by_position
from trainloop.data.order.samplers import (
    BatchShardSampler,
    LoggedBatchSampler,
    PreshardedShard,
    RankShard,
    RankSizes,
    ShardSampler,
)
from trainloop.data.order.whole_batches import WholeBatches
from trainloop.data.source.sources import Source, plan_of, plans_of_ranks
from trainloop.data.source.tensors import TensorRows, draw_base_seed

_END: Any = object()


def presharded_shard(loader: DataLoader[Any], rank: int, world_size: int, seed: int | None) -> RankShard:
    """Return the shard of a loader that is already split over ranks: everything that the loader yields."""
    plain = loaders.plain_batches(loader)
    equal = plain is not None and type(plain.sampler) is DistributedSampler
    return PreshardedShard(
        loaders.index_sampler_of(loader), rank=rank, world_size=world_size, seed=seed, equal_sizes=equal
    )


def train_shard(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> RankShard:
    """Return a rank's shard of every global batch: samples, or whole batches if the sampler yields batches."""
    plain, index_sampler = loaders.plain_batches(loader), loaders.index_sampler_of(loader)
    # batch_size=None, and an index refers to an element that is a batch.
    scalar = loader.batch_sampler is None and plain is None
    shard: ShardSampler | BatchShardSampler
    if plain is not None or (scalar and order_by_position(index_sampler, seed) is not None):
        shard = ShardSampler(
            index_sampler if plain is None else libraries.plain_sampler(loader, plain.sampler),
            loader.dataset,
            batch_size=1 if plain is None else plain.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=plain is not None and plain.drop_last,
            seed=seed,
        )
    else:
        shard = BatchShardSampler(index_sampler, rank=rank, world_size=world_size, seed=seed)
    shard.sizes_known = not scalar
    return shard


def eval_shard(loader: DataLoader[Any], rank: int, world_size: int, seed: int | None) -> RankShard:
    """Return a rank's shard of the batches that one process would see, as whole batches."""
    num_samples = length_of(loader.dataset)
    return WholeBatches(loaders.index_sampler_of(loader), num_samples, rank=rank, world_size=world_size, seed=seed)


class Indexed(Source):
    """Source for the loader of a map-style dataset; a copy of the loader reads only this rank's indices.

    Parameters
    ----------
    shard : RankShard
        The rule that splits indices. Without a seed, the global generators are used in the same way as by
        ``for batch in loader``.
    rows : TensorRows or None
        Set if indexing tensors gives the same batches as the loader.
    """

    def __init__(self, loader: DataLoader[Any], shard: RankShard, name: str, rows: TensorRows | None) -> None:
        self._name, self._rank, self._shard = name, shard.rank, shard
        self._users_loader, self._indexes = loader, rows is not None
        self.sizes_known = shard.sizes_known
        self._own_iter = loaders.iterates_itself(loader)
        # An __iter__ of the user's own may yield other batches than were requested, and not as many on each rank.
        self.counts = rows is None and (self._own_iter or may_change_count(loader))
        self._counter = SampleCounter(name, loader.batch_size)
        plain = loaders.plain_batches(loader)
        self._requested = LoggedBatchSampler(
            shard,
            loader.batch_size,
            loader.drop_last,
            scalar=loader.batch_sampler is None and plain is None,
            seeds_workers=shard.seed is not None and loader.num_workers > 0,
        )
        changes: dict[str, Any] = {}
        if loader.batch_sampler is None:
            changes["sampler"] = self._requested
        else:
            changes.update(
                batch_sampler=self._requested, sampler=shard if isinstance(shard, ShardSampler) else loader.sampler
            )
        self.loader = copy_loader(loader, **changes)

        presharded, world_size = isinstance(shard, PreshardedShard), shard.num_replicas
        self.shares, self.loader_batches = not presharded, world_size
        plan = plan_of(loader, 1 if presharded else world_size)
        if plan is not None:
            # A sampler of the user's own may give ranks unequal shards.
            shards = plans_of_ranks(loader, plan, world_size) if presharded else [plan]
            self.num_batches: int | None = max(shard.num_batches for shard in shards)
            self.num_samples: int | None = sum(shard.num_taken for shard in shards)
            self.global_batch_size: int | None = plan.batch_size * world_size
        else:
            length = length_of(loaders.index_sampler_of(loader))
            self.num_batches = None if length is None else length if presharded else shard_size(length, 0, world_size)
        if plain is not None:
            self.global_batch_size = plain.batch_size * world_size
        if loaders.has_own_length(loader) and self.num_batches is not None:
            part = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self.num_batches = length_of(copy_loader(loader, **{part: range(self.num_batches)}))
            self.num_samples = None

    @property
    def rule(self) -> str:
        return self._shard.rule

    @property
    def draws_order(self) -> bool:
        return self._shard.draws_order

    @property
    def order_digest(self) -> int | None:
        return self._shard.digest

    def order_checksum(self) -> int | None:
        """Return :attr:`order_digest` or, if this order can't differ between ranks, a checksum of its beginning."""
        digest = self._shard.digest
        return self._shard.positions_digest() if digest is None else digest

    @property
    def shard_digest(self) -> int | None:
        # Torch's sampler reads its rank in each pass. Under a launcher, the rank was known to the constructor.
        shard = self._shard
        if isinstance(shard, PreshardedShard) and not shard.sizes_known and started_by_launch():
            return shard.first_batch_digest
        return None

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        return self._shard.row_order(sizes)

    def next_indices(self) -> Any:
        return self._requested.indices[0] if self._requested.indices else None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        self._shard.set_epoch(epoch)
        # In each pass, since the dataset's tensors and indices may have changed.
        rows = TensorRows.of(self._users_loader) if self._indexes else None
        items = self._loaded_batches(epoch, first_batch) if rows is None else self._index(rows, first_batch)
        return self._with_own_sizes(items) if self.counts or not self.sizes_known else items

    def _with_own_sizes(self, items: Iterator[tuple[RankSizes, Any]]) -> Iterator[tuple[int | None, Any]]:
        """Yield the items with only this rank's size, counted if it is unknown or may differ from the plan."""
        rank, counter = self._rank, self._counter
        for sizes, batch in items:
            size = sizes[rank]
            if size is not None and (self.counts or size < 0):
                size = counter.count(batch, size if size >= 0 else None)
            yield size, batch

    def _index(self, rows: TensorRows, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        """Yield batches by indexing, without the loader."""
        shard, rank = self._shard, self._rank
        if shard.seed is None or self.loader.generator is not None:
            draw_base_seed(self.loader)  # drawn from the user's generator, which may draw the order next
        order = shard.order if isinstance(shard, ShardSampler) else None
        if order is None or not isinstance(shard, ShardSampler) or shard.plan is None:
            for indices, sizes in shard.batches(first_batch):
                yield sizes, None if sizes[rank] is None else rows.take_list(indices)
            return
        plan, batch_index = shard.plan, first_batch
        # One tuple for all full batches, so that steps recognise unchanged sizes by identity.
        full = plan.shares(0)
        for block in index_blocks(order, plan, rank, first_batch):
            for batch in rows.take(torch.from_numpy(block), plan.batch_size):
                yield full if batch_index < plan.num_full else plan.shares(batch_index), batch
                batch_index += 1
        if batch_index < plan.num_batches:
            yield plan.shares(batch_index), None

    def _loaded_batches(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        """Yield batches that the copy's workers have loaded, or this process if the copy has no workers."""
        requested, shard, rank = self._requested, self._shard, self._rank
        # An __iter__ of the user's own may not yield as many batches as it requests, so they are read and discarded.
        discarded = first_batch if self._own_iter else 0
        requested.first_batch = batch_index = first_batch - discarded
        requested.passes = 0
        seed = shard.seed
        with nullcontext() if seed is None else IsolatedRandomState(derive_seed(seed, "loader", epoch, rank)):
            batches = start_reading(self.loader, self._name)
        # Workers are seeded by the indices that they receive.
        isolated = None if seed is None or self.loader.num_workers > 0 else IsolatedRandomState()
        while True:
            if isolated is None:
                batch = next(batches, _END)
            else:
                with isolated.reseed(shard.batch_seed(batch_index)):
                    batch = next(batches, _END)
            if batch is _END:
                break
            if self._own_iter and not requested.log and shard.num_replicas == 1:
                sizes: RankSizes = (-1,)  # the loader makes several batches of one
            else:
                loaders.check_requested(requested.log, self.loader, self._name)
                requested.indices.popleft()
                sizes = requested.log.popleft()
            batch_index += 1
            if batch_index > discarded:
                yield sizes, batch
        if self._own_iter and isinstance(shard, WholeBatches) and shard.num_replicas > 1:
            loaders.check_passed_through(requested.passes, requested.ended, self._users_loader, self._name)
        if requested.log and requested.log[0][rank] is None:
            yield requested.log.popleft(), None
