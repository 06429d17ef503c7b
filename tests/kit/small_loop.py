"""A tiny model and a loop around it, for tests of callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTModel

BATCH_SIZE = 16
STEPS_PER_EPOCH = 7  # 101 samples


class Net(TTModel):
    """A linear classifier that logs its accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        y_pred = self(x.to(device))
        self.log("accuracy", (y_pred.argmax(1) == y.to(device)).float().mean())
        return criterion(y_pred, y.to(device))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


def make_loop(
    model: TTModel | None = None,
    *,
    validation: bool = True,
    optimizer: Any = None,
    shuffle: bool = False,
    **kwargs: Any,
) -> TrainLoop:
    if model is None:
        torch.manual_seed(0)
        model = Net()
    if optimizer is None:
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainLoop(
        model,
        DataLoader(make_data(), BATCH_SIZE, shuffle=shuffle),
        DataLoader(make_data(33, seed=5), BATCH_SIZE) if validation else None,
        None,
        optimizer,
        nn.CrossEntropyLoss(),
        **{"accelerator": "cpu", "progress_bar": False, **kwargs},
    )


class Scores(AbstractCallback):
    """Puts given values into the history, one an epoch; None: nothing in that epoch."""

    def __init__(self, values: list[float | None], name: str = "score") -> None:
        super().__init__("scores")
        self.values = values
        self.name = name

    def on_epoch_end(self) -> None:
        value = self.values[self.train_loop_obj.epoch]
        if value is not None:
            self.train_loop_obj.insert_metric_result_into_history(self.name, value)


class Raises(AbstractCallback):
    """Raises an error in a hook; with ``step``, only where ``global_step`` has this value."""

    def __init__(
        self, error: BaseException, hook: str = "on_batch_end", *, step: int | None = None, order: int = 0
    ) -> None:
        super().__init__("raises", execution_order=order)
        self.error, self.step = error, step
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        if self.step in (None, self.train_loop_obj.global_step):
            raise self.error


class Counts:
    """How many rows there are; and how often it was asked."""

    asked = 0

    def __call__(self, y_pred: Any, y_true: Any, metadata: Any) -> dict[str, Any]:
        self.asked += 1
        return {"rows": len(y_true), "right": float((y_true == y_pred).double().mean())}
