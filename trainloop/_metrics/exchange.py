"""Exchange logs between ranks: all ranks gather all values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainloop._metrics.reducing import Options, StepValues, by_name, step_values

__all__ = ["Gather", "exchanged", "in_one_process"]

Gather = Callable[[Any], list[Any]]
"""A collective that returns every rank's object, on every rank."""

OwnSteps = tuple[Options, Any, Any, Any]
"""A metric's options; steps, values and weights."""
OwnTotal = tuple[Options, list[float], list[float]]
"""A metric's options; total and weight of an epoch, as returned by :func:`~trainloop._metrics.reducing.exact_sum`."""


class Exchanged(NamedTuple):
    """The logs of all ranks; the same on each, except for per-rank values."""

    steps: StepValues
    totals: dict[str, list[OwnTotal]]
    """By name, in the same order on all ranks; one or more entries, to be added up."""
    attachments: list[Any]
    """The attachments, in the order of ranks."""


def in_one_process(mine: Any) -> list[Any]:
    """Gather the objects of one process: its own."""
    return [mine]


def exchanged(
    gather: Gather,
    steps: Mapping[str, OwnSteps],
    totals: Mapping[str, OwnTotal],
    attachment: Any = None,
) -> Exchanged:
    """Exchange step values and an epoch's totals; values that are not shared are returned unchanged. Collective."""
    tables: list[Mapping[str, Any]] = [steps, totals]
    mine = [{name: entry for name, entry in table.items() if entry[0].shared} for table in tables]
    everyone = gather((mine, attachment))
    found = [by_name([theirs[i] for theirs, _ in everyone]) for i in range(2)]
    for table, all_of_this_rank in zip(found, tables):
        table.update((name, [entry]) for name, entry in all_of_this_rank.items() if not entry[0].shared)
    return Exchanged(step_values(found[0]), found[1], [theirs for _, theirs in everyone])
