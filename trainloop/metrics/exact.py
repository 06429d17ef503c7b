"""Exact sums of floats over ranks, in any order of addition: as integers, cut into limbs.

An all-reduce adds in an order of its own, which depends on the number of ranks and on where a number stands in the
message, and floats that are added in another order round to another sum. Integers don't. So ranks agree on the
exponents between which all bits of their numbers lie, write each number as an integer of as many 32-bit limbs (mostly
two or three) in 64-bit words, and add these: nothing overflows for 2**31 addends, and the sum is rounded once.

References
----------
Neal, "Fast exact summation using small and large superaccumulators", 2015 (arXiv:1505.05571).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "NO_SPAN",
    "expansion",
    "from_keys",
    "from_limbs",
    "num_limbs",
    "ordered_keys",
    "span",
    "specials",
    "to_limbs",
    "with_specials",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BITS = 32
_MASK = 2**_BITS - 1
NO_SPAN = (-(2**40), -(2**40))
"""The span of no numbers: less than any other, so that the maximum over ranks ignores it."""


def _parts(values: Floats) -> tuple[Floats, Ints, Ints]:
    """Finite values other than 0 as ``sign * magnitude * 2**exponent``, with odd magnitudes."""
    # 53 bits hold the whole fraction of a float64; dividing out factors of 2 keeps the span short.
    fractions, exponents = np.frexp(values)
    magnitudes = np.ldexp(np.abs(fractions), 53).astype(np.int64)
    zeros = np.frexp((magnitudes & -magnitudes).astype(np.float64))[1].astype(np.int64) - 1  # trailing zeros
    return np.sign(values), magnitudes >> zeros, exponents.astype(np.int64) - 53 + zeros


def _finite(values: Floats) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values != 0)


def span(values: Floats) -> tuple[int, int]:
    """``(-low, high)``: finite values are multiples of ``2**low`` and less than ``2**high``.

    The maximum of each over ranks holds for the values of all of them.
    """
    values = values[_finite(values)]
    if not len(values):
        return NO_SPAN
    _, _, exponents = _parts(values)
    return -int(exponents.min()), int(np.frexp(values)[1].max())


def num_limbs(low: int, high: int) -> int:
    """Words that a sum of values within a span takes."""
    return max(0, (high - low - 1) // _BITS + 1)


def to_limbs(values: Floats, places: Ints, cells: int, low: int, high: int) -> Ints:
    """The sum of the finite values at each place, in limbs from the lowest on; shape ``(limbs, cells)``."""
    limbs = np.zeros((num_limbs(low, high) + 2, cells), np.int64)  # two limbs more, which only ever get zeros
    chosen = _finite(values)
    values, places = values[chosen], places[chosen]
    if len(values):
        signs, magnitudes, exponents = _parts(values)
        first, shifts = np.divmod(exponents - low, _BITS)
        words, shift = magnitudes.astype(np.uint64), shifts.astype(np.uint64)
        lower, upper = (words & np.uint64(_MASK)) << shift, (words >> np.uint64(_BITS)) << shift
        upper += lower >> np.uint64(_BITS)
        for i, piece in enumerate((lower & np.uint64(_MASK), upper & np.uint64(_MASK), upper >> np.uint64(_BITS))):
            np.add.at(limbs, (first + i, places), piece.astype(np.int64) * signs.astype(np.int64))
    return limbs[:-2]


def from_limbs(limbs: Ints, low: int) -> Floats:
    """The sums, each rounded once to the nearest float, ties to even."""
    if not len(limbs):
        return np.zeros(limbs.shape[1])
    limbs = _carried(np.concatenate([limbs, np.zeros((1, limbs.shape[1]), np.int64)]))
    # Magnitudes are rounded, so that ties go to even on both sides of 0.
    signs = np.where(limbs[-1] < 0, -1.0, 1.0)
    limbs = _carried(np.where(signs < 0, -limbs, limbs))
    padded = np.concatenate([np.zeros((2, limbs.shape[1]), np.int64), limbs]).astype(np.uint64)
    tops = len(limbs) - 1 - np.argmax(limbs[::-1] != 0, axis=0)  # the highest limb that isn't 0
    cells = np.arange(limbs.shape[1])
    top, middle, bottom = padded[tops + 2, cells], padded[tops + 1, cells], padded[tops, cells]
    below = np.cumsum(padded != 0, axis=0)[tops, cells] - (bottom != 0) > 0  # whether any bit below these is set
    lengths = np.frexp(top.astype(np.float64))[1].astype(np.uint64)
    shift = np.uint64(_BITS) - np.maximum(lengths, np.uint64(1))
    words = ((top << np.uint64(_BITS) | middle) << shift) | (bottom >> (np.uint64(_BITS) - shift))
    below |= (bottom << shift & np.uint64(_MASK)) != 0
    # 64 bits hold the 53 that a float keeps and 11 to round by; what is below only decides ties.
    kept, rest = words >> np.uint64(11), words & np.uint64(2**11 - 1)
    half = np.uint64(2**10)
    kept += (rest > half) | ((rest == half) & (below | (kept & np.uint64(1) == 1)))
    exponents = low + _BITS * (tops - 1) - shift.astype(np.int64) + 11
    with np.errstate(over="ignore"):  # inf is a valid result
        return signs * np.ldexp(kept.astype(np.float64), np.where(top == 0, 0, exponents).astype(np.int32))


def _carried(limbs: Ints) -> Ints:
    """The same sums with carries done: limbs from 0 to 2**32 - 1, except the highest."""
    limbs = limbs.copy()
    for i in range(len(limbs) - 1):
        limbs[i + 1] += limbs[i] >> _BITS
        limbs[i] &= _MASK
    return limbs


def expansion(limbs: Sequence[int], low: int) -> list[float]:
    """One sum as floats that add up to it exactly, as :func:`~trainloop.metrics.reducing.exact_sum` gives them."""
    rest = sum(limb << (_BITS * i) for i, limb in enumerate(limbs))
    parts: list[float] = []
    while rest:
        try:
            part = rest / (1 << -low) if low < 0 else float(rest << low)  # of integers: rounded once
        except OverflowError:
            return [float("inf") if rest > 0 else float("-inf")]
        parts.append(part)
        numerator, denominator = part.as_integer_ratio()
        rest -= numerator * (1 << -low) // denominator if low < 0 else numerator // denominator >> low
    return parts


# -- what is no finite number ------------------------------------------------------------------------------------------

_NAN, _PLUS, _MINUS = 0, 21, 42  # the first bit of each rank's word; 2**21 ranks don't overflow


def specials(values: Floats, places: Ints, cells: int) -> Ints:
    """A word for each place that counts the ranks with nan, inf and -inf among its values; ranks' words are added."""
    words = np.zeros(cells, np.int64)
    for bit, which in ((_NAN, np.isnan(values)), (_PLUS, values == np.inf), (_MINUS, values == -np.inf)):
        here = np.zeros(cells, np.int64)
        here[places[which]] = 1
        words |= here << bit
    return words


