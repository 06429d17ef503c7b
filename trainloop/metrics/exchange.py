"""Exchanges of logs between ranks: a few ranks gather all values, many add them up.

:class:`Gathered` sends every rank's values to every rank, in one exchange: the fastest way for a few ranks, but its
traffic grows with the square of their number. :class:`Reduced` sends sums: two exchanges, as large for a thousand ranks
as for two. Both give the same result on every rank. They differ from each other in a step's sum only, which
:class:`Gathered` rounds on each rank, and :class:`Reduced` once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainloop.metrics.blocks import HEADER, Block
from trainloop.metrics.reducing import Options, StepValues, by_name, step_values
from trainloop.rng import derive_seed

__all__ = ["MOST_THAT_GATHER", "Collectives", "Exchange", "Gathered", "Reduced", "exchange_of"]

MOST_THAT_GATHER = 8
"""Ranks; measured in ``docs/design/scale.rst``."""

Ints = npt.NDArray[np.int64]
OwnSteps = tuple[Options, Any, Any, Any]
"""A metric's options; steps, values and weights."""
OwnTotal = tuple[Options, list[float], list[float]]
"""A metric's options; total and weight of an epoch, as :func:`~trainloop.metrics.reducing.exact_sum` gives them."""


class Exchanged(NamedTuple):
    """The logs of all ranks; the same on each, except for values that a rank keeps to itself."""

    steps: StepValues
    totals: dict[str, list[OwnTotal]]
    """By name, in an order that is the same on all ranks; one entry or more, which are to be added up."""
    attachments: list[Any]
    """The attachments, in the order of ranks; one entry where all ranks sent the same."""


class Exchange(Protocol):
    """Collective: every rank makes the same calls in the same order."""

    carries_objects: bool
    """Whether an attachment may be large: it goes along with the logs; else small ones that are mostly the same."""

    def __call__(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None = None, attachment: Any = None
    ) -> Exchanged:
        """Exchange step values and, with ``totals``, an epoch's; values that are not shared are returned as given."""

    def parts(self, totals: Mapping[str, OwnTotal]) -> Mapping[str, OwnTotal]:
        """This rank's part of an unfinished epoch for a checkpoint; all ranks' parts make the whole."""


class Gathered:
    """All ranks' values on all ranks.

    Parameters
    ----------
    gather : callable, optional
        ``gather(object) -> list`` of every rank's object, on every rank; ``None`` in one process.
    """

    carries_objects = True

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self._gather = gather

    def __call__(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None = None, attachment: Any = None
    ) -> Exchanged:
        """See :class:`Exchange`."""
        tables: list[Mapping[str, Any]] = [steps, totals or {}]
        mine = [dict(_shared(table)) for table in tables]
        everyone = [(mine, attachment)] if self._gather is None else self._gather((mine, attachment))
        found = [by_name([theirs[i] for theirs, _ in everyone]) for i in range(2)]
        for table, all_of_this_rank in zip(found, tables):
            table.update((name, [entry]) for name, entry in _unshared(all_of_this_rank))
        return Exchanged(step_values(found[0]), found[1], [theirs for _, theirs in everyone])

    def parts(self, totals: Mapping[str, OwnTotal]) -> Mapping[str, OwnTotal]:
        """All of this rank's values, without an exchange."""
        return totals


