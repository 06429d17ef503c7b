"""Ranks simulated in one process: threads that take turns, and what tests of data ask of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kit.loader_kinds import Kind, parts
from trainloop.data import StepBatches, TrainFeed


class Exchange:
    """``exchange_ints`` between threads of which one runs at a time, as random state belongs to the process."""

    def __init__(self, world_size: int) -> None:
        self.calls = 0
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(world_size, timeout=300)
        self._values: list[list[int]] = [[] for _ in range(world_size)]

    def of_rank(self, rank: int) -> Callable[[list[int]], list[list[int]]]:
        def exchange(values: list[int]) -> list[list[int]]:
            self.calls += 1
            self._values[rank] = list(values)
            self._turn.release()
            try:
                self._barrier.wait()
                everyone = [list(of_rank) for of_rank in self._values]
                self._barrier.wait()
            finally:
                self._turn.acquire()
            return everyone

        return exchange

    def run(self, functions: list[Callable[[], Any]]) -> list[Any]:
        """Run a function on ranks: its result on each, or the first error that one raised."""
        results: list[Any] = [None] * len(functions)
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = functions[rank]()
                except BaseException as error:
                    errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            if errors:
                raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
        finally:
            errors.clear()  # their frames, and this one, would hold each other, and a loader's workers
        return results


SEED = 3


def each(kinds: list[Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def rank_steps(
    make: Callable[[], Any], world_size: int, grad_accumulation: int = 1, *, epochs: int = 2, skip: int = 0
) -> list[list[list[StepBatches]]]:
    """Steps of each rank, in each epoch."""
    exchange = Exchange(world_size)

    def of_rank(rank: int) -> list[list[StepBatches]]:
        feed = TrainFeed(make(), rank=rank, world_size=world_size, seed=SEED, exchange_ints=exchange.of_rank(rank))
        steps = []
        for epoch in range(epochs):
            feed.set_epoch(epoch)
            steps.append(list(feed.steps(grad_accumulation, skip)))
        feed.close()
        return steps

    return exchange.run([lambda rank=rank: of_rank(rank) for rank in range(world_size)])  # type: ignore[misc]


def global_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def same(batch: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(parts(batch), parts(other), strict=True))
