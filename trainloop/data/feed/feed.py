"""What the feeds of training and of evaluation have in common: the loader that a rank reads, and checks over ranks."""

from __future__ import annotations

from typing import Any

from trainloop.data.feed.steps import ExchangeInts
from trainloop.data.loader import loaders
from trainloop.data.loader.loader_copies import WorkersDataset, end_workers
from trainloop.data.source.sources import Source


class Feed:
    """A loader as one rank reads it.

    Parameters
    ----------
    source : Source
        Reads the loader.
    loader
        The user's loader.
    ranks : tuple
        The rank to read for, the number of ranks, and their exchange of integers.
    seed, name
        As for :class:`~trainloop.data.feed.train.TrainFeed`.
    """

    def __init__(
        self, source: Source, loader: Any, ranks: tuple[int, int, ExchangeInts | None], seed: int | None, name: str
    ) -> None:
        self._source, self._users_loader, self._seed, self._name = source, loader, seed, name
        self._rank, self._world_size, exchange_ints = ranks
        self._exchange_ints = exchange_ints or (lambda mine: [mine])
        self._compared_shards = False
        self._workers_dataset = WorkersDataset(name)

    @property
    def loader(self) -> Any:
        """The loader that this rank reads: the user's, or a copy that yields only this rank's batches."""
        return self._source.loader

    @property
    def reads_copy(self) -> bool:
        """True if this rank reads a copy of the user's loader."""
        return self.loader is not self._users_loader

    def close(self) -> None:
        """End persistent workers of this rank's copy of the loader; the feed can't be read afterwards."""
        # The user's loader keeps its persistent workers: it may be read again after fit.
        if self.reads_copy:
            end_workers(self.loader)

    def _begin_pass(self) -> None:
        if self._rank == 0:
            self._workers_dataset.begin_pass(self.loader, getattr(self._users_loader, "dataset", None))

    def _compare_ranks(self) -> None:
        """Check that all ranks read the same order, and in the first pass, that they do not read the same shard.

        Collective if the source has read the order by iterating the loader's sampler.
        """
        if self._world_size == 1:
            return
        digest = self._source.order_digest
        if digest is not None:
            loaders.check_orders(self._exchange_ints([digest]), self._users_loader, self._name)
        if not self._compared_shards and (own := self._source.shard_digest) is not None:
            self._compared_shards = True
            loaders.warn_of_equal_shards(self._exchange_ints([own]), self._users_loader, self._name, self._rank)