class Collectives(Protocol):
    """The collectives that :class:`Reduced` needs; :mod:`trainloop.distributed` has them."""

    def reduce_ints(self, values: Ints, reduce: str) -> Ints:
        """The sum (``'sum'``) or maximum (``'max'``) over ranks of each entry, on every rank."""

    def gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, on every rank."""

    def get_rank(self) -> int:
        """The rank of this process."""


class Reduced:
    """Sums of all ranks' values on all ranks; traffic grows with the number of metrics, not of ranks.

    Ranks keep a common table of metrics. Each exchange begins with a header of a few numbers for each of them: whether
    anybody has values, of which steps, and how many bits hold them; then all values go in one all-reduce. If all ranks
    have the same new names, as they mostly do, every rank adds them to the table without an exchange; else new names
    are gathered, once.

    Parameters
    ----------
    collectives : Collectives
    """

    carries_objects = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._table: dict[tuple[str, Options], None] = {}

    def __call__(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None = None, attachment: Any = None
    ) -> Exchanged:
        """See :class:`Exchange`."""
        found, attachments = self._reduced(steps, totals, attachment)
        seen: list[dict[str, Any]] = [{}, {}]
        for of_epoch, name, block in found:
            if name in seen[of_epoch]:
                self._raise_unequal(steps, totals or {})
            seen[of_epoch][name] = [block.total()] if of_epoch else block.steps()
        seen[0].update(step_values({name: [entry] for name, entry in _unshared(steps)}))
        seen[1].update((name, [entry]) for name, entry in _unshared(totals or {}))
        return Exchanged(seen[0], seen[1], attachments)

    def parts(self, totals: Mapping[str, OwnTotal]) -> Mapping[str, OwnTotal]:
        """All values on rank 0; elsewhere only those that are not shared. Collective."""
        whole = self({}, dict(_shared(totals))).totals
        own = dict(_unshared(totals))
        if self._collectives.get_rank() == 0:
            own.update((name, entry) for name, (entry,) in whole.items())
        return own

    def _reduced(
        self, steps: Mapping[str, OwnSteps], totals: Mapping[str, OwnTotal] | None, attachment: Any
    ) -> tuple[list[tuple[bool, str, Block]], list[Any]]:
        """Blocks in which any rank has values, with the values of all: ``(whether it is an epoch's, name, block)``."""
        while True:
            new = [key for key in _keys(steps, totals) if key not in self._table]
            blocks = [(False, key[0], Block.of_steps(key[1], _of(steps, key))) for key in self._table]
            if totals is not None:
                blocks += [(True, key[0], Block.of_epoch(key[1], _of(totals, key))) for key in self._table]
            digests = [derive_seed(repr(thing)) if thing else 0 for thing in (new, attachment)]
            # The maximum of x and of -x over ranks: equal but for the sign, if all have the same x.
            own = [*digests, *(-digest for digest in digests)]
            header = np.array(own + list(chain.from_iterable(block.header() for _, _, block in blocks)), np.int64)
            header = self._collectives.reduce_ints(header, "max")
            same_names, same_attachments = (header[:2] == -header[2:4]).tolist()
            if same_names and not new:
                break
            # In the order of ranks, so that all tables are alike.
            everyone = [new] if same_names else self._collectives.gather_object(new)
            self._table.update(
                dict.fromkeys((name, Options(*options)) for those in everyone for name, options in those)
            )
        attachments = [attachment] if same_attachments else self._collectives.gather_object(attachment)
        found = []
        for i, item in enumerate(blocks):
            if item[2].agree(header[4 + i * HEADER : 4 + (i + 1) * HEADER].tolist()):
                found.append(item)
        for reduce in ("sum", "max"):
            words = [block.words() for _, _, block in found if block.reduces_by == reduce]
            if words:
                flat = self._collectives.reduce_ints(np.concatenate([part.ravel() for part in words]), reduce)
                parts = np.split(flat, np.cumsum([part.size for part in words])[:-1])
                those = (block for _, _, block in found if block.reduces_by == reduce)
                for block, part, own_part in zip(those, parts, words):
                    block.result = part.reshape(own_part.shape)
        return found, attachments

    def _raise_unequal(self, *tables: Mapping[str, Any]) -> None:
        """Raise on every rank, with the ranks that logged one name with different options."""
        mine = [{name: entry[:1] for name, entry in _shared(table)} for table in tables]
        for of_all_ranks in zip(*self._collectives.gather_object(mine)):
            by_name(of_all_ranks)


def exchange_of(collectives: Collectives, world_size: int) -> Exchange:
    """The exchange for so many ranks."""
    if world_size == 1:
        return Gathered()
    return Gathered(collectives.gather_object) if world_size <= MOST_THAT_GATHER else Reduced(collectives)


def _shared(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, entry) for name, entry in table.items() if entry[0].shared)


def _unshared(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, entry) for name, entry in table.items() if not entry[0].shared)


def _keys(*tables: Mapping[str, Any] | None) -> Iterator[tuple[str, Options]]:
    keys = ((name, entry[0]) for table in tables for name, entry in _shared(table or {}))
    return iter(dict.fromkeys(keys))


def _of(table: Mapping[str, Any], key: tuple[str, Options]) -> Any:
    """This rank's entry of a metric; ``None`` if it has none, or has other options."""
    entry = table.get(key[0])
    return entry if entry is not None and entry[0] == key[1] else None
