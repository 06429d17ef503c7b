"""Group micro-batches into optimizer steps, and weight them over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Any, NamedTuple

from trainloop._support.sharding import weigh_step
from trainloop.data.order.samplers import RankSizes

ExchangeInts = Callable[[list[int]], list[list[int]]]
"""A collective that takes this rank's integers and returns the integers of every rank."""

BatchesLeft = Callable[[], float]

_NONE = -1  # means "no batch" in an exchange


class StepBatches(NamedTuple):
    """One rank's micro-batches of an optimizer step. Don't change the lists: several steps share them."""

    batches: list[Any]
    """This rank's micro-batches; empty if only other ranks have samples in this step (``counts`` has a 0 for it)."""

    sizes: list[int]
    """Samples in each of ``batches``."""

    scales: list[float] | None
    """Factor of each micro-batch's loss, such that the mean over ranks of ``sum(scale * loss)`` is the mean over all
    samples of the step. None if all micro-batches of all ranks have one size: divide each loss by ``len(batches)``."""

    total: int
    """Samples of all ranks in this step."""

    counts: list[int] | None
    """Number of micro-batches of each rank, if these differ, so that gradients can't be reduced in backward."""


def steps_of_known(
    items: Iterator[tuple[RankSizes, Any]], grad_accumulation: int, rank: int, batches_left: BatchesLeft = lambda: inf
) -> Iterator[StepBatches]:
    """Yield steps from items with the sizes of all ranks; no exchange.

    Parameters
    ----------
    items : iterator of (sizes, batch)
        Samples on each rank in a global batch (None: no part), and this rank's part of the batch.
    grad_accumulation : int
        Micro-batches of a step.
    rank : int
        This rank's index in ``sizes``.
    batches_left : callable
        Returns the number of micro-batches until the end of ``fit``, which may be within a step.
    """
    if grad_accumulation == 1:
        # One micro-batch per step, nearly always with the same sizes as the previous one.
        known: RankSizes | None = None
        for rank_sizes, batch in items:
            if rank_sizes != known:
                known = rank_sizes
                sizes, scales, total, counts = _weigh([rank_sizes], rank)
            yield StepBatches([batch] if sizes else [], sizes, scales, total, counts)
        return
    known_group: tuple[RankSizes, ...] | None = None
    while group := list(islice(items, _next_step_length(grad_accumulation, batches_left))):
        # Nearly all steps have the same weights, so compare the sizes before computing anything.
        of_group = tuple(rank_sizes for rank_sizes, _ in group)
        if of_group != known_group:
            known_group = of_group
            sizes, scales, total, counts = _weigh(list(known_group), rank)
        own = [batch for rank_sizes, batch in group if rank_sizes[rank] is not None]
        yield StepBatches(own, sizes, scales, total, counts)


def steps_of_exchanged(
    items: Iterator[tuple[int | None, Any]],
    grad_accumulation: int,
    rank: int,
    exchange_ints: ExchangeInts,
    batches_left: BatchesLeft = lambda: inf,
) -> Iterator[StepBatches]:
    """Yield steps from items with this rank's sizes only; ranks exchange their sizes once per step.

    Collective: every rank iterates until no rank has a batch left. A rank whose data ended earlier takes part without
    batches.

    Parameters
    ----------
    items : iterator of (size, batch)
        This rank's micro-batches with their numbers of samples; None if this rank has no part in a batch.
    grad_accumulation, rank, batches_left
        As in :func:`steps_of_known`.
    exchange_ints : callable
        The exchange function.
    """
    while True:
        number = _next_step_length(grad_accumulation, batches_left)
        group = list(islice(items, number))
        # Always exchange this many numbers, so that ranks whose data has ended exchange as many as the others.
        mine = [_NONE if size is None else size for size, _ in group] + [_NONE] * (number - len(group))
        sizes = [[size for size in of_rank if size != _NONE] for of_rank in exchange_ints(mine)]
        if not any(sizes):
            return
        weights = weigh_step(sizes, rank)
        yield StepBatches([batch for size, batch in group if size is not None], sizes[rank], *weights)


def _next_step_length(grad_accumulation: int, batches_left: BatchesLeft) -> int:
    """Return the number of micro-batches of the next step; at least 1, because a complete epoch is read to its end."""
    return max(1, int(min(grad_accumulation, batches_left())))


def _weigh(group: list[RankSizes], rank: int) -> tuple[list[int], list[float] | None, int, list[int] | None]:
    sizes = [[size for size in of_rank if size is not None] for of_rank in zip(*group, strict=True)]
    return (sizes[rank], *weigh_step(sizes, rank))
