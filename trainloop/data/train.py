"""Training batches: a loader's epoch as this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from trainloop.data import loaders
from trainloop.data.batches import count_samples
from trainloop.data.prefetch import on_device
from trainloop.data.randomness import Aside, drawn_aside
from trainloop.data.samplers import (
    BatchShardSampler,
    LoggedBatchSampler,
    ShardSampler,
    Shares,
    generators_of,
    length_of,
    order_by_position,
)
from trainloop.data.steps import ExchangeInts, StepShare, steps_of_exchanged, steps_of_known
from trainloop.data.streams import seed_stream, stream_twin
from trainloop.data.tensors import TensorRows, draw_base_seed, loader_batches
from trainloop.data.twins import twin
from trainloop.errors import ConfigurationError
from trainloop.rng import derive_seed
from trainloop.sharding import BatchPlan, index_blocks, shard_size


def train_feed(
    loader: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int | None = None,
    name: str = "train_loader",
    exchange_ints: ExchangeInts | None = None,
    device: torch.device | None = None,
) -> TrainFeed:
    """A loader's epochs as the optimizer steps of one rank.

    Nothing is read from the loader, and nothing is drawn, before :meth:`TrainFeed.steps`; so a call that is dropped
    checks a loader without any effect.

    Parameters
    ----------
    loader
        A ``DataLoader`` of any kind, or any iterable of batches.
    rank, world_size : int
        Which share of each global batch, of how many.
    seed : int, optional
        Of order and of augmentation, common to all ranks; None only in one process, where the loader then is read as
        ``for batch in loader`` reads it, random number for random number.
    name : str
        What the user calls the loader, for messages.
    exchange_ints : callable, optional
        A collective exchange of integers, for loaders whose sizes no rank can know of another.
    device : torch.device, optional
        Where batches go; None leaves them where they are.

    Raises
    ------
    ConfigurationError
        If the loader can't be shared out with its meaning kept, or has nothing to train on.
    """
    loaders.check_trains(loader, world_size, name)
    if world_size > 1 and seed is None:
        seed = 0
    source = _source(loader, rank, world_size, seed, name)
    if not source.sizes_known and world_size > 1 and exchange_ints is None:
        raise ConfigurationError(
            f"{name}: how many samples each of {world_size} ranks has is known only by asking; exchange_ints=None was "
            f"given. Pass trainloop.distributed.exchange_ints."
        )
    return TrainFeed(source, loader, rank, world_size, name, exchange_ints, device)


class TrainFeed:
    """One rank's optimizer steps, epoch by epoch; made by :func:`train_feed`."""

    def __init__(
        self,
        source: _Source,
        users_loader: Any,
        rank: int,
        world_size: int,
        name: str,
        exchange_ints: ExchangeInts | None,
        device: torch.device | None,
    ) -> None:
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._exchange_ints = exchange_ints
        self._device = device
        self._epoch = 0
        self._generators = generators_of(users_loader)
        self._at_epoch_begin: dict[str, torch.Tensor] | None = None

    @property
    def loader(self) -> Any:
        """The loader that this rank reads: the user's own, or its twin with this rank's sampler."""
        return self._source.loader

    @property
    def num_batches(self) -> int | None:
        """Micro-batches of an epoch, the maximum over ranks; None where only reading tells."""
        return self._source.num_batches

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; None where only reading tells."""
        return self._source.num_samples

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a full micro-batch, over all ranks; None where there is no such thing."""
        return self._source.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Which epoch :meth:`steps` gives next; every rank calls it before each epoch."""
        self._epoch = epoch
        for holder in _epoch_holders(self._source.loader):
            holder.set_epoch(epoch)

    def steps(self, grad_accumulation: int, skip_steps: int = 0) -> Iterator[StepShare]:
        """One epoch's optimizer steps.

        Collective: every rank iterates to the end, or stops at the same step. Where sizes are known by arithmetic, no
        step exchanges anything.

        Parameters
        ----------
        grad_accumulation : int
            Micro-batches of a step; the epoch's last step may have fewer.
        skip_steps : int
            Steps that were done already: nothing is loaded for them where the loader's sampler says what they held,
            else they are read and thrown away.

        Raises
        ------
        ConfigurationError
            If the epoch turns out to be empty.
        """
        self._at_epoch_begin = self._generator_states()
        items = self._source.items(self._epoch, skip_steps * grad_accumulation)
        if self._device is not None and self._device.type == "cuda":
            items = on_device(items, self._device)
        if self._source.sizes_known:
            steps = steps_of_known(items, grad_accumulation, self._rank)
        elif self._world_size == 1:
            steps = steps_of_known((((size,), batch) for size, batch in items), grad_accumulation, 0)
        else:
            assert self._exchange_ints is not None  # train_feed saw to it
            steps = steps_of_exchanged(items, grad_accumulation, self._rank, self._exchange_ints)
        any_step = skip_steps > 0
        for step in steps:
            any_step = True
            yield step
        self._at_epoch_begin = None
        if not any_step:
            raise ConfigurationError(
                f"{self._name} gave no batch in epoch {self._epoch}: training needs one at least. An iterator can be "
                f"read once; pass an object whose __iter__ starts anew each epoch."
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """States of the generators that the user gave the loader: at the running epoch's begin, between epochs as now.

        An epoch is resumed by loading this, then :meth:`set_epoch`, then ``steps(..., skip_steps=...)``.
        """
        return self._generator_states() if self._at_epoch_begin is None else self._at_epoch_begin

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take up what :meth:`state_dict` gave; generators that are not there any more are ignored."""
        for name, generator in self._generators.items():
            if name in state:
                generator.set_state(state[name])

    def close(self) -> None:
        """End persistent workers; the feed can't be read afterwards."""
        if isinstance(self._source.loader, DataLoader) and not isinstance(self._source, _Untouched):
            self._source.loader._iterator = None

    def _generator_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self._generators.items()}


