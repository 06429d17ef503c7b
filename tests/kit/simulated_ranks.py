"""Ranks simulated in one process: threads that take turns, and what tests of data ask of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kit.loader_kinds import Kind, parts
from kit.simulated_group import RankOfGroup, SimulatedGroup
from trainloop.data import StepBatches, TrainFeed

SEED = 3


def in_ranks(world_size: int, work: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """What ``work`` returns on each rank; it gets the arguments of a feed that belong to its rank."""

    def on_rank(of: RankOfGroup) -> Any:
        return work({"rank": of.get_rank(), "world_size": world_size, "exchange_ints": of.exchange_ints})

    return SimulatedGroup(world_size).run(on_rank)


def each(kinds: list[Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def rank_steps(
    make: Callable[[], Any], world_size: int, grad_accumulation: int = 1, *, epochs: int = 2, skip: int = 0
) -> list[list[list[StepBatches]]]:
    """Steps of each rank, in each epoch."""

    def of_rank(ranked: dict[str, Any]) -> list[list[StepBatches]]:
        feed = TrainFeed(make(), seed=SEED, **ranked)
        steps = []
        for epoch in range(epochs):
            feed.set_epoch(epoch)
            steps.append(list(feed.steps(grad_accumulation, skip)))
        feed.close()
        return steps

    return in_ranks(world_size, of_rank)


def global_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def same(batch: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(parts(batch), parts(other), strict=True))
