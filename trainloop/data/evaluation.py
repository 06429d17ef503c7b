"""Evaluation batches: the very batches that one process would see, each on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader

from trainloop.data import loaders
from trainloop.data.batches import count_samples
from trainloop.data.columns import SplitBatches, read_columns
from trainloop.data.libraries import same_on_all_ranks
from trainloop.data.prefetch import on_device
from trainloop.data.randomness import Aside, SeedOnArrival, drawn_aside
from trainloop.data.samplers import digest_of, length_of, order_by_position, read_aside
from trainloop.data.steps import ExchangeInts
from trainloop.data.stops import whole
from trainloop.data.streams import Share, stream_twin
from trainloop.data.tensors import TensorRows, draw_base_seed, loader_batches
from trainloop.data.twins import twin
from trainloop.rng import derive_seed
from trainloop.sharding import IdentityOrder, Order

_UNITS_AT_ONCE = 64
_END: Any = object()


def eval_feed(
    loader: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int | None = None,
    name: str = "loader",
    exchange_ints: ExchangeInts | None = None,
    device: torch.device | None = None,
) -> EvalFeed:
    """A loader's batches for evaluation: rank ``r`` of ``w`` gets the batches ``r, r + w, ...`` of one process.

    Whole batches, so that whatever happens within a batch (collating, padding to the longest, BatchNorm in training
    mode) is what happens in one process. Nothing is padded or left out, but what the loader itself drops by its
    ``drop_last``. A loader that is already distributed is read as it is.

    Parameters
    ----------
    loader
        A ``DataLoader`` of any kind, or any iterable of batches.
    rank, world_size : int
        Whose batches, of how many ranks.
    seed : int, optional
        Common to all ranks. None only in one process: random numbers are drawn as ``for batch in loader`` draws them.
        Else none are drawn from the global generators, and every pass is the same.
    name : str
        What the user calls the loader, for messages.
    exchange_ints : callable, optional
        A collective exchange of integers. Where the loader's sampler has to be iterated to know the order, ranks then
        make sure, once a pass, that it is the same on all.
    device : torch.device, optional
        Where batches go; None leaves them where they are.

    Raises
    ------
    ConfigurationError
        If the loader can't be iterated.
    """
    loaders.check_iterable(loader, name)
    if world_size > 1 and seed is None:
        seed = 0
    source = _source(loader, rank, world_size, seed, name)
    return EvalFeed(source, loader, name, exchange_ints if world_size > 1 else None, device)


class EvalFeed:
    """One rank's batches of an evaluation; made by :func:`eval_feed`."""

    def __init__(
        self,
        source: _Source,
        users_loader: Any,
        name: str,
        exchange_ints: ExchangeInts | None,
        device: torch.device | None,
    ) -> None:
        self._source = source
        self._users_loader = users_loader
        self._name = name
        self._exchange_ints = exchange_ints
        self._device = device

    @property
    def loader(self) -> Any:
        """What this rank reads: the user's own loader, or its twin that is asked for this rank's batches only."""
        return self._source.loader

    @property
    def num_batches(self) -> int | None:
        """Batches of a pass over all ranks; None where only reading tells."""
        return self._source.num_batches

    def batches(self) -> Iterator[tuple[int, Any, int]]:
        """This rank's batches of one pass: ``(batch_index, batch, size)``, indices ascending.

        Ranks may have one batch more or less than others, or none. Collective only at the end of a pass, where every
        rank has to iterate the loader's sampler to know the order.

        Raises
        ------
        ConfigurationError
            If ranks read different orders.
        """
        items = self._source.items()
        if self._device is not None and self._device.type == "cuda":
            items = on_device(items, self._device)
        for (batch_index, size), batch in items:
            yield batch_index, batch, size
        digest = self._source.order_digest
        if digest is not None and self._exchange_ints is not None:
            loaders.check_orders(self._exchange_ints([digest]), self._users_loader, self._name)

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """How rows, gathered in batch order, go into dataset order: ``[rows[i] for i in row_order]``.

        Called after :meth:`batches` has been read to its end.

        Parameters
        ----------
        sizes : sequence of int
            Rows of every batch of the pass, over all ranks, in batch order.

        Returns
        -------
        sequence of int or None
            None where they are in dataset order already, or where there is no such order: the loader doesn't visit
            each sample exactly once, or the rows are not one a sample.
        """
        return self._source.row_order(sizes)


class _Source(Protocol):
    loader: Any
    num_batches: int | None

    @property
    def order_digest(self) -> int | None:
        """Of the whole order, after a pass over it; None where no rank can have another one."""
        ...

    def items(self) -> Iterator[tuple[tuple[int, int], Any]]:
        """``((batch_index, size), batch)`` of this rank's batches."""
        ...

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None: ...