def _epoch_holders(loader: Any) -> Iterator[Any]:
    """What hangs on a loader and wants to know the epoch."""
    seen: list[Any] = []
    candidates = [loader]
    for name in ("sampler", "batch_sampler", "dataset"):
        part = getattr(loader, name, None)
        candidates.append(part)
        if name != "sampler":
            candidates.append(getattr(part, "sampler" if name == "batch_sampler" else "dataset", None))
    for part in candidates:
        if callable(getattr(part, "set_epoch", None)) and all(part is not other for other in seen):
            seen.append(part)
            yield part


# -- where batches come from -------------------------------------------------------------------------------------------


class _Source(Protocol):
    loader: Any
    sizes_known: bool
    """Whether items carry the sizes of all ranks, ``(shares, batch)``, or this rank's only, ``(size, batch)``."""
    num_batches: int | None
    num_samples: int | None
    global_batch_size: int | None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]: ...


def _source(loader: Any, rank: int, world_size: int, seed: int | None, name: str) -> _Source:
    if loaders.is_distributed(loader):
        return _Untouched(loaders.for_rank(loader, rank, world_size, name), rank, world_size, seed)
    rows = TensorRows.of(loader)
    if seed is None:
        return _Untouched(loader, 0, 1, None) if rows is None else _Tensors(loader, rows)
    if not isinstance(loader, DataLoader):
        return _EveryNth(loader, rank, world_size, seed)
    if loaders.is_stream(loader):
        if loaders.iterates_itself(loader):
            return _EveryNth(loader, rank, world_size, seed)
        return _Stream(loader, rank, world_size, seed)
    return _Indexed(loader, rank, world_size, seed, name, rows)


