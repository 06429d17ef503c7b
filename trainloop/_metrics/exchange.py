"""Exchange logs between ranks: up to 64 ranks gather all values, larger groups reduce sums.

:class:`Gathered` sends every rank's values to every rank, in one exchange, and sums are exact; but its traffic grows
with the square of the number of ranks. :class:`Summed` sends sums, as large for a thousand ranks as for two; their last
bits depend on the number of ranks. Both give the same result on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainloop._metrics.reducing import Options, StepValues, by_name, step_values, weights_of, with_sum_of_parts
from trainloop._support.rng import derive_seed

MOST_THAT_GATHER = 64
"""Maximum number of ranks with exact sums."""

Floats = npt.NDArray[np.float64]
OwnSteps = tuple[Options, Any, Any, Any]
"""A metric's options; steps, values and weights."""
OwnTotal = tuple[Options, list[float], list[float]]
"""A metric's options; total and weight of an epoch, as returned by :func:`~trainloop._metrics.reducing.exact_sum`."""


class Exchanged(NamedTuple):
    """The logs of all ranks. Apart from per-rank values, they are the same on each rank."""

    steps: StepValues
    totals: dict[str, list[OwnTotal]]
    """Totals by name, in the same order on all ranks; each has one or more entries, to be added up."""
    attachments: list[Any]
    """The attachments, in the order of ranks; one entry if all ranks sent the same."""


class Gathered:
    """Gathers all ranks' values on all ranks.

    Parameters
    ----------
    gather : callable, optional
        ``gather(object) -> list`` of every rank's object, on every rank; ``None`` in one process.
    """

    carries_objects = True
    """True if attachments may be large and are sent with the logs; False if they should be small and mostly equal."""

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self._gather = gather

    def __call__(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None = None, attachment: Any = None
    ) -> Exchanged:
        """Exchange step values, and an epoch's totals if given; values that are not shared are returned unchanged.

        Collective: every rank must make the same calls in the same order.
        """
        if self._gather is None:
            of_steps = {name: [entry] for name, entry in steps.items()}
            of_epoch = {name: [entry] for name, entry in (totals or {}).items()}
            return Exchanged(step_values(of_steps), of_epoch, [attachment])
        tables: list[Mapping[str, Any]] = [steps, totals or {}]
        mine = [dict(_shared(table)) for table in tables]
        everyone = self._gather((mine, attachment))
        found = [by_name([theirs[i] for theirs, _ in everyone]) for i in range(2)]
        for table, all_of_this_rank in zip(found, tables):
            table.update((name, [entry]) for name, entry in _unshared(all_of_this_rank))
        return Exchanged(step_values(found[0]), found[1], [theirs for _, theirs in everyone])


class Collectives(Protocol):
    """The collectives that :class:`Summed` needs; :mod:`trainloop.distributed` has them."""

    def all_reduce(self, value: Any, reduce: Any) -> Any:
        """Return the sum or maximum over ranks of each number of a tensor, on every rank."""

    def exchange_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers, on every rank."""

    def gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, on every rank."""


