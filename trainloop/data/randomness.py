"""Randomness of loading, kept apart from that of training: what is drawn where, from which seed.

With a seed, nothing that loads data draws from the generators that the model draws from (dropout, say), and a batch's
augmentation depends on the seed, the epoch, the rank and the batch's place in the epoch alone. So an epoch that is
entered in its middle, or loaded by another number of workers, has the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def seed_cpu(seed: int) -> None:
    """Seed the generators that datasets draw from: Python's, numpy's and torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which seeds every GPU too: theirs belong to the model.
    torch.default_generator.manual_seed(seed)


_State = tuple[Any, Any, torch.Tensor]


def _get_state() -> _State:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_state(state: _State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])


class Aside:
    """Global random state of its own: what runs inside ``with`` neither sees nor moves the state outside.

    Parameters
    ----------
    seed : int
        Where its state starts. Each later ``with`` goes on where the one before ended, but after :meth:`reseed`.

    Notes
    -----
    A ``with`` costs some 50 microseconds, nearly all of it for numpy's state.
    """

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._inside: _State | None = None
        self._outside: _State | None = None

    def reseed(self, seed: int) -> None:
        """Start from ``seed`` at the next ``with``."""
        self._seed = seed

    def __enter__(self) -> None:
        self._outside = _get_state()
        if self._seed is not None:
            seed_cpu(self._seed)
            self._seed = None
        elif self._inside is not None:
            _set_state(self._inside)

    def __exit__(self, *_: object) -> None:
        assert self._outside is not None
        self._inside = _get_state()
        _set_state(self._outside)


def drawn_aside(iterator: Iterator[T], aside: Aside) -> Iterator[T]:
    """The same items, each drawn inside ``aside``."""
    while True:
        with aside:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class SeedOnArrival:
    """An index for a loader's worker that seeds the worker when it arrives there, just before its batch is fetched.

    A loader sends each batch's indices to a worker by pickle. In the worker this object *is* the index: unpickling
    seeds and returns it, so that dataset and collate function stay the user's own, and see what they always saw.
    """

    def __init__(self, index: Any, seed: int, seeder: Callable[[int], None] = seed_cpu) -> None:
        self.index = index
        self._seed = seed
        self._seeder = seeder

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.index, self._seed, self._seeder)


def _arrive(index: T, seed: int, seeder: Callable[[int], None]) -> T:
    seeder(seed)
    return index