def _source(loader: Any, rank: int, world_size: int, seed: int | None, name: str) -> _Source:
    if seed is not None:
        seed = derive_seed(seed, "evaluation")
    if isinstance(loader, SplitBatches):
        return _Columns(loader, rank, world_size, seed, name)
    if world_size > 1 and loaders.is_distributed(loader):
        return _Whole(loaders.for_rank(loader, rank, world_size, name), rank, world_size, seed, name, each_its_own=True)
    if isinstance(loader, DataLoader) and not loaders.is_stream(loader):
        return _Indexed(loader, rank, world_size, seed, name)
    return _Whole(loader, rank, world_size, seed, name, each_its_own=False)


class _Whole:
    """An iterable that nobody can look into: every rank reads it all, and keeps its own batches.

    Parameters
    ----------
    each_its_own : bool
        Whether the loader is already distributed: then every rank keeps all that it reads.
    """

    order_digest = None

    def __init__(
        self, loader: Any, rank: int, world_size: int, seed: int | None, name: str, *, each_its_own: bool
    ) -> None:
        self._name = name
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._each_its_own = each_its_own
        self._batch_size = getattr(loader, "batch_size", None)
        length = None if loaders.is_stream(loader) else length_of(loader)
        self.num_batches = length * world_size if length is not None and each_its_own else length
        self.loader = loader if seed is None else same_on_all_ranks(loader)
        # Of an iterable dataset it has to be seen that no sample comes once a worker, and that all ranks read the same.
        shared = world_size > 1 and not each_its_own
        if loaders.is_stream(loader) and not loaders.iterates_itself(loader) and (shared or loader.num_workers > 0):
            self.loader = stream_twin(loader, rank=0, world_size=1, shared=shared, with_places=False, name=name)

    def items(self) -> Iterator[tuple[tuple[int, int], Any]]:
        if self._seed is None:
            iterator = whole(iter(self.loader), self._name)
        else:
            aside = Aside(self._seed)
            with aside:
                iterator = whole(iter(self.loader), self._name)
            iterator = drawn_aside(iterator, aside)
        first, step = (0, 1) if self._each_its_own else (self._rank, self._world_size)
        for batch_index, batch in enumerate(islice(iterator, first, None, step)):
            size = None
            if isinstance(batch, Share):
                batch, size = batch.batch, batch.size
            if size is None:
                size = count_samples(batch, self._batch_size)
            yield (batch_index * self._world_size + self._rank, size), batch

    def row_order(self, sizes: Sequence[int]) -> None:
        return None


class _Columns:
    """Batches that all ranks read, each its own columns of them, in training as in evaluation."""

    order_digest = None

    def __init__(self, loader: SplitBatches, rank: int, world_size: int, seed: int | None, name: str) -> None:
        self.loader = loader
        self._rank, self._world_size, self._seed, self._name = rank, world_size, seed, name
        self.num_batches = length_of(loader)

    def items(self) -> Iterator[tuple[tuple[int, int], Any]]:
        aside = None if self._seed is None else Aside(self._seed)
        for batch_index, (columns, batch) in enumerate(read_columns(self.loader, aside, self._name)):
            size = self.loader.shares(columns, self._world_size)[self._rank]
            if size:
                part = self.loader.part(batch, columns, self._rank, self._world_size)
                yield (batch_index * self._world_size + self._rank, size), part

    def row_order(self, sizes: Sequence[int]) -> None:
        return None


class _Indexed:
    """A map-style dataset's loader, whose twin is asked for this rank's batches only."""

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int | None, name: str) -> None:
        self._name, self._rank, self._world_size, self._seed = name, rank, world_size, seed
        self._rows = TensorRows.of(loader)
        self._users_loader = loader
        self.num_batches = length_of(loader)
        index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._sampler = _RankBatches(index_sampler, length_of(loader.dataset), rank, world_size, seed)
        self._sampler.seeds_workers = seed is not None and loader.num_workers > 0
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.loader = twin(loader, **{slot: self._sampler})

    def items(self) -> Iterator[tuple[tuple[int, int], Any]]:
        log, batch_size = self._sampler.log, self.loader.batch_size
        for batch in self._batches():
            loaders.check_asked(log, self.loader, self._name)
            batch_index, size = log.popleft()
            yield (batch_index, count_samples(batch, batch_size) if size is None else size), batch

    @property
    def order_digest(self) -> int | None:
        return self._sampler.digest

    def _batches(self) -> Iterator[Any]:
        rows, seed = self._rows, self._seed
        if seed is None:
            return whole(iter(self.loader), self._name) if rows is None else loader_batches(rows, self.loader)
        if rows is not None:
            return self._seeded_rows(rows)
        return self._seeded(seed)

    def _seeded_rows(self, rows: TensorRows) -> Iterator[Any]:
        if self.loader.generator is not None:
            draw_base_seed(self.loader)
        for indices in self._sampler:
            yield rows.take_list(indices)

    def _seeded(self, seed: int) -> Iterator[Any]:
        aside = Aside(seed)
        with aside:
            iterator = whole(iter(self.loader), self._name)
        # A batch's random numbers depend on its index alone, so that they are those of one process on any rank.
        workers = self.loader.num_workers > 0
        batch_index = self._rank
        while True:
            if workers:
                batch = next(iterator, _END)
            else:
                aside.reseed(self._sampler.batch_seed(batch_index))
                with aside:
                    batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch
            batch_index += self._world_size

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        return self._sampler.row_order(sizes)


