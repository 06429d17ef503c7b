"""Losses that reach other parameters on other ranks: an error in fsdp, whose units would mix up the gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.sharded_models import needs_fsdp_on_cpu
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import WorkerFailedError

pytestmark = pytest.mark.long


class Heads(TTModel):
    """Two heads of one size, of which a batch uses that of its first row, and maybe the other one times zero."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.both = both
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        x, is_left = batch_data
        hidden = self(x)
        one, other = (self.left, self.right) if is_left[0] else (self.right, self.left)
        loss = criterion(one(hidden), x)
        return loss + 0 * other(hidden).sum() if self.both else loss

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self(batch_data[0]), None, {}


def fit(both: bool, is_left: list[bool], callbacks: list[Any]) -> Heads:
    """A row for each rank and step."""
    x = torch.randn(len(is_left), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Heads(both)
    TrainLoop(
        model,
        DataLoader(TensorDataset(x, torch.tensor(is_left)), 1),
        optimizer=optim.SGD(model.parameters(), 0.1),
        criterion=nn.MSELoss(),
        gpu_mode="fsdp",
        accelerator="cpu",
        devices=2,
        progress_bar=False,
    ).fit(num_epochs=1, callbacks=callbacks)
    return model


@needs_fsdp_on_cpu
def test_ranks_whose_losses_reach_other_parameters_are_an_error_before_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerFailedError, match=r"different parameters \(not (left|right)\.bias, .*0 \* self\.head\(x\)"
    ):
        fit(both=False, is_left=[True, True, True, False], callbacks=[ModelCheckpoint(tmp_path)])
    assert not list(tmp_path.glob("checkpoint*"))


@needs_fsdp_on_cpu
def test_a_head_that_no_rank_or_each_rank_reaches_is_no_error() -> None:
    unused = fit(both=False, is_left=[True] * 4, callbacks=[])
    assert torch.equal(unused.right.weight, Heads(both=False).right.weight)
    assert not torch.equal(
        fit(both=True, is_left=[True, True, True, False], callbacks=[]).right.weight, unused.right.weight
    )
