"""Loaders of which each rank reads all batches: it is an error if the first batches of ranks differ."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from kit.simulated_ranks import SEED, in_ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainloop.data import EvalFeed, TrainFeed
from trainloop.data.batch.batches import integers_of
from trainloop.errors import ConfigurationError


class Batches:
    """Batches of four rows: of all rows, or of those of one rank."""

    is_distributed: Any = None

    def __init__(self, rank: int) -> None:
        self.rows = torch.arange(24)[rank::2] if rank >= 0 else torch.arange(24)

    def __iter__(self) -> Any:
        for ids in self.rows.split(4):
            yield torch.rand(len(ids), 2, generator=torch.Generator().manual_seed(int(ids[0]))), ids


class Rows(IterableDataset[Any]):
    is_distributed: Any = None

    def __init__(self, rank: int) -> None:
        self.rows = list(range(24))[rank::2]

    def __iter__(self) -> Any:
        return iter((torch.zeros(2), i) for i in self.rows)


class Declared(Batches):
    is_distributed = True


def ids_of_ranks(make: Any, evaluation: bool) -> list[list[int]]:
    def of_rank(ranked: dict[str, Any]) -> list[Tensor]:
        rank, args = ranked["rank"], {**ranked, "seed": SEED}
        if evaluation:
            with closing(EvalFeed(make(rank), name="loader", **args)) as rows:
                return [batch[1] for _, batch, _ in rows.batches()]
        with closing(TrainFeed(make(rank), name="loader", **args)) as feed:
            return [batch[1] for step in feed.steps(1) for batch in step.batches]

    return [torch.cat(ids).tolist() for ids in in_ranks(2, of_rank)]


@pytest.mark.parametrize("evaluation", [False, True])
def test_batches_of_a_rank_are_not_split_again(evaluation: bool) -> None:
    message = r"loader: Batches yields a different first batch on each rank.* set Batches\.is_distributed = True"
    with pytest.raises(ConfigurationError, match=message):
        ids_of_ranks(Batches, evaluation)
    assert ids_of_ranks(Declared, evaluation) == [[*range(0, 24, 2)], [*range(1, 24, 2)]]


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_same_batches_on_all_ranks_are_split(evaluation: bool) -> None:
    first, second = ids_of_ranks(lambda _: Batches(-1), evaluation)
    assert sorted(first + second) == [*range(24)]


class DeclaredRows(Rows):
    is_distributed = True


class SameRows(Rows):
    def __init__(self, rank: int) -> None:
        self.rows = list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("evaluation", [False, True])
def test_rows_of_a_stream_that_belong_to_a_rank_are_not_split_again(evaluation: bool, workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"loader: Rows yields a different first batch on each rank"):
        ids_of_ranks(lambda rank: DataLoader(Rows(rank), 4, num_workers=workers), evaluation)
    if workers:
        return
    declared = ids_of_ranks(lambda rank: DataLoader(DeclaredRows(rank), 4), evaluation)
    assert declared == [[*range(0, 24, 2)], [*range(1, 24, 2)]]
    first, second = ids_of_ranks(lambda rank: DataLoader(SameRows(rank), 4), evaluation)
    assert sorted(first + second) == [*range(24)]


def test_values_that_augmentation_changes_are_not_compared() -> None:
    images = torch.zeros(2, 3, dtype=torch.uint8)
    batch = (torch.rand(2, 3), images, {"id": [3, 4], "name": ("a", "b"), "none": None})
    assert integers_of(batch) == [3, 4, "a", "b"]
    labels = [integers_of(torch.tensor([1, 2], dtype=dtype)) for dtype in (torch.int64, torch.int64, torch.int32)]
    assert labels[0] == labels[1] != labels[2]
