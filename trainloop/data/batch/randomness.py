"""Seed the generators that datasets use; separate the random numbers of loading from those of training.

With a seed, loading data never draws from the generators that the model uses (for dropout and the like), and a batch's
augmentation depends only on the seed, the epoch, the rank and the batch's position in the epoch. So an epoch is bitwise
the same if it is resumed in its middle, or loaded by another number of workers.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from trainloop._support.rng import seed_numpy
from trainloop._support.user_line import warn_or_print

T = TypeVar("T")

# The global generators can be replaced by one thread at a time.
_replacing = threading.RLock()
_PATIENCE_S = 10.0
_warned = False
# numpy's generators that are not in use. None is freed, because another thread may be reading it: numpy would crash.
_free: list[np.random.MT19937] = []


def _free_generator() -> np.random.MT19937:
    try:
        return _free.pop()
    except IndexError:  # not asked before: another thread may take the last one
        return np.random.MT19937(0)


def _unlock_in_child() -> None:
    global _replacing
    _replacing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def seed_cpu(seed: int) -> None:
    """Seed the generators that datasets use: Python's, numpy's and torch's on the CPU."""
    random.seed(seed)
    seed_numpy(seed)
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

    While another thread is inside such a context, a ``with`` waits, after a warning: the threads would restore each
    other's states. If that thread stays inside, as it waits for this one, the ``with`` isolates nothing.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._resumes = seed is not None
        self._python: Any = None
        self._torch: torch.Tensor | None = None
        self._numpy = _free_generator()
        weakref.finalize(self, _free.append, self._numpy).atexit = False
        self._lock: Any = None
        self._outside: tuple[Any, Any, torch.Tensor] | None = None

    def reseed(self, seed: int) -> IsolatedRandomState:
        """Start from ``seed`` at the next ``with``."""
        self._seed = seed
        return self

    def __enter__(self) -> None:
        from numpy.random import mtrand  # imported late: numpy loads it on first use, which takes 8 ms

        lock = _replacing
        if not lock.acquire(blocking=False):
            _warn_of_threads()
            if not lock.acquire(timeout=_PATIENCE_S):
                return
        self._lock = lock
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

        if self._lock is None:
            return
        assert self._outside is not None
        if self._resumes:
            self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        python, numpy, torch_state = self._outside
        random.setstate(python)
        mtrand.set_bit_generator(numpy)
        torch.default_generator.set_state(torch_state)
        self._lock, lock = None, self._lock
        lock.release()


def _warn_of_threads() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_or_print(
            "two loops with a seed run at the same time, in threads of one process. Threads share the random "
            "generators of Python, numpy and torch, so dropout and random transforms may draw other numbers in each "
            "run. Run the loops one after another, or in processes."
        )


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
