"""Attributes that a model's methods set: in dp, as in one process, or with a warning that names them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTBasicModel

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Anneals(Net):
    """The penalty grows with the number of steps, which the model counts."""

    step = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.step += 1
        self.layer.calls = getattr(self.layer, "calls", 0.0) + 0.5
        weight = min(1.0, self.step / 6)
        return super().get_loss(batch_data, criterion, device) + weight * self.layer.weight.square().sum()


class CountsRows(Net):
    rows = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.rows += len(batch_data[0])
        return super().get_loss(batch_data, criterion, device)


class Averages(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.float64)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch_data[0].mean()
        return super().get_loss(batch_data, criterion, device)


def trained(model: Any, replicas: int) -> tuple[Any, list[str]]:
    how: Any = {"gpu_mode": "dp", "devices": replicas} if replicas else {}
    loader = DataLoader(ROWS, 8)
    loop = TrainLoop(
        model, loader, loader, None, optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(),
        accelerator="cpu", progress_bar=False, **how,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.fit(num_epochs=2)
    return model, [str(one.message) for one in caught if "so the change is lost" in str(one.message)]


def test_a_count_of_steps_is_that_of_one_process() -> None:
    (one, _), (other, said) = trained(Anneals(), 0), trained(Anneals(), 2)
    assert (other.step, other.layer.calls, said) == (one.step, one.layer.calls, []) == (16, 8.0, [])
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "what"), [(CountsRows, "get_loss changes rows,"), (Averages, "get_loss_eval changes mean,")]
)
def test_what_is_computed_from_a_part_is_warned_of_once(model: Any, what: str) -> None:
    _, said = trained(model(), 2)
    assert len(said) == 1
    assert f"gpu_mode='dp': {what} but each replica has only a part of the batch" in said[0]
