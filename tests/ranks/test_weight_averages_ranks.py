"""Averages of weights over ranks: SWA's BatchNorm statistics, and averages without an update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import TrainLoop, TTBasicModel
from trainloop.callbacks import ExponentialMovingAverage, StochasticWeightAveraging


class Norms(TTBasicModel):
    """BatchNorm layers that are used never, in the last batch only, once and twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never, self.last, self.once, self.twice = (nn.BatchNorm1d(8, affine=False) for _ in range(4))
        self.fc = nn.Linear(8, 3)
        self.never.running_mean.fill_(5.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(x)
        if not self.training and len(x) < 8:
            x = self.last(x)
        return self.fc(self.twice(self.twice(x) + 1))


def loop_of(model: Any, ranks: int) -> TrainLoop[Any]:
    loader = DataLoader(make_data(103), 8)
    sgd = optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model, loader, loader, None, sgd, nn.CrossEntropyLoss(), gpu_mode="ddp", accelerator="cpu", devices=ranks,
        progress_bar=False,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_batchnorm_counts_the_batches_of_all_ranks(ranks: int) -> None:
    model = Norms()
    loop = loop_of(model, ranks)
    loop.fit(2, callbacks=[StochasticWeightAveraging(start=0)])
    by_hand = copy.deepcopy(model)
    by_hand.eval()
    for norm in (by_hand.last, by_hand.once, by_hand.twice):
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for x, _ in loop.train_loader:
            by_hand(x)
    for name in ("last", "once", "twice"):
        torch.testing.assert_close(getattr(model, name).running_mean, getattr(by_hand, name).running_mean)
        torch.testing.assert_close(getattr(model, name).running_var, getattr(by_hand, name).running_var)
    assert model.never.running_mean.tolist() == [5.0] * 8  # type: ignore[union-attr]
    update_bn(((x,) for x, _ in loop.train_loader), by_hand)
    torch.testing.assert_close(model.once.running_mean, by_hand.once.running_mean)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:ExponentialMovingAverage")
def test_the_trained_weights_stay_without_an_update() -> None:
    model, plain = Norms(), Norms()
    loop_of(plain, 2).fit(1)
    loop_of(model, 2).fit(1, callbacks=[ExponentialMovingAverage(every_n_steps=100)])
    assert torch.equal(model.fc.weight, plain.fc.weight)
