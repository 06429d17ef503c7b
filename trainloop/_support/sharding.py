"""Decide which rank takes which sample, in which order and with which weight, by integer arithmetic without torch.

An epoch is one *global order* of samples, cut into *global batches* of ``batch_size * world_size`` samples. From each
global batch, rank ``r`` takes every ``world_size``-th sample, beginning with sample ``r``. So any number of ranks with
the same global batch size sees the same global batches. The last one may be short; it is never padded::

    order         7 2 9 4 | 0 5 8 1 | 3 6            10 samples, batch_size 2, 2 ranks
    rank 0        7   9   | 0   8   | 3
    rank 1          2   4 |   5   1 |   6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]

_MASK64 = 2**64 - 1


def shard_size(total: int, rank: int, world_size: int) -> int:
    """Return the number of items, out of ``total``, that a rank gets: those at ``rank, rank + world_size, ...``

    Examples
    --------
    >>> [shard_size(10, rank, 4) for rank in range(4)]
    [3, 3, 2, 2]
    """
    return max(0, (total - rank + world_size - 1) // world_size)


def shard_sizes(total: int, world_size: int) -> tuple[int | None, ...]:
    """Return :func:`shard_size` of each rank; None for ranks without a part, unless the whole is empty.

    Examples
    --------
    >>> shard_sizes(2, world_size=3), shard_sizes(0, world_size=3)
    ((1, 1, None), (0, 0, 0))
    """
    return tuple(shard_size(total, rank, world_size) or (None if total else 0) for rank in range(world_size))


@dataclass(frozen=True)
class BatchPlan:
    """Global batches of an epoch with a known number of samples."""

    num_samples: int
    """Samples in the global order, over all ranks."""

    batch_size: int
    """Samples of one rank in a full global batch."""

    world_size: int = 1
    """Ranks that share each global batch."""

    drop_last: bool = False
    """True to leave out the last global batch if it is short."""

    @property
    def global_batch_size(self) -> int:
        """Number of samples in a full global batch, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def num_full(self) -> int:
        """Full global batches of an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def last_size(self) -> int:
        """Samples of all ranks in the short global batch that ends the epoch; 0 if there is none."""
        return 0 if self.drop_last else self.num_samples % self.global_batch_size

    @property
    def num_batches(self) -> int:
        """Global batches of an epoch, the same number on every rank. A rank's part of the last batch may be empty."""
        return self.num_full + (self.last_size > 0)

    @property
    def num_taken(self) -> int:
        """Samples that an epoch trains on, over all ranks."""
        return self.num_full * self.global_batch_size + self.last_size

    def shares(self, batch_index: int) -> tuple[int | None, ...]:
        """Return the samples of each rank in the global batch ``batch_index``; None for a rank without any."""
        if batch_index < self.num_full:
            return (self.batch_size,) * self.world_size
        return shard_sizes(self.last_size, self.world_size)

    def all_shares(self) -> Iterator[tuple[int | None, ...]]:
        """Yield :meth:`shares` of each batch of an epoch; full batches yield the same tuple object."""
        full = repeat(self.shares(0), self.num_full)
        return chain(full, [self.shares(self.num_full)] if self.last_size else [])

    def positions(self, rank: int, first_batch: int, num_batches: int) -> tuple[int, int, int]:
        """Return the positions, as a range, of rank ``rank``'s samples in some global batches.

        The length of a full global batch is a multiple of ``world_size``, so a rank's samples have the same stride over
        the whole epoch, including across batch boundaries.
        """
        start = first_batch * self.global_batch_size + rank
        stop = min((first_batch + num_batches) * self.global_batch_size, self.num_taken)
        return start, max(start, stop), self.world_size


# -- the global order, by position -------------------------------------------------------------------------------------


