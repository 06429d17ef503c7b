"""An order that is drawn as a whole is drawn once on a host, and nobody could tell but by the count of draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ranks import run_own_ranks
from trainloop import distributed
from trainloop.data import host_orders, train_feed

ROWS, EPOCHS, RANKS, BATCH = 70_001, 2, 3, 500


def sampler_of(kind: str) -> tuple[Sampler[Any], torch.Generator | None]:
    generator = None if kind == "weighted, global" else torch.Generator().manual_seed(5)
    weights = torch.arange(1.0, ROWS + 1)
    samplers: dict[str, Any] = {
        "weighted": lambda: WeightedRandomSampler(weights, ROWS, generator=generator),
        "weighted, global": lambda: WeightedRandomSampler(weights, ROWS),
        "subset": lambda: SubsetRandomSampler(range(ROWS), generator=generator),  # type: ignore[arg-type]
        "shuffled": lambda: RandomSampler(range(ROWS), generator=generator),
        "several shuffles": lambda: RandomSampler(range(ROWS), num_samples=2 * ROWS, generator=generator),
    }
    return samplers[kind](), generator


KINDS = ["weighted", "weighted, global", "subset", "shuffled", "several shuffles"]


@contextmanager
def counted_draws() -> Iterator[list[str]]:
    draws: list[str] = []

    def count(name: str) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(torch, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            draws.append(name)
            return original(*args, **kwargs)

        setattr(torch, name, counted)
        return original

    originals = {name: count(name) for name in ("multinomial", "randperm")}
    try:
        yield draws
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def read(rank: int, world_size: int, **arguments: Any) -> dict[str, Any]:
    """Of each kind: the rows of each step of each epoch, the generator's state then, and how often torch drew."""
    found = {}
    for kind in KINDS:
        sampler, generator = sampler_of(kind)
        loader = DataLoader(
            TensorDataset(torch.arange(ROWS)), BATCH if world_size > 1 else BATCH * RANKS, sampler=sampler
        )
        feed = train_feed(loader, rank=rank, world_size=world_size, seed=3, **arguments)
        rows, states = [], []
        with counted_draws() as draws:
            for epoch in range(EPOCHS):
                feed.set_epoch(epoch)
                rows.append([step.batches[0][0] if step.batches else torch.empty(0) for step in feed.steps(1)])
                states.append(None if generator is None else generator.get_state().tolist())
        found[kind] = rows, states, len(draws)
    return found


def of_rank(one_is_apart: bool) -> dict[str, Any]:
    rank = distributed.get_rank()
    if one_is_apart and rank == 2:  # as in a container that shows no other process
        host_orders._opened = lambda *_: None  # type: ignore[assignment]
    return read(rank, RANKS, exchange_ints=distributed.exchange_ints)


@pytest.mark.parametrize("one_is_apart", [False, True], ids=["one host", "a rank that can't open it"])
def test_drawn_once_on_a_host(tmp_path: Path, one_is_apart: bool) -> None:
    everyone = run_own_ranks(of_rank, RANKS, one_is_apart, folder=tmp_path)
    alone = read(0, 1)
    for kind in KINDS:
        rows, states, draws = alone[kind]
        assert draws
        for epoch in range(EPOCHS):
            for step, whole in enumerate(rows[epoch]):
                for r, found in enumerate(everyone):
                    assert found[kind][0][epoch][step].tolist() == whole[r::RANKS].tolist()
            for found in everyone:
                assert found[kind][1][epoch] == states[epoch]
        assert [found[kind][2] for found in everyone] == [draws, 0, draws if one_is_apart else 0]
    # And torch's own sampler gives these very numbers.
    sampler, _ = sampler_of("weighted")
    assert list(sampler) == torch.cat(alone["weighted"][0][0]).tolist()
