"""Where a rank's training batches come from, for each kind of loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, MapDataPipe
from torch.utils.data.distributed import DistributedSampler

from trainloop.data import libraries, loaders
from trainloop.data.batches import count_samples
from trainloop.data.columns import SplitBatches, read_columns
from trainloop.data.positions import InProcess, Position, StreamPlaces
from trainloop.data.randomness import Aside, drawn_aside
from trainloop.data.samplers import (
    BatchShardSampler,
    GivenShard,
    LoggedBatchSampler,
    RankSizes,
    ShardSampler,
    length_of,
    order_by_position,
)
from trainloop.data.stops import slipped_out, whole
from trainloop.data.streams import seed_stream, stream_twin
from trainloop.data.tensors import TensorRows, draw_base_seed, loader_batches, loads_batches_here
from trainloop.data.twins import twin
from trainloop.rng import derive_seed
from trainloop.sharding import BatchPlan, index_blocks, shard_size

_END: Any = object()


class Source(Protocol):
    """A loader's epochs as this rank's micro-batches."""

    loader: Any
    """What is read: the user's own loader, or its twin for this rank."""

    sizes_known: bool
    """Whether items carry the samples of all ranks, ``(shares, batch)``, or of this rank only, ``(size, batch)``."""

    num_batches: int | None
    num_samples: int | None
    global_batch_size: int | None

    @property
    def position(self) -> Position | None:
        """By what the user's stream or loader says of itself; None where neither has a state."""
        ...

    @property
    def order_digest(self) -> int | None:
        """Of the running epoch's order, once its first item was read: it has to be the same on all ranks.

        None where no rank can have another one.
        """
        ...

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        """Micro-batches of an epoch from the ``first_batch``-th on, with their sizes.

        After ``position.load()`` those that follow there. Where this rank has no part in a global batch, its share is 0
        (its size -1) and the batch is to be ignored.
        """
        ...


def train_source(loader: Any, rank: int, world_size: int, seed: int | None, name: str) -> Source:
    """The source for a loader of any kind.

    Parameters
    ----------
    loader, rank, world_size, seed, name
        As for :func:`trainloop.data.train_feed`.
    """
    if isinstance(loader, SplitBatches):
        return _Columns(loader, rank, world_size, seed, name)
    given = loaders.is_distributed(loader)
    if given:
        loader = loaders.for_rank(loader, rank, world_size, name)
    rows = TensorRows.of(loader)
    if seed is None:
        return _AsItIs(loader, name) if rows is None else _Tensors(loader, rows)
    if not isinstance(loader, DataLoader) or (loaders.iterates_itself(loader) and (given or loaders.is_stream(loader))):
        return _Opaque(loader, rank, world_size, seed, name, given)
    if loaders.is_stream(loader):
        return _Stream(loader, rank, world_size, seed, name, given)
    return _Indexed(loader, rank, world_size, seed, name, rows, given)


def _plan_of(loader: Any, world_size: int = 1) -> BatchPlan | None:
    """The epoch of a loader that cuts a sampler of known length into batches."""
    batches = loaders.plain_batches(loader)
    length = None if batches is None else length_of(batches.sampler)
    if batches is None or length is None:
        return None
    return BatchPlan(length, batches.batch_size, world_size, batches.drop_last)


