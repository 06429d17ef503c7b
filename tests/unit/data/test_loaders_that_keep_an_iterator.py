"""Loaders that keep one iterator: prefetchers that are their own iterator, and loaders with an endless sampler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop
from trainloop.errors import ConfigurationError

X = torch.randn(22, 3, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


class Prefetcher:
    """``iter()`` starts from the beginning, and returns the object itself."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class Once(Prefetcher):
    def __iter__(self) -> Iterator[Any]:
        return self


class Endless:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class KeepsWorkers(DataLoader[Any]):
    """All epochs are read from one iterator over an endless sampler, so that workers never end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        return itertools.islice(self.iterator, len(self))


def net() -> Layers:
    torch.manual_seed(0)
    return Layers(nn.Linear(3, 1))


def results(make: Any, seed: int | None, **how: Any) -> list[torch.Tensor]:
    model = net()
    sgd = optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(model, make(), sgd, nn.MSELoss(), validation_loader=make(), seed=seed, **how)
    loop.fit(num_epochs=2)
    loop.fit(num_epochs=1)
    predictions = loop.predict_on_validation_set()[0]
    return [predictions, *model.parameters(), torch.tensor(loop.history["loss"] + loop.history["val_loss"])]


def plain() -> Any:
    return DataLoader(ROWS, 4)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("make", [lambda: Prefetcher(plain()), lambda: KeepsWorkers(ROWS, 4)])
def test_all_epochs_and_evaluations_are_read(make: Any, seed: int | None) -> None:
    assert all(map(torch.equal, results(make, seed), results(plain, seed)))


def test_replicas_train_on_a_prefetchers_batches() -> None:
    for one, other in zip(
        results(lambda: Prefetcher(plain()), None, gpu_mode="dp", devices=2), results(plain, None), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("loader", [Once(plain()), iter(plain()), (batch for batch in plain())])
def test_an_iterator_that_does_not_start_again_is_an_error(loader: Any) -> None:
    model = net()
    with pytest.raises(ConfigurationError, match=r"train_loader is a \w+, an iterator, which can't start again"):
        TrainLoop(model, loader, None, None, optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