class _Untouched:
    """The user's own loader, iterated as a hand-written loop would."""

    sizes_known = False

    def __init__(self, loader: Any, rank: int, world_size: int, seed: int | None) -> None:
        self.loader = loader
        self.num_batches = None if loaders.is_stream(loader) else length_of(loader)
        batches = loaders.plain_batches(loader)
        samples = length_of(batches.sampler) if batches is not None else None
        self._plan = None
        if batches is not None and samples is not None:
            self._plan = BatchPlan(samples, batches.batch_size, 1, batches.drop_last)
        self.num_samples = self._plan.num_taken * world_size if self._plan is not None else None
        self.global_batch_size = batches.batch_size * world_size if batches is not None else None
        self._batch_size = getattr(loader, "batch_size", None)
        self._rank, self._seed = rank, seed

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        if self._seed is None:
            iterator = iter(self.loader)
        else:
            aside = Aside(derive_seed(self._seed, "loader", epoch, self._rank))
            with aside:
                iterator = iter(self.loader)
            iterator = drawn_aside(iterator, aside)
        plan, default = self._plan, self._batch_size
        for batch_index, batch in enumerate(iterator):
            if batch_index < first_batch:
                continue
            if plan is not None and batch_index < plan.num_full:
                yield plan.batch_size, batch
            elif plan is not None and batch_index == plan.num_full:
                yield plan.last_size or plan.batch_size, batch
            else:
                yield max(1, count_samples(batch, default)), batch


class _Tensors:
    """A ``TensorDataset``'s loader in one process without a seed: the same batches and draws, without its cost."""

    sizes_known = True

    def __init__(self, loader: DataLoader[Any], rows: TensorRows) -> None:
        self.loader = loader
        self._rows = rows
        batches = loaders.plain_batches(loader)
        samples = None if batches is None else length_of(batches.sampler)
        self._size = None if batches is None else batches.batch_size
        plan = (
            None if batches is None or samples is None else BatchPlan(samples, batches.batch_size, 1, batches.drop_last)
        )
        self.num_batches = length_of(loader)
        self.num_samples = None if plan is None else plan.num_taken
        self.global_batch_size = self._size

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Shares, Any]]:
        size = self._size
        full = (size,) if size is not None else None
        batches = loader_batches(self._rows, self.loader)
        for batch in islice(batches, first_batch, None) if first_batch else batches:
            count = len(batch[0])
            yield full if count == size and full is not None else (count,), batch


