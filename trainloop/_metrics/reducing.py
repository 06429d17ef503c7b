"""Reduce logged values to a metric's value of a step and of an epoch, over all ranks: no torch, no exchange.

An epoch's sums are exact: its values don't depend on when logs were read or on which rank had which samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainloop.errors import ConfigurationError

REDUCTIONS = ("mean", "sum", "min", "max")

Row = tuple[int, dict[str, float]]
StepValues = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
"""For each metric, its steps in ascending order, and its value at each step."""


class Options(NamedTuple):
    """A metric's options: how its values are reduced and kept. They are sent to other ranks with the values."""

    on_step: bool
    on_epoch: bool
    reduce: str
    shared: bool
    """True if the value is over all ranks; False for per-rank values."""
    part: str | None
    """For the loop's loss: the name of a part, or an empty string for the total. ``None`` for the user's metrics."""
    units: bool = False
    """For the loop's loss: True if that of any batch was a mean over units of its own, other than samples."""

    def agree(self, other: Options) -> bool:
        """Return True if values with these options can be reduced with values with the ``other`` options.

        The parts of a ``MultiLoss`` may have own weights in the batches of some ranks only: ``on_epoch`` of its total.
        """
        alike = self._replace(units=other.units)
        return alike == other or (self.part == "" and alike._replace(on_epoch=other.on_epoch) == other)


def exact_sum(values: Iterable[float]) -> list[float]:
    """Return floats whose exact sum is that of ``values``: the rounded sum, its rounding error, and so on.

    Usually, the result has one or two floats; for a sum of 0, it is empty. The exact sums of parts of the values can be
    added up, in any order.

    Examples
    --------
    >>> exact_sum([1e16, 1.0, 1.0, 1.0])
    [1.0000000000000004e+16, -1.0]
    """
    values = list(values)
    if len(values) == 1:
        return [float(values[0])] if values[0] else []
    try:
        rest = math.fsum(values)
        parts: list[float] = []
        while rest and math.isfinite(rest):
            parts.append(rest)
            rest = math.fsum([*values, *(-part for part in parts)])
        return [rest] if rest else parts
    except (OverflowError, ValueError):  # fsum raises for inf - inf, and if an intermediate sum overflows
        return [sum(values)]


def reduced(reduce: str, values: list[float]) -> list[float]:
    """Return fewer values with the same sum, minimum or maximum.

    The result does not depend on the order of reducing.
    """
    if reduce in ("mean", "sum"):
        return exact_sum(values)
    # Python's min and max are not used: their result depends on the position of a NaN.
    return [float(np.min(values) if reduce == "min" else np.max(values))] if values else []


