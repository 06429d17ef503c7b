"""One metric's part of an exchange of sums: 64-bit words, as many on every rank, for an all-reduce to add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainloop.metrics import exact
from trainloop.metrics.reducing import Options

__all__ = ["HEADER", "Block"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

HEADER = 7
"""Numbers on which ranks agree first: the negative first step and the last; whether a number is not finite; the
exponents of the bits of values, and of weights."""
_NEVER = exact.NO_SPAN[0]


class Block:
    """Cells of sums: one for each step from the first with a value on any rank; or a single one, for an epoch.

    Parameters
    ----------
    options : Options
    places : array of int
        Steps of this rank's entries; empty where it has none.
    columns : list of (array of int, array of float)
        The numbers to add up, with the step of each: values or products, and for a mean weights.
    lone : array of float, optional
        Values as they were logged, where a step's mean is that of a single entry: multiplying and dividing may round.
    """

    result: Ints
    """All ranks' words."""

    def __init__(
        self, options: Options, places: Ints, columns: list[tuple[Ints, Floats]], lone: Floats | None = None
    ) -> None:
        self._options = options
        self._places = places
        self._columns = columns
        self._lone = lone
        self._first = self._cells = 0
        self._with_specials = False
        self._spans: list[tuple[int, int]] = []
        self.reduces_by = "sum" if options.reduce in ("mean", "sum") else "max"

    @classmethod
    def of_steps(cls, options: Options, entry: tuple[Options, Ints, Floats, Floats] | None) -> Block:
        """Make a block of one rank's step values: options, steps, values and weights."""
        nothing = np.zeros(0)
        _, steps, values, weights = entry or (options, nothing.astype(np.int64), nothing, nothing)
        if options.reduce != "mean":
            return cls(options, steps, [(steps, values)])
        with np.errstate(invalid="ignore", over="ignore"):  # nan is a valid result, here as elsewhere
            products = np.where(weights == 0, 0.0, values * weights)
        return cls(options, steps, [(steps, products), (steps, weights)], values)

    @classmethod
    def of_epoch(cls, options: Options, entry: tuple[Options, list[float], list[float]] | None) -> Block:
        """Make a block of one rank's epoch: options, total and weight."""
        _, *parts = entry or (options, [], [])
        columns = [np.array(part, np.float64) for part in parts][: 2 if options.reduce == "mean" else 1]
        places = np.zeros(int(entry is not None), np.int64)
        return cls(options, places, [(np.zeros(len(column), np.int64), column) for column in columns])

    def header(self) -> list[int]:
        """The numbers on which ranks agree by the maximum."""
        if not len(self._places):
            return [_NEVER, _NEVER, 0, *exact.NO_SPAN, *exact.NO_SPAN]
        spans = [exact.span(values) for _, values in self._columns] if self.reduces_by == "sum" else []
        finite = all(np.isfinite(values).all() for _, values in self._columns)
        flat = [number for span in (*spans, exact.NO_SPAN, exact.NO_SPAN)[:2] for number in span]
        return [-int(self._places.min()), int(self._places.max()), int(not finite), *flat]

    def agree(self, header: list[int]) -> bool:
        """Take the agreed numbers; returns False if no rank has a value."""
        negative_first, last, special, *spans = header
        if last == _NEVER:
            return False
        self._first, self._cells = -negative_first, last + negative_first + 1
        self._with_specials = bool(special)
        self._spans = [(-negative_low, high) for negative_low, high in zip(spans[::2], spans[1::2])]
        return True

    def words(self) -> Ints:
        """This rank's words; shape ``(words a cell, cells)``, the same on all ranks."""
        cells, first = self._cells, self._first
        if self.reduces_by == "max":
            ((places, values),) = self._columns
            return exact.ordered_keys(values, places - first, cells, least=self._options.reduce == "min")[None]
        own = self._places - first
        rows = [np.bincount(own, minlength=cells)[None]]
        if self._lone is not None:
            # With several entries the sum is meaningless, may overflow, and is not used.
            bits = np.zeros(cells, np.int64)
            np.add.at(bits, own, self._lone.view(np.int64))
            rows.append(bits[None])
        for (places, values), (low, high) in zip(self._columns, self._spans):
            if self._with_specials:
                rows.append(exact.specials(values, places - first, cells)[None])
            rows.append(exact.to_limbs(values, places - first, cells, low, high))
        return np.concatenate(rows)

    def _sums(self) -> list[tuple[Ints, Ints | None]]:
        """Limbs of each column, and words that mark values that are not finite."""
        at = 1 if self._lone is None else 2
        found = []
        for low, high in self._spans[: len(self._columns)]:
            special = self.result[at] if self._with_specials else None
            at += self._with_specials
            limbs = exact.num_limbs(low, high)
            found.append((self.result[at : at + limbs], special))
            at += limbs
        return found

    def steps(self) -> tuple[Ints, Floats]:
        """Steps, ascending, and the value of each."""
        if self.reduces_by == "max":
            values, there = exact.from_keys(self.result[0], least=self._options.reduce == "min")
            present = np.flatnonzero(there)
            return present + self._first, values[present]
        present = np.flatnonzero(self.result[0])
        sums = [
            exact.with_specials(exact.from_limbs(limbs[:, present], low), None if words is None else words[present])
            for (limbs, words), (low, _) in zip(self._sums(), self._spans)
        ]
        if self._options.reduce == "sum":
            return present + self._first, sums[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            means = sums[0] / sums[1]
        lone = (self.result[0, present] == 1) & (sums[1] > 0)
        return present + self._first, np.where(lone, self.result[1, present].view(np.float64), means)

    def total(self) -> tuple[Options, list[float], list[float]]:
        """Options, total and weight of the epoch."""
        if self.reduces_by == "max":
            value, _ = exact.from_keys(self.result[0], least=self._options.reduce == "min")
            return self._options, value.tolist(), []
        parts: list[Any] = []
        for (limbs, words), (low, _) in zip(self._sums(), self._spans):
            special = 0.0 if words is None else exact.with_specials(np.zeros(1), words)[0]
            parts.append([float(special)] if special else exact.expansion(limbs[:, 0].tolist(), low))
        return self._options, parts[0], parts[1] if len(parts) > 1 else []