class Summed:
    """Sums all ranks' values on all ranks, in float64; traffic grows with the number of metrics, not of ranks.

    Ranks mostly log the same metrics at the same steps, so they first compare a digest of the names and steps. If all
    digests are equal, all values are sent in one or two all-reduces; otherwise all ranks gather all values.

    Parameters
    ----------
    collectives : Collectives
    """

    carries_objects = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None = None, attachment: Any = None
    ) -> Exchanged:
        """See :meth:`Gathered.__call__`."""
        of_steps = {name: _Numbers.of_steps(*entry) for name, entry in _shared(steps)}
        of_epoch = {name: _Numbers.of_epoch(*entry) for name, entry in _shared(totals or {})}
        tables = (of_steps, of_epoch)
        layout = [[(name, *numbers.layout) for name, numbers in table.items()] for table in tables]
        digests = self._collectives.exchange_ints([derive_seed(repr(layout)), derive_seed(repr(attachment))])
        same_layout, same_attachments = (len(set(of_ranks)) == 1 for of_ranks in zip(*digests))
        if not same_layout:
            return Gathered(self._collectives.gather_object)(steps, totals, attachment)
        numbers = [*of_steps.values(), *of_epoch.values()]
        self._reduce([part.sums for part in numbers], "sum")
        self._reduce([part.greatest for part in numbers], "max")
        attachments = [attachment] if same_attachments else self._collectives.gather_object(attachment)
        found = with_sum_of_parts(
            {name: (part.steps, part.result()) for name, part in of_steps.items()},
            {name: [part.options] for name, part in of_steps.items()},
        )
        found.update(step_values({name: [entry] for name, entry in _unshared(steps)}))
        epoch = {name: [part.total()] for name, part in of_epoch.items()}
        epoch.update((name, [entry]) for name, entry in _unshared(totals or {}))
        return Exchanged(found, epoch, attachments)

    def _reduce(self, arrays: list[Floats], reduce: str) -> None:
        """Replace each array's numbers by their reduction over all ranks."""
        flat = np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0)
        if not flat.size:  # the same on every rank
            return
        whole = self._collectives.all_reduce(torch.from_numpy(flat), reduce).numpy()
        for array, part in zip(arrays, np.split(whole, np.cumsum([array.size for array in arrays])[:-1])):
            array[...] = part.reshape(array.shape)


Exchange = Gathered | Summed


class _Numbers:
    """One metric's numbers, in a form that can be reduced over ranks by sum or maximum."""

    def __init__(self, options: Options, steps: Any, values: Floats, weights: Floats) -> None:
        self.options = options
        self.steps = steps
        self.layout = (options, None if steps is None else steps.tolist())
        nothing = np.empty((0, len(values)))
        if options.reduce == "mean":
            # A value without weight does not count, not even NaN.
            self.sums, self.greatest = np.stack([np.where(weights == 0, 0.0, values * weights), weights]), nothing
        elif options.reduce == "sum":
            self.sums, self.greatest = values[None].copy(), nothing
        else:
            self.sums, self.greatest = nothing, (values if options.reduce == "max" else -values)[None]

    @classmethod
    def of_steps(cls, options: Options, steps: Any, values: Any, weights: Any) -> _Numbers:
        """Return the numbers of one rank's step values."""
        indices, reduced = step_values({"": [(options, steps, values, weights)]})[""]
        places = np.searchsorted(indices, steps)
        sums = np.bincount(places, weights_of(weights, options.units), len(indices))
        return cls(options, indices, reduced, sums.astype(np.float64))

    @classmethod
    def of_epoch(cls, options: Options, total: list[float], weight: list[float]) -> _Numbers:
        """Return the numbers of one rank's total for an epoch."""
        numbers = cls(options, None, np.array([math.fsum(total)]), np.ones(1))
        if options.reduce == "mean":  # the total already consists of products
            numbers.sums[1] = math.fsum(weight)
        return numbers

    def result(self) -> Floats:
        """Return the values, once ``sums`` and ``greatest`` are reduced over all ranks."""
        if self.options.reduce == "mean":
            with np.errstate(divide="ignore", invalid="ignore"):
                quotient: Floats = self.sums[0] / self.sums[1]
            return quotient
        if self.options.reduce == "sum":
            return self.sums[0]
        return self.greatest[0] if self.options.reduce == "max" else -self.greatest[0]

    def total(self) -> OwnTotal:
        """Return the metric's entry for the epoch."""
        if self.options.reduce == "mean":
            return self.options, [float(self.sums[0, 0])], [float(self.sums[1, 0])]
        return self.options, [float(self.result()[0])], []


def exchange_of(collectives: Collectives, world_size: int) -> Exchange:
    """Return the exchange for this number of ranks."""
    if world_size == 1:
        return Gathered()
    return Gathered(collectives.gather_object) if world_size <= MOST_THAT_GATHER else Summed(collectives)


def _shared(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, entry) for name, entry in table.items() if entry[0].shared)


def _unshared(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, entry) for name, entry in table.items() if not entry[0].shared)
