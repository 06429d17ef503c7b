"""Ranks without a batch where others have one, and a forward is an exchange of all ranks (``fsdp``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainloop import distributed
from trainloop._metrics import Recorder
from trainloop._support import rng
from trainloop._support.carried import carried_state_of, load_carried_state
from trainloop.parallel.sync_batchnorm import CpuSyncBatchNorm

if TYPE_CHECKING:
    from trainloop.train_loop.run import Run

__all__ = ["Idle", "together"]


class Idle:
    """A rank's forward for nothing: a batch of another rank, of which nothing shows.

    No log, no step of BatchNorm's statistics, no random number, no state that is carried on. Its gradients are zero: it
    runs the very batch that another rank runs at the time, so that all gather the same units, and where that one's loss
    is infinite or NaN, so are the gradients all the same.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def given(self, batches: list[Any], counts: list[int], i: int) -> Any:
        """On ranks that have no ``i``-th batch, that of the first rank that has; else ``None``. Collective."""
        if min(counts) > i:
            return None
        # Rank 0 may be one that has none.
        source = next(rank for rank, n in enumerate(counts) if n > i)
        mine = i < len(batches)
        theirs = distributed.broadcast_object(batches[i] if mine else None, source)
        return None if mine else theirs

    @contextmanager
    def nothing_shows(self) -> Iterator[None]:
        """Around such a forward, and its backward."""
        run = self._run
        model = run.loop.model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        carried = carried_state_of(model)
        # They would wait for each other: the ranks that have a batch normalise among themselves.
        synced = [part for part in model.modules() if isinstance(part, (CpuSyncBatchNorm, nn.SyncBatchNorm))]
        training = [part.training for part in synced]
        for part in synced:
            part.training = False
        try:
            with run.listening(Recorder()), rng.isolated():
                yield
        finally:
            for part, flag in zip(synced, training, strict=True):
                part.training = flag
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            load_carried_state(model, [carried], 0, 1)


def together(
    batches: Iterator[tuple[int, Any, int]], forward: Callable[[Any], Any], idle: Idle
) -> Iterator[tuple[int, Any, int]]:
    """This rank's batches of an evaluation; where others have more, ``forward`` runs for nothing. Collective."""
    last: Any = None
    while True:
        item = next(batches, None)
        counts = [n for (n,) in distributed.exchange_ints([int(item is not None)])]
        if not any(counts):
            return
        if last is None and not all(counts):  # this rank may never have had one; in the first round all see it alike
            last = idle.given([item[1]] if item is not None else [], counts, 0)
        if item is not None:
            last = item[1]
            yield item
        else:
            with idle.nothing_shows():
                forward(last)