class _AsItIs:
    """In one process without a seed: the user's own loader, iterated as a hand-written loop would."""

    sizes_known = True
    order_digest = None

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self._name = name
        self._plan = _plan_of(loader)
        self._batch_size = getattr(loader, "batch_size", None)
        self.num_batches = None if loaders.is_stream(loader) else length_of(loader)
        self.num_samples = None if self._plan is None else self._plan.num_taken
        self.global_batch_size = self._batch_size if self._plan is None else self._plan.batch_size
        self.position = InProcess.of(loader, name)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        # Not a generator: the loader's iterator is made now, in the random state that whoever calls has put in place.
        passed = 0 if self.position is not None and self.position.goes_on else first_batch
        batches = _batches_of(self.loader, self._name) if self.position is None else self.position.read()
        return self._sized(islice(batches, passed, None), first_batch)

    def _sized(self, batches: Iterator[Any], first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        planned = islice(() if self._plan is None else self._plan.all_shares(), first_batch, None)
        for batch in batches:
            yield next(planned, ()) or (max(1, count_samples(batch, self._batch_size)),), batch


def _batches_of(loader: Any, name: str) -> Iterator[Any]:
    """``iter(loader)``; where it loads in this process, the same batch for batch and draw for draw, by its parts.

    So the mark is left out that torch makes for profilers around each batch: some 20 us, of a small model's 500.
    """
    if not loads_batches_here(loader) or loaders.is_stream(loader) or isinstance(loader.dataset, MapDataPipe):
        return whole(iter(loader), name)
    dataset: Any = loader.dataset
    fetch, collate = getattr(dataset, "__getitems__", None), loader.collate_fn
    batches_of_indices = iter(loader.batch_sampler)
    draw_base_seed(loader)

    def load(indices: Any) -> Any:
        try:
            return collate(fetch(indices) if fetch else [dataset[index] for index in indices])
        except StopIteration as stop:
            raise slipped_out(stop, name) from stop

    return map(load, batches_of_indices)


class _Tensors:
    """In one process without a seed: a ``TensorDataset``'s batches and draws, without the cost of its loader."""

    sizes_known = True
    order_digest = None
    position = None

    def __init__(self, loader: DataLoader[Any], rows: TensorRows) -> None:
        self.loader = loader
        self._rows = rows
        plan = _plan_of(loader)
        self.num_batches = length_of(loader)
        self.num_samples = None if plan is None else plan.num_taken
        self.global_batch_size = None if plan is None else plan.batch_size

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        shares: RankSizes = (0,)
        for batch in islice(loader_batches(self._rows, self.loader), first_batch, None):
            # The same tuple as long as it holds, so that whoever weighs steps sees at once that nothing changed.
            if len(batch[0]) != shares[0]:
                shares = (len(batch[0]),)
            yield shares, batch


class _Indexed:
    """A map-style dataset's loader, whose twin is asked for this rank's indices only."""

    position = None

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        world_size: int,
        seed: int,
        name: str,
        rows: TensorRows | None,
        given: bool,
    ) -> None:
        self._name, self._rank, self._rows = name, rank, rows
        plain = loaders.plain_batches(loader)
        index_sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # batch_size=None, and an index of the dataset is an element, which is a batch.
        scalar = loader.batch_sampler is None and plain is None
        self._shard: ShardSampler | BatchShardSampler | GivenShard
        if given:
            equal = plain is not None and type(plain.sampler) is DistributedSampler
            self._shard = GivenShard(index_sampler, rank=rank, world_size=world_size, seed=seed, equal_shares=equal)
            self.sizes_known = equal
        elif plain is not None or (scalar and order_by_position(index_sampler, seed) is not None):
            self._shard = ShardSampler(
                index_sampler if plain is None else libraries.plain_sampler(loader, plain.sampler),
                loader.dataset,
                batch_size=1 if plain is None else plain.batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=plain is not None and plain.drop_last,
                seed=seed,
            )
            self.sizes_known = plain is not None
        else:
            self._shard = BatchShardSampler(index_sampler, rank=rank, world_size=world_size, seed=seed)
            self.sizes_known = not scalar
        self._asked = LoggedBatchSampler(
            self._shard, loader.batch_size, loader.drop_last, scalar=scalar, seeds_workers=loader.num_workers > 0
        )
        # Batches are told apart by the order in which they were asked for.
        changes: dict[str, Any] = {"in_order": True} if hasattr(loader, "in_order") else {}
        if loader.batch_sampler is None:
            changes["sampler"] = self._asked
        else:
            changes.update(batch_sampler=self._asked, sampler=loader.sampler if given else self._shard)
        self.loader = twin(loader, **changes)

        plan = _plan_of(loader, 1 if given else world_size)
        if plan is not None:
            self.num_batches: int | None = plan.num_batches
            self.num_samples: int | None = plan.num_taken * (world_size if given else 1)
            self.global_batch_size: int | None = plan.batch_size * world_size
        else:
            length = length_of(index_sampler)
            self.num_batches = None if length is None else length if given else shard_size(length, 0, world_size)
            self.num_samples = self.global_batch_size = None
        if plain is not None:
            self.global_batch_size = plain.batch_size * world_size

    @property
    def order_digest(self) -> int | None:
        return self._shard.digest

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        self._shard.set_epoch(epoch)
        items = self._read(epoch, first_batch) if self._rows is None else self._index(self._rows, first_batch)
        if self.sizes_known:
            return items
        batch_size = self.loader.batch_size
        return (
            (shares[self._rank] if shares[self._rank] > 0 else count_samples(batch, batch_size), batch)
            if shares[self._rank]
            else (-1, None)
            for shares, batch in items
        )

    def _index(self, rows: TensorRows, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        """Batches indexed at once, without the loader."""
        shard, rank = self._shard, self._rank
        if self.loader.generator is not None:
            draw_base_seed(self.loader)  # from the user's own generator, from which the order may be drawn next
        order = shard.order if isinstance(shard, ShardSampler) else None
        if order is None or not isinstance(shard, ShardSampler) or shard.plan is None:
            for indices, shares in shard.batches(first_batch):
                yield shares, rows.take_list(indices) if shares[rank] else None
            return
        plan, batch_index = shard.plan, first_batch
        full = plan.shares(0)
        for block in index_blocks(order, plan, rank, first_batch):
            for batch in rows.take(torch.from_numpy(block), plan.batch_size):
                yield full if batch_index < plan.num_full else plan.shares(batch_index), batch
                batch_index += 1
        if batch_index < plan.num_batches:
            yield plan.shares(batch_index), None

    def _read(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        """Batches as the twin's workers, or without any this process, load them."""
        asked, workers = self._asked, self.loader.num_workers > 0
        asked.first_batch = batch_index = first_batch
        with Aside(derive_seed(self._shard.seed, "loader", epoch, self._rank)):
            batches = whole(iter(self.loader), self._name)
        aside = Aside()
        while True:
            if workers:
                batch = next(batches, _END)
            else:
                with aside.reseed(asked.batch_seed(batch_index)):
                    batch = next(batches, _END)
            if batch is _END:
                break
            loaders.check_asked(asked.log, self.loader, self._name)
            yield asked.log.popleft(), batch
            batch_index += 1
        if asked.log and asked.log[0][self._rank] == 0:
            yield asked.log.popleft(), None


class _Stream:
    """An iterable dataset's loader, whose twin reads the whole stream and keeps this rank's samples of it."""

    sizes_known = False
    order_digest = None

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, name: str, given: bool) -> None:
        self._name = name
        self._seed = derive_seed(seed, "stream", rank) if given else derive_seed(seed, "stream")
        # Of a stream that is this rank's own share already, it keeps all.
        shared = world_size > 1 and not given
        self.loader = stream_twin(
            loader, *((0, 1) if given else (rank, world_size)), shared=shared, with_places=True, name=name
        )
        batch_size = None if loader.batch_sampler is None else loader.batch_size
        self.global_batch_size = None if batch_size is None else batch_size * world_size
        # What a dataset says of its length, and how its workers share it out, is its own affair: a plan, not a promise.
        length = length_of(loader.dataset)
        plan = BatchPlan(length or 0, batch_size or 1, 1 if given else world_size, loader.drop_last)
        self.num_batches = None if length is None else plan.num_batches
        self.num_samples = None if length is None or batch_size is None or given else length
        self._places = StreamPlaces(self.loader, own_share=given)
        self.position = self._places if self.loader.dataset.stateful else None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        # The same on all ranks, unlike for a map-style dataset's batches: they are to read one stream.
        seed = derive_seed(self._seed, epoch)
        seed_stream(self.loader, seed)
        aside = Aside(seed)
        with aside:
            shares = whole(iter(self.loader), self._name)
        if self.loader.num_workers == 0:
            shares = drawn_aside(shares, aside)
        if self.position is not None:
            first_batch = 0 if self.position.goes_on else first_batch
            shares = self._places.read(shares)
        for share in islice(shares, first_batch, None):
            yield share.size, share.batch


class _Opaque:
    """An iterable that nobody can look into: each rank iterates it all, and keeps every ``world_size``-th batch.

    Parameters
    ----------
    given : bool
        Whether it is this rank's own share already, so that it keeps all.
    """

    sizes_known = False
    order_digest = None

    def __init__(self, loader: Any, rank: int, world_size: int, seed: int, name: str, given: bool) -> None:
        self.loader = libraries.same_on_all_ranks(loader)
        self._name = name
        self._seed = derive_seed(seed, "stream", rank) if given else derive_seed(seed, "stream")
        self._rank, self._step = (0, 1) if given else (rank, world_size)
        self._batch_size = getattr(loader, "batch_size", None)
        length = None if loaders.is_stream(loader) else length_of(loader)
        self.num_batches = None if length is None else shard_size(length, 0, self._step)
        self.num_samples: int | None = None
        self.global_batch_size: int | None = None
        self.position = InProcess.of(self.loader, name)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        aside = Aside(derive_seed(self._seed, epoch))
        first = first_batch * self._step + self._rank
        with aside:
            if self.position is None:
                batches = whole(iter(self.loader), self._name)
            else:
                # Each rank has stopped at its own batch of the round.
                first = self._step - 1 if self.position.goes_on else first
                batches, self.position.aside = self.position.read(), aside
        for batch in islice(drawn_aside(batches, aside), first, None, self._step):
            yield max(1, count_samples(batch, self._batch_size)), batch


class _Columns:
    """Batches that all ranks read, each its own columns of them."""

    sizes_known = True
    order_digest = None
    position = None

    def __init__(self, loader: SplitBatches, rank: int, world_size: int, seed: int | None, name: str) -> None:
        self.loader = loader
        self._rank, self._world_size, self._name = rank, world_size, name
        self._seed = None if seed is None else derive_seed(seed, "columns")
        self.num_batches = length_of(loader)
        self.num_samples: int | None = None
        self.global_batch_size: int | None = None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[RankSizes, Any]]:
        # The same random state on all ranks: they are to read the same batches.
        aside = None if self._seed is None else Aside(derive_seed(self._seed, epoch))
        for columns, batch in islice(read_columns(self.loader, aside, self._name), first_batch, None):
            shares = self.loader.shares(columns, self._world_size)
            yield shares, self.loader.part(batch, columns, self._rank, self._world_size)
