"""Classes of loaders whose __iter__ yields other batches than the sampler cuts: more, fewer, merged or divided ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.loops import Layers
from kit.simulated_ranks import SEED, in_ranks, rank_steps
from torch import nn, optim
from torch.utils.data import DataLoader

from trainloop import TrainLoop
from trainloop.data import EvalFeed, TrainFeed
from trainloop.errors import ConfigurationError

ROWS = 13
Batches = list[list[int]]


class Cycles(DataLoader[Any]):
    """Has ten batches in each epoch, from as many passes as that takes."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        left = 10
        while left:
            for batch in super().__iter__():
                yield batch
                left -= 1
                if not left:
                    return


class CyclesWithoutLength(Cycles):
    __len__ = DataLoader.__len__


class Merges(DataLoader[Any]):
    def __len__(self) -> int:
        return -(-super().__len__() // 2)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        for batch in batches:
            yield torch.cat([batch, *([] if (other := next(batches, None)) is None else [other])])


class Divides(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield from batch.split(2)


class Leaves(DataLoader[Any]):
    """Leaves out batches by their contents, so that ranks have different numbers of batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch for batch in super().__iter__() if 5 not in batch and 1 not in batch)


def rows_of(loader: Any) -> Batches:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", [Cycles, CyclesWithoutLength, Merges, Leaves])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_do_the_same_steps(kind: Any, world_size: int) -> None:
    ranks = rank_steps(lambda: kind(range(ROWS), 3), world_size, epochs=1)
    steps = [epoch for (epoch,) in ranks]
    assert len({len(epoch) for epoch in steps}) == 1
    for step in zip(*steps, strict=True):
        sizes = [len(batch) for one in step for batch in one.batches]
        assert {one.total for one in step} == {sum(sizes)}
    if world_size == 1:
        assert [step.batches[0].tolist() for step in steps[0]] == rows_of(kind(range(ROWS), 3))


@pytest.mark.parametrize("kind", [Cycles, CyclesWithoutLength, Merges])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_epoch_continues_at_its_batch(kind: Any, world_size: int) -> None:
    whole, rest = (rank_steps(lambda: kind(range(ROWS), 3), world_size, epochs=1, skip=skip) for skip in (0, 2))
    for (of_whole,), (of_rest,) in zip(whole, rest, strict=True):
        found, expected = ([[b.tolist() for b in step.batches] for step in one] for one in (of_rest, of_whole[2:]))
        assert found == expected


def evaluated(kind: Any, world_size: int) -> Batches:
    def of_rank(ranked: dict[str, Any]) -> list[tuple[int, list[int], int]]:
        feed = EvalFeed(kind(range(ROWS), 3), seed=SEED, **ranked)
        return [(index, batch.tolist(), size) for index, batch, size in feed.batches()]

    ranks: Any = in_ranks(world_size, of_rank)
    assert all(size == len(batch) for rank in ranks for _, batch, size in rank)
    return [batch for _, batch, _ in sorted(batch for rank in ranks for batch in rank)]


@pytest.mark.parametrize("kind, world_size", [(Divides, 1), *itertools.product([Cycles, Merges, Leaves], [1, 2, 3])])
def test_evaluations_have_the_batches_of_one_process(kind: Any, world_size: int) -> None:
    found, expected = evaluated(kind, world_size), rows_of(kind(range(ROWS), 3))
    assert (found if kind is not Leaves else sorted(found)) == expected


@pytest.mark.parametrize(
    "kind, message", [(CyclesWithoutLength, "reads its sampler .* times"), (Divides, "yielded a batch")]
)
def test_an_evaluation_by_ranks_of_other_samples_is_an_error(kind: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evaluated(kind, 2)


@pytest.mark.parametrize("seed", [None, SEED])
def test_micro_batches_weigh_as_many_samples_as_they_have(seed: int | None) -> None:
    feed = TrainFeed(Merges(range(ROWS), 3), seed=seed)
    assert [step.sizes for step in feed.steps(2)] == [[6, 6], [1]]


@pytest.mark.parametrize("kind, steps", [(Cycles, 10), (Merges, 3)])
def test_the_number_of_steps_is_that_of_the_loader(kind: Any, steps: int) -> None:
    net = Layers(nn.Linear(1, 1))
    loop = TrainLoop(net, kind(range(ROWS), 3), optimizer=optim.SGD(net.parameters(), 0.1), progress_bar=False)
    assert loop.num_optimizer_steps(num_epochs=1) == steps
