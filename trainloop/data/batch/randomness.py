"""Separate the random numbers of loading from those of training.

With a seed, loading data never draws from the generators that the model uses (for dropout and the like), and a batch's
augmentation depends only on the seed, the epoch, the rank and the batch's position in the epoch. So an epoch is bitwise
the same if it is resumed in its middle, or loaded by another number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def seed_cpu(seed: int) -> None:
    """Seed the generators that datasets use: Python's, numpy's and torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which seeds every GPU, too: the GPUs' generators are for the model.
    torch.default_generator.manual_seed(seed)


class IsolatedRandomState:
    """Context that isolates the global random state: code inside ``with`` neither sees nor changes the outer state.

    Parameters
    ----------
    seed : int, optional
        Seed of the first ``with``; each later ``with`` continues where the previous one ended. If None, each ``with``
        starts from the seed of the last :meth:`reseed`, and its end state is dropped.

    Notes
    -----
    Each ``with`` takes about 30 microseconds, mostly for Python's state. numpy's generator is replaced, because copying
    its state would take three times as long. The only state lost is the second normal sample that ``np.random.randn``
    may have cached outside.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._resumes = seed is not None
        self._python: Any = None
        self._torch: torch.Tensor | None = None
        self._numpy = np.random.MT19937(0)
        self._outside: tuple[Any, Any, torch.Tensor] | None = None

    def reseed(self, seed: int) -> IsolatedRandomState:
        """Start from ``seed`` at the next ``with``."""
        self._seed = seed
        return self

    def __enter__(self) -> None:
        from numpy.random import mtrand  # imported late: numpy loads it on first use, which takes 8 ms

        numpy_outside = mtrand.get_bit_generator()
        self._outside = random.getstate(), numpy_outside, torch.default_generator.get_state()
        mtrand.set_bit_generator(self._numpy)
        if self._seed is not None:
            seed_cpu(self._seed)
            self._seed = None
        elif self._torch is not None:
            random.setstate(self._python)
            torch.default_generator.set_state(self._torch)

    def __exit__(self, *_: object) -> None:
        from numpy.random import mtrand

        assert self._outside is not None
        if self._resumes:
            self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        python, numpy, torch_state = self._outside
        random.setstate(python)
        mtrand.set_bit_generator(numpy)
        torch.default_generator.set_state(torch_state)


def isolated_iter(iterator: Iterator[T], isolated: IsolatedRandomState) -> Iterator[T]:
    """Yield the items of an iterator; draw each item inside ``isolated``."""
    while True:
        with isolated:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class SeedOnArrival:
    """An index for a loader's worker that seeds the worker when it arrives there, just before its batch is fetched.

    A loader sends each batch's indices to a worker by pickle. In the worker this object *is* the index: unpickling
    seeds and returns it, so that the user's dataset and collate function receive the same arguments as usual.
    """

    def __init__(self, index: Any, seed: int, seeder: Callable[[int], None] = seed_cpu) -> None:
        self.index = index
        self._seed = seed
        self._seeder = seeder

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_and_return, (self.index, self._seed, self._seeder)


def _seed_and_return(index: T, seed: int, seeder: Callable[[int], None]) -> T:
    seeder(seed)
    return index
