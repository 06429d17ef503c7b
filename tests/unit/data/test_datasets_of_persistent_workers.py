"""Attributes of a dataset that are changed while persistent workers have copies of it: a warning, once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kit.simulated_ranks import SEED
from torch.utils.data import DataLoader, Dataset

from trainloop.data import EvalFeed, TrainFeed


class Rows(Dataset[Any]):
    factor = 1

    def __init__(self) -> None:
        self.factor, self.seen = 1, float("nan")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index * self.factor)


class Epochs(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.factor = 1 + epoch


def loader_of(data: Any, persistent: bool = True) -> Any:
    return DataLoader(data, 4, num_workers=1, persistent_workers=persistent)


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_change_that_the_workers_do_not_see_is_warned_of_once(seed: int | None) -> None:
    data = Rows()
    feed = TrainFeed(loader_of(data), seed=seed, name="train_loader")
    list(feed.steps(1))
    data.factor = 2
    with pytest.warns(
        match=r"train_loader.dataset.factor was 1 when .* workers started, and is 2 now.*set_epoch"
    ) as found:
        rows = [step.batches[0].tolist() for _ in range(2) for step in feed.steps(1)]
    assert len(found) == 1
    assert rows == [[0, 1, 2, 3]] * 2
    feed.close()


def test_evaluations_warn_too() -> None:
    data = Rows()
    feed = EvalFeed(loader_of(data), name="validation_loader")
    list(feed.batches())
    data.factor = 2
    with pytest.warns(match="validation_loader.dataset.factor was 1"):
        list(feed.batches())
    feed.close()


@pytest.mark.parametrize("kind, persistent", [(Rows, True), (Rows, False), (Epochs, True)])
def test_changes_that_take_effect_are_not_warned_of(kind: type[Rows], persistent: bool) -> None:
    data = kind()
    feed = TrainFeed(loader_of(data, persistent), seed=SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(3):
            feed.set_epoch(epoch)
            if not persistent or not epoch:
                data.factor = 1 + epoch  # in the first epoch, before the workers start
            (step,) = feed.steps(1)
            assert step.batches[0].tolist() == [i * data.factor for i in range(4)]
    feed.close()