class _RankBatches(BatchSampler):
    """Every ``world_size``-th batch of a batch sampler (or index of a sampler), with a record of what all of them held.

    Parameters
    ----------
    index_sampler
        The user's own; every rank iterates it whole, or computes its own where the order is known by position.
    num_samples : int or None
        Size of the dataset; None where it has no length.
    rank, world_size : int
        Which batches to give.
    seed : int or None
        Common to all ranks; None: draw from the global generators, as the index sampler does by itself.
    """

    def __init__(
        self, index_sampler: Any, num_samples: int | None, rank: int, world_size: int, seed: int | None
    ) -> None:
        self.base = index_sampler
        self.sampler = getattr(index_sampler, "sampler", index_sampler)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.seeds_workers = False
        self.log: deque[tuple[int, int | None]] = deque()
        """Index and number of samples of each batch that was asked for and not yet read; None: not known."""
        self._num_samples = num_samples
        self._visited: list[Any] = []
        self._order: Order | None = None
        if type(index_sampler) is BatchSampler:
            self.batch_size, self.drop_last = index_sampler.batch_size, index_sampler.drop_last
            key = None if seed is None else derive_seed(seed, "order")
            self._order = order_by_position(index_sampler.sampler, key)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def digest(self) -> int | None:
        """Of all batches of the last pass; None where their order is known by position."""
        return (
            None
            if self._order is not None
            else digest_of([unit.tolist() if isinstance(unit, np.ndarray) else unit for unit in self._visited])
        )

    def batch_seed(self, batch_index: int) -> int:
        """Of what is drawn while a batch is loaded."""
        assert self.seed is not None  # without one, nothing is seeded
        return derive_seed(self.seed, "batch", batch_index)

    def __iter__(self) -> Iterator[Any]:
        self.log.clear()
        self._visited = []
        for batch_index, unit in self._by_position() if self._order is not None else self._iterated():
            self.log.append((batch_index, len(unit) if isinstance(unit, (list, tuple)) else None))
            yield SeedOnArrival(unit, self.batch_seed(batch_index)) if self.seeds_workers else unit

    def _by_position(self) -> Iterator[tuple[int, list[int]]]:
        order, size = self._order, self.batch_size
        assert order is not None
        length = len(order)
        stop = length - length % size if self.drop_last else length
        for start in range(self.rank * size, stop, self.world_size * size):
            yield start // size, order.at(np.arange(start, min(start + size, stop))).tolist()

    def _iterated(self) -> Iterator[tuple[int, Any]]:
        units = iter(self.base) if self.seed is None else self._read_aside(self.seed)
        for batch_index, unit in enumerate(units):
            self._visited.append(_compact(unit))
            if batch_index % self.world_size == self.rank:
                yield batch_index, unit

    def _read_aside(self, seed: int) -> Iterator[Any]:
        for units in read_aside(self.base, _UNITS_AT_ONCE, derive_seed(seed, "sampler")):
            yield from units

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """See :meth:`EvalFeed.row_order`."""
        if isinstance(self._order, IdentityOrder):
            return None
        indices: npt.NDArray[np.int64] | None
        if self._order is not None:
            rows = sum(sizes)
            whole = rows == len(self._order) == self._num_samples
            cut_alike = all(size == self.batch_size for size in sizes[:-1])
            indices = self._order.at(np.arange(rows)) if whole and cut_alike else None
        else:
            indices = self._visited_indices(sizes)
        if indices is None or len(indices) != sum(sizes):
            return None
        order = np.argsort(indices, kind="stable")
        return None if np.array_equal(order, np.arange(len(order))) else order.tolist()

    def _visited_indices(self, sizes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """The dataset index of each row, where each index of the dataset was visited once."""
        visited = self._visited
        if len(visited) != len(sizes) or self._num_samples is None:
            return None
        if all(isinstance(unit, np.ndarray) for unit in visited):
            if any(len(unit) != size for unit, size in zip(visited, sizes, strict=True)) or not visited:
                return None
            indices = units = np.concatenate(visited)
        elif all(isinstance(unit, (int, np.integer)) for unit in visited):
            # batch_size=None: an index stands for a batch, whose rows stay together.
            units = np.asarray(visited, dtype=np.int64)
            indices = np.repeat(units, sizes)
        else:
            return None
        units = np.where(units < 0, units + self._num_samples, units)
        if len(units) != self._num_samples or not np.array_equal(np.sort(units), np.arange(self._num_samples)):
            return None
        return np.where(indices < 0, indices + self._num_samples, indices)


def _compact(unit: Any) -> Any:
    """A batch's indices as an array, where they are integers: a pass may have many."""
    if not isinstance(unit, (list, tuple)):
        return unit
    try:
        return np.asarray(unit, dtype=np.int64)
    except (TypeError, ValueError):
        return unit