def by_name(everyone: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each metric's entries in the order of ranks, and the names in the same order on all ranks.

    Parameters
    ----------
    everyone : sequence of dict
        Each rank's entries by name, each starting with its :class:`Options`.

    Raises
    ------
    ConfigurationError
        On every rank, if ranks logged one name with different options.
    """
    found: dict[str, list[Any]] = {}
    first: dict[str, int] = {}
    for rank, entries in enumerate(everyone):
        for name, entry in entries.items():
            known = found.setdefault(name, [])
            if known and not known[0][0].agree(entry[0]):
                ours, theirs = known[0][0]._asdict(), entry[0]._asdict()
                differing = [option for option in ours if ours[option] != theirs[option]]
                raise ConfigurationError(
                    f"log({name!r}, ...): rank {first[name]} logs this metric with "
                    f"{', '.join(f'{option}={ours[option]!r}' for option in differing)}, but rank {rank} with "
                    f"{', '.join(f'{option}={theirs[option]!r}' for option in differing)}. Use the same options in all "
                    "calls with this name."
                )
            first.setdefault(name, rank)
            known.append(entry)
    return found


def step_values(found: Mapping[str, Sequence[tuple[Options, Any, Any, Any]]]) -> StepValues:
    """Return each metric's value of each step, from (options, steps, values, weights) of each rank."""
    values = {
        name: entries[0][1:3]
        if len(entries) == 1 and _are_results(*entries[0])
        else _reduced_in_steps(
            entries[0][0].reduce,
            np.concatenate([entry[1] for entry in entries]),
            np.concatenate([entry[2] for entry in entries]),
            weights_of(np.concatenate([entry[3] for entry in entries]), any(entry[0].units for entry in entries)),
        )
        for name, entries in found.items()
    }
    return with_sum_of_parts(values, {name: [entry[0] for entry in entries] for name, entries in found.items()})


def weights_of(weights: npt.NDArray[np.float64], units: bool) -> npt.NDArray[np.float64]:
    """Return the weights of a loss in steps. Negative ones are samples of batches that have no units if others do.

    Beside others, they then weigh nothing; but a step of such batches has a mean.
    """
    return np.where(weights < 0, weights * (-1e-30 if units else -1.0), weights)


def with_sum_of_parts(values: StepValues, options: Mapping[str, Sequence[Options]]) -> StepValues:
    """Return step values whose loss is the sum of its parts' means if these have own weights, as in an epoch.

    Parameters
    ----------
    values : dict
    options : dict
        Each rank's options, by name.
    """
    whole = next((name for name, of_ranks in options.items() if of_ranks[0].part == ""), None)
    if whole is None or all(own.on_epoch for own in options[whole]):
        return values
    steps, means = values[whole]
    sums, found = np.zeros(len(means)), np.zeros(len(means), bool)
    for name, of_ranks in options.items():
        if of_ranks[0].part:
            places = np.searchsorted(steps, values[name][0])
            sums[places] += values[name][1]
            found[places] = True
    return {**values, whole: (steps, np.where(found, sums, means))}


def _are_results(options: Options, steps: Any, values: Any, weights: Any) -> bool:
    """Return True if there is one value for each step, so that no reduction is needed: the usual case of one rank."""
    ascend = len(steps) < 2 or (steps[1:] > steps[:-1]).all()  # of an epoch of one step, there is one
    return bool(ascend and (options.reduce != "mean" or (weights > 0).all()))


def _reduced_in_steps(
    reduce: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    first = int(steps.min())
    places = steps - first  # steps of one flush are close together: no need to sort
    counts = np.bincount(places)
    result: npt.NDArray[np.float64]
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN is a valid result
        if reduce == "mean":
            products = np.where(weights == 0, 0.0, values * weights)
            result = np.bincount(places, products) / np.bincount(places, weights)
            single = (counts[places] == 1) & (weights > 0)
            result[places[single]] = values[single]  # exactly as logged, since multiplying and dividing may round
        elif reduce == "sum":
            result = np.bincount(places, values).astype(np.float64)
        else:
            result = np.full(len(counts), np.inf if reduce == "min" else -np.inf)
            (np.minimum if reduce == "min" else np.maximum).at(result, places, values)
    present = np.flatnonzero(counts)
    return present + first, result[present]


def epoch_value(entries: Sequence[tuple[Options, list[float], list[float]]]) -> float:
    """Return a metric's value of an epoch, from (options, total, weight) of each rank."""
    reduce = entries[0][0].reduce
    total = _rounded(reduced(reduce, [part for _, parts, _ in entries for part in parts]))
    if reduce != "mean":
        return total
    weight = _rounded(exact_sum(part for _, _, parts in entries for part in parts))
    return total / weight if weight else math.nan


def _rounded(exact: list[float]) -> float:
    return exact[0] if exact else 0.0


def rows_of(steps: StepValues) -> list[Row]:
    """Return step values as one row per step."""
    rows: dict[int, dict[str, float]] = {}
    for name, (indices, values) in steps.items():
        for step, value in zip(indices.tolist(), values.tolist(), strict=True):
            rows.setdefault(step, {})[name] = value
    return sorted(rows.items())