class IdentityOrder:
    """Dataset order."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def at(self, positions: Ints) -> Ints:
        """Return the positions unchanged."""
        return positions


class PermutedOrder:
    """A shuffled order that is computed on access, and so needs no memory and no time to start.

    Parameters
    ----------
    length : int
        Size of the dataset; indices are in ``[0, length)``.
    key : int
        Any integer: the same key gives the same permutation on every machine and version.

    Notes
    -----
    Up to ``SORTED_UP_TO`` indices, positions are sorted by the SplitMix64 stream of the key, a uniform shuffle as far
    as the stream is random. For more indices, a Feistel network of 8 rounds permutes all numbers with as many bits as
    ``length - 1``; values outside the range are permuted again until they fall inside (cycle walking; less than 2
    passes on average). Networks over few bits are measurably not uniform, hence the threshold.

    A block of 4,096 positions takes about a millisecond.

    References
    ----------
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking).
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64).
    """

    SORTED_UP_TO = 2**14
    ROUNDS = 8

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._key = key = _mix(_mix(key & _MASK64))
        # At least two bits, so that each half of a number has one.
        bits = max(2, (length - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - bits // 2
        self._round_keys = [np.uint64(_mix(key + (i + 1) * _GOLDEN)) for i in range(self.ROUNDS)]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _sorted(self) -> Ints:
        return np.argsort(_mix_array(np.uint64(self._key) + _GOLDEN_64 * np.arange(self._length, dtype=np.uint64)))

    def at(self, positions: Ints) -> Ints:
        """Return the indices of the samples at ``positions``, each in ``[0, len)``, in any order."""
        if self._length <= self.SORTED_UP_TO:
            return self._sorted[positions]
        # Cycle walking is a permutation: numbers outside of the range lead to different unused numbers inside of it.
        numbers = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self._length)
        while outside.size:
            numbers[outside] = again = self._encrypt(numbers[outside])
            outside = outside[again >= self._length]
        return numbers.astype(np.int64)

    def _encrypt(self, numbers: _UInt64s) -> _UInt64s:
        # If the number of bits is odd, the network is unbalanced: the halves' widths differ by one and swap each round.
        low_bits, high_bits = self._low_bits, self._high_bits
        low, high = numbers & np.uint64(2**low_bits - 1), numbers >> np.uint64(low_bits)
        for round_key in self._round_keys:
            # (high, low) -> (low, high ^ f(low)): the new low half is as wide as the old high one.
            low, high = high ^ (_mix_array(low ^ round_key) >> np.uint64(64 - high_bits)), low
            low_bits, high_bits = high_bits, low_bits
        return (high << np.uint64(low_bits)) | low


_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_64 = np.uint64(_GOLDEN)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix_array(numbers: _UInt64s) -> _UInt64s:
    """Apply SplitMix64's finalizer: a bijection over 64 bits, in which each output bit depends on all input bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))


def _mix(number: int) -> int:
    return int(_mix_array(np.array([number & _MASK64], dtype=np.uint64))[0])


Order = IdentityOrder | PermutedOrder
"""A global order of samples that can be read at any position."""


# -- blocks of a rank's indices ----------------------------------------------------------------------------------------


def index_blocks(order: Order, plan: BatchPlan, rank: int, first_batch: int = 0, block: int = 4096) -> Iterator[Ints]:
    """Yield a rank's indices from batch ``first_batch`` on, in blocks of about ``block`` that end with a batch."""
    batches = max(1, block // plan.batch_size)
    for batch_index in range(first_batch, plan.num_batches, batches):
        start, stop, step = plan.positions(rank, batch_index, batches)
        if start < stop:
            yield order.at(np.arange(start, stop, step, dtype=np.int64))


# -- weights of micro-batches in a step --------------------------------------------------------------------------------


class StepWeights(NamedTuple):
    """Weights of one rank's micro-batches, such that the mean over ranks is the mean over the step's samples."""

    scales: list[float] | None
    """Factor of each of this rank's losses; None if all are equal (divide each loss by the number of losses)."""

    total: int
    """Samples of all ranks in the step."""

    counts: list[int] | None
    """Number of micro-batches of each rank; None if it is the same for all ranks."""


def weigh_step(sizes: Sequence[Sequence[int]], rank: int) -> StepWeights:
    """Return the weights of rank ``rank``'s micro-batches in a step.

    Parameters
    ----------
    sizes : sequence of sequence of int
        Samples in each micro-batch of each rank: ``sizes[rank][micro_batch]``; empty for a rank without any.
    rank : int
        The rank whose weights to return.

    Examples
    --------
    Two ranks with 3 and 1 samples: the mean over ranks of ``scale * loss`` counts each sample once.

    >>> weigh_step([[3], [1]], rank=0)
    StepWeights(scales=[1.5], total=4, counts=None)
    """
    total = sum(map(sum, sizes))
    counts = list(map(len, sizes)) if len(set(map(len, sizes))) > 1 else None
    if counts is None and len({size for of_rank in sizes for size in of_rank}) <= 1:
        return StepWeights(None, total, counts)
    # A step of empty batches has no mean: its weights are 0, to avoid a division by zero.
    return StepWeights([size * len(sizes) / total if total else 0.0 for size in sizes[rank]], total, counts)
