"""Read the batches that one process would see in evaluation, each on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from trainloop._support.rng import derive_seed
from trainloop.data.batch.batches import on_device
from trainloop.data.feed.feed import Feed
from trainloop.data.feed.steps import ExchangeInts
from trainloop.data.loader import loaders
from trainloop.data.loader.contents import contents_of
from trainloop.data.order.columns import SplitBatches
from trainloop.data.order.orders import cuts_torchs_order, length_of
from trainloop.data.source.indexed import Indexed, eval_shard, presharded_shard
from trainloop.data.source.sources import Columns, Opaque, Source
from trainloop.data.source.tensors import TensorRows
from trainloop.data.stream.streams import stream_loader

Batches: TypeAlias = Iterator[tuple[int, Any, int]]


class EvalFeed(Feed):
    """A loader's batches for evaluation: rank ``r`` of ``w`` gets the loader's batches ``r, r + w, ...``

    Ranks get whole batches, so that operations within a batch (collating, padding to the longest, BatchNorm in training
    mode) give the same results as in one process. Nothing is padded or left out, except by the loader's own
    ``drop_last``. A loader that is already distributed is read unchanged.

    Parameters
    ----------
    loader
        A ``DataLoader`` of any kind, or any iterable of batches.
    rank, world_size : int
        The rank to read for, and the number of ranks.
    seed : int, optional
        Seed common to all ranks. None (only in one process): random numbers are drawn as by ``for batch in loader``.
        With a seed, nothing is drawn from the global generators, and every pass is the same.
    name : str
        Name of the loader, for messages.
    exchange_ints : callable, optional
        A collective exchange of integers. If the order is known only by iterating the loader's sampler, ranks use it
        once per pass to check that all have the same order.
    device : torch.device, optional
        Device to move batches to; None to leave them where they are.

    Raises
    ------
    ConfigurationError
        If the loader can't be iterated, or has a ``DistributedSampler`` for another number of ranks.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        name: str = "loader",
        exchange_ints: ExchangeInts | None = None,
        device: torch.device | None = None,
    ) -> None:
        loaders.check_iterable(loader, name)
        if world_size > 1 and seed is None:
            seed = 0
        presharded = world_size > 1 and loaders.is_distributed(loader)
        self._presharded = presharded
        source = _source_of(loader, rank, world_size, seed, name, presharded)
        super().__init__(source, loader, (rank, world_size, exchange_ints), seed, name)
        length = None if loaders.is_stream(loader) else length_of(loader)
        # A distributed loader knows only the length of its shard.
        self.num_batches = length * world_size if length is not None and presharded else length
        """Batches of a pass over all ranks; None if unknown before reading."""
        self._device = device
        self._contents: int | None = None

    @property
    def shared(self) -> loaders.Shared:
        """Properties that must agree with the other ranks' feeds, so that each batch is read by one rank.

        Compare them before the first pass, in which loaders of different kinds would do different exchanges.
        """
        source, plain = self._source, loaders.plain_batches(self._users_loader)
        if not source.shares:
            return loaders.Shared(derive_seed(source.rule))
        in_order = None if plain is None else length_of(plain.sampler)
        counts = (in_order, self.num_batches, None if plain is None else plain.batch_size)
        seed = loaders.seed_in_common(self._seed) if source.draws_order else -1
        if self._contents is None:
            self._contents = contents_of(self._users_loader)
        samples, batches, size = (-1 if n is None else n for n in counts)
        return loaders.Shared(derive_seed(source.rule), seed, samples, batches, size, self._contents)

    @property
    def is_one_batch(self) -> bool:
        """True if a pass certainly has one batch, which one rank reads; False if that is not known before reading."""
        loader = self._users_loader
        if type(loader) in (list, tuple):
            return len(loader) == 1
        batches = loader.batch_sampler if type(loader) is DataLoader else None
        return cuts_torchs_order(batches) and len(batches) == 1

    def batches(self, padded: Callable[[Batches], Batches] | None = None) -> Batches:
        """Yield this rank's batches of one pass: ``(batch_index, batch, size)``, indices ascending.

        A rank may have one batch more or fewer than others. Collective only at the end of a pass, where ranks that have
        iterated the loader's sampler compare its order, or their shards.

        Parameters
        ----------
        padded : callable, optional
            Wraps the iterator if ranks exchange something for each batch. It must end on all ranks at the same time.

        Raises
        ------
        ConfigurationError
            If ranks read different orders.
        """
        self._begin_pass()
        items: Iterator[tuple[Any, Any]] = self._own_batches()
        if self._device is not None and self._device.type != "cpu":
            items = on_device(items, self._device)
        own = ((batch_index, batch, size) for (batch_index, size), batch in items)
        yield from own if padded is None else padded(own)
        self._compare_ranks()

    def _own_batches(self) -> Iterator[tuple[tuple[int, int], Any]]:
        """Yield ``((batch_index, size), batch)`` of each round of ``world_size`` batches that has one for this rank."""
        rank, known = self._rank, self._source.sizes_known and not self._source.counts
        for round_index, (sizes, batch) in enumerate(self._source.items(epoch=0, first_batch=0)):
            size = sizes[rank] if known else sizes
            if size is not None:
                yield (round_index * self._world_size + rank, size), batch

    def ranks_beside(self, batch_index: int) -> range | None:
        """Return the ranks that have a batch at the time of this one; None if all have one, or if it is not known."""
        if self.num_batches is None or self._presharded:
            return None
        left = self.num_batches - batch_index // self._world_size * self._world_size
        return range(left) if left < self._world_size else None

    def row_order(self, sizes: Sequence[int]) -> Sequence[int] | None:
        """Return the permutation from batch order to dataset order: ``[rows[i] for i in row_order]``.

        Call it after :meth:`batches` has been read to its end.

        Parameters
        ----------
        sizes : sequence of int
            Rows of every batch of the pass, over all ranks, in batch order.

        Returns
        -------
        sequence of int or None
            None if the rows are already in dataset order, or if that order is undefined, because the loader does not
            visit each sample exactly once, or a sample does not have exactly one row.
        """
        return self._source.row_order(sizes)


def _source_of(loader: Any, rank: int, world_size: int, seed: int | None, name: str, presharded: bool) -> Source:
    """Return the source for a loader of any kind, split by whole batches."""
    # Evaluation has its own random numbers, so that it does not affect training.
    if seed is not None:
        seed = derive_seed(seed, "evaluation")
    if isinstance(loader, SplitBatches):
        return Columns(loader, rank, world_size, seed, name)
    if presharded or world_size == 1:  # in one process, a sampler for several ranks would leave out rows
        loader = loaders.for_rank(loader, rank, world_size, name)
    if loaders.is_indexed(loader, presharded) and not loaders.yields_otherwise(loader):
        shard = (presharded_shard if presharded else eval_shard)(loader, rank, world_size, seed)
        return Indexed(loader, shard, name, TensorRows.of(loader))
    # An iterable dataset may repeat each sample in every worker, or differ between ranks: the copy checks for both, and
    # counts the samples of each batch.
    shared = world_size > 1 and not presharded
    if loaders.is_stream(loader) and not loaders.iterates_itself(loader):
        loader = stream_loader(loader, rank=0, world_size=1, shared=shared, with_places=False, name=name)
    return Opaque(loader, rank, world_size, seed, name, presharded=presharded, with_position=False)
