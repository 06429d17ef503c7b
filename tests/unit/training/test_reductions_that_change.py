"""A callback changes what a criterion reduces its losses by: two micro-batches train like the whole batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TTBasicModel

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True) ** 2)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss()

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.inner(y_pred, y)
        return found


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        loss = criterion["a"] if isinstance(criterion, dict) else criterion
        loss = loss[0] if type(loss) is list else loss
        found: Tensor = loss(self(batch_data[0]), batch_data[1])
        return found


def set_sum(criterion: Any) -> None:
    criterion.reduction = "sum"


def replace_inner(criterion: Any) -> None:
    criterion.inner = nn.MSELoss(reduction="sum")


class Changes(AbstractCallback):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__("changes")
        self.change, self.done = change, False

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 2 and not self.done:
            self.done = True
            self.change(loop.criterion)
            for group in loop.optimizer.param_groups:
                group["lr"] /= 16


def trained(criterion: Any, change: Callable[[Any], None], batch: int, accumulation: int, **mode: Any) -> Tensor:
    model = Net()
    loop = cpu_loop(model, DataLoader(ROWS, batch), optim.SGD(model.parameters(), lr=0.02), criterion, **mode)
    loop.fit(num_epochs=2, grad_accumulation=accumulation, callbacks=[Changes(change)])
    return model.layer.weight


@pytest.mark.parametrize(
    "mode",
    [
        {"batch": 8, "accumulation": 2},
        {"batch": 16, "accumulation": 1, "gpu_mode": "dp", "devices": 2},
        pytest.param({"batch": 8, "accumulation": 1, "gpu_mode": "ddp", "devices": 2}, marks=pytest.mark.long),
    ],
    ids=["single", "dp", "ddp"],
)
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (nn.MSELoss, set_sum),
        (lambda: {"a": nn.MSELoss()}, lambda criterion: set_sum(criterion["a"])),
        (lambda: {"a": nn.MSELoss()}, lambda criterion: criterion.update(a=nn.MSELoss(reduction="sum"))),
        (lambda: OrderedDict(a=nn.MSELoss()), lambda criterion: criterion.update(a=nn.MSELoss(reduction="sum"))),
        (lambda: {"a": [nn.MSELoss()]}, lambda criterion: criterion["a"].__setitem__(0, nn.MSELoss(reduction="sum"))),
        (lambda: [nn.MSELoss()], lambda criterion: set_sum(criterion[0])),
        (Wrapped, lambda criterion: set_sum(criterion.inner)),
        (Wrapped, replace_inner),
    ],
    ids=[
        "criterion",
        "in a dict",
        "another in a dict",
        "in an ordered dict",
        "within a dict",
        "in a list",
        "in a module",
        "another in a module",
    ],
)
def test_the_next_batch_has_the_rule_of_the_new_reduction(make: Any, change: Any, mode: dict[str, Any]) -> None:
    expected = trained(make(), change, 16, 1)
    assert torch.allclose(trained(make(), change, **mode), expected, rtol=1e-12)