class _Indexed:
    """A map-style dataset's loader, whose twin is asked for this rank's indices only."""

    def __init__(
        self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, name: str, rows: TensorRows | None
    ) -> None:
        self._name = name
        self._rank = rank
        self._rows = rows
        plain = loaders.plain_batches(loader)
        scalar = False
        shard: ShardSampler | BatchShardSampler
        if plain is not None or (loader.batch_sampler is None and order_by_position(loader.sampler, seed) is not None):
            scalar = plain is None  # batch_size=None: the dataset's elements are batches, taken one by one
            shard = ShardSampler(
                loader.sampler if plain is None else plain.sampler,
                loader.dataset,
                batch_size=1 if plain is None else plain.batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=False if plain is None else plain.drop_last,
                seed=seed,
            )
        else:
            index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            shard = BatchShardSampler(index_sampler, rank=rank, world_size=world_size, seed=seed)
        self._shard = shard
        self._batches = LoggedBatchSampler(
            shard, loader.batch_size, loader.drop_last, scalar=scalar, seeds_workers=loader.num_workers > 0
        )
        if loader.batch_sampler is None:
            self.loader = twin(loader, sampler=self._batches)
        else:
            self.loader = twin(loader, sampler=shard, batch_sampler=self._batches)
        self._plan = shard.plan if isinstance(shard, ShardSampler) else None
        if self._plan is not None:
            self.num_batches: int | None = self._plan.num_batches
        else:
            length = None if isinstance(shard, ShardSampler) else length_of(shard.base)
            self.num_batches = None if length is None else shard_size(length, 0, world_size)
        self.num_samples = None if self._plan is None or scalar else self._plan.num_taken
        self.global_batch_size = None if plain is None else plain.batch_size * world_size
        # Lists of indices have lengths; single elements that are batches have not, before they are loaded.
        self.sizes_known = plain is not None or loader.batch_sampler is not None

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        self._shard.set_epoch(epoch)
        if self._rows is not None:
            return self._rows_items(self._rows, first_batch)
        return self._loader_items(epoch, first_batch)

    def _rows_items(self, rows: TensorRows, first_batch: int) -> Iterator[tuple[Any, Any]]:
        shard, rank = self._shard, self._rank
        if self.loader.generator is not None:
            draw_base_seed(self.loader)  # from the user's own generator, whose next draws are the order
        if isinstance(shard, ShardSampler) and shard.plan is not None and (order := shard.order) is not None:
            plan, batch_index = shard.plan, first_batch
            full = plan.shares(0) if plan.num_full else ()
            for block in index_blocks(order, plan, rank, first_batch):
                for batch in rows.take(torch.from_numpy(block), plan.batch_size):
                    yield full if batch_index < plan.num_full else plan.shares(batch_index), batch
                    batch_index += 1
            if batch_index < plan.num_batches:
                yield plan.shares(batch_index), None
            return
        for indices, shares in shard.batches(first_batch):
            yield shares, rows.take_list(indices) if shares[rank] else None

    def _loader_items(self, epoch: int, first_batch: int) -> Iterator[tuple[Any, Any]]:
        batches, log, rank = self._batches, self._batches.log, self._rank
        batches.first_batch = first_batch
        aside = Aside(derive_seed(self._shard.seed, "loader", epoch, rank))
        with aside:
            iterator = iter(self.loader)
        batch_index = first_batch
        workers = self.loader.num_workers > 0
        while True:
            if workers:
                batch = next(iterator, _END)
            else:
                aside.reseed(batches.batch_seed(batch_index))
                with aside:
                    batch = next(iterator, _END)
            if batch is _END:
                break
            loaders.check_asked(log, self.loader, self._name)
            shares = log.popleft()
            yield shares if self.sizes_known else max(1, count_samples(batch, self.loader.batch_size)), batch
            batch_index += 1
        if log and log[0][rank] == 0:
            yield log.popleft() if self.sizes_known else -1, None


class _Stream:
    """An iterable dataset's loader, whose twin reads the whole stream and keeps this rank's samples."""

    sizes_known = False

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self.loader = stream_twin(loader, rank, world_size)
        batch_size = None if loader.batch_sampler is None else loader.batch_size
        length = length_of(loader.dataset)
        self.num_samples = None if batch_size is None else length
        self.global_batch_size = None if batch_size is None else batch_size * world_size
        plan = None if length is None else BatchPlan(length, batch_size or 1, world_size, loader.drop_last)
        self.num_batches = None if plan is None else plan.num_batches

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        # All ranks read one stream: the same seed on each, unlike that of a map-style dataset's batches.
        seed = derive_seed(self._seed, "stream", epoch)
        seed_stream(self.loader, seed)
        workers = self.loader.num_workers > 0
        aside = Aside(seed)
        with aside:
            iterator = iter(self.loader)
        for share in islice(iterator if workers else drawn_aside(iterator, aside), first_batch, None):
            yield share.size, share.batch


class _EveryNth:
    """An iterable of batches that nobody can look into: each rank iterates it all, and keeps its own."""

    sizes_known = False

    def __init__(self, loader: Any, rank: int, world_size: int, seed: int) -> None:
        self.loader = loader
        self._rank, self._world_size, self._seed = rank, world_size, seed
        length = length_of(loader)
        self.num_batches = None if length is None else shard_size(length, 0, world_size)
        self.num_samples: int | None = None
        self.global_batch_size: int | None = None
        self._batch_size = getattr(loader, "batch_size", None)

    def items(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Any]]:
        aside = Aside(derive_seed(self._seed, "stream", epoch))
        with aside:
            iterator = iter(self.loader)
        first = first_batch * self._world_size + self._rank
        for batch in islice(drawn_aside(iterator, aside), first, None, self._world_size):
            yield max(1, count_samples(batch, self._batch_size)), batch


_END: Any = object()