def with_specials(sums: Floats, words: Ints | None) -> Floats:
    """The sums of all values, including nan and infinities; ``words`` is ``None`` if there are none."""
    if words is None:
        return sums
    fields = {bit: words >> bit & (2**21 - 1) != 0 for bit in (_NAN, _PLUS, _MINUS)}
    sums = np.where(fields[_PLUS], np.inf, np.where(fields[_MINUS], -np.inf, sums))
    return np.where(fields[_NAN] | (fields[_PLUS] & fields[_MINUS]), np.nan, sums)


# -- the least and the greatest ----------------------------------------------------------------------------------------

_ABSENT = -(2**63)
_NAN_KEY = 2**63 - 1


def ordered_keys(values: Floats, places: Ints, cells: int, *, least: bool) -> Ints:
    """Integers ordered like floats, so that their maximum is that of the greatest (least) value; nan is above all."""
    bits = (values + 0.0).view(np.int64)  # -0.0 as 0.0
    # IEEE floats are ordered as sign and magnitude, integers as two's complement.
    keys = np.where(bits < 0, bits ^ (2**63 - 1), bits)
    keys = np.where(np.isnan(values), _NAN_KEY, ~keys if least else keys)
    greatest = np.full(cells, _ABSENT, np.int64)
    np.maximum.at(greatest, places, keys)
    return greatest


def from_keys(keys: Ints, *, least: bool) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The inverse of :func:`ordered_keys`: values, and where there are any."""
    plain: Any = ~keys if least else keys
    values = np.where(plain < 0, plain ^ (2**63 - 1), plain).view(np.float64)
    return np.where(keys == _NAN_KEY, np.nan, values), keys != _ABSENT
