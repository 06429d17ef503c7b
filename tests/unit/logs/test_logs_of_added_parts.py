"""Logs of a module that comes into the model, or is in the criterion, while a loop runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel

X = torch.arange(32, dtype=torch.float32).reshape(8, 4) / 32


class Part(TTBasicModel):
    """Logs the number that it was made with."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.fc, self.number = nn.Linear(4, 1), number

    def forward(self, x: Any) -> Any:
        self.log("number", self.number)
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        raise NotImplementedError


class Net(Part):
    def __init__(self) -> None:
        super().__init__(0)
        self.part: nn.Module = Part(1)

    def forward(self, x: Any) -> Any:
        return self.part(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return criterion(self(batch_data[0]), batch_data[1])


class Loss(Part):
    def __init__(self) -> None:
        super().__init__(7)

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        self.log("of the criterion", 7)
        return (y_pred - y).square().mean()


def fitted(hook: str, make: Any, epochs: int = 3, **options: Any) -> TrainLoop[Any]:
    class Replaces(AbstractCallback):
        def replace(self, *_: Any) -> None:
            model = self.train_loop_obj.model
            if self.train_loop_obj.epoch == 1 and model.part.number == 1:
                model.part = make(model.part)

    setattr(Replaces, hook, Replaces.replace)
    data = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), 4)
    net = Net()
    loop: TrainLoop[Any] = cpu_loop(net, data, criterion=Loss(), validation_loader=data, **options)
    loop.fit(num_epochs=epochs, callbacks=[Replaces()])
    return loop


def copied(part: Part) -> Part:
    found = copy.deepcopy(part)
    found.number = 2
    return found


@pytest.mark.parametrize("make", [lambda part: Part(2), copied], ids=["new", "copied"])
@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize(
    ("hook", "of_training", "of_evaluation"),
    [
        ("on_epoch_begin", [1, 2, 2], [1, 2, 2]),
        ("on_batch_begin", [1, 2, 2], [1, 2, 2]),
        ("on_batch_end", [1, 1.5, 2], [1, 2, 2]),
        ("on_evaluation_begin", [1, 1, 2], [1, 2, 2]),
    ],
)
def test_a_part_that_a_hook_has_made_logs(
    mode: str, hook: str, of_training: list[float], of_evaluation: list[float], make: Any
) -> None:
    loop = fitted(hook, make, gpu_mode=mode, **({"devices": 2} if mode == "dp" else {}))
    assert loop.history["number"] == of_training
    assert loop.history["val_number"] == of_evaluation


def test_a_criterion_logs() -> None:
    assert fitted("on_epoch_end", copied, epochs=1).history["of the criterion"] == [7]


def test_after_fit_no_part_logs_into_the_loop() -> None:
    loop = fitted("on_batch_begin", copied)
    before = list(loop.history["number"])
    loop.model(X)
    assert loop.history["number"] == before
    assert not any(part.__dict__.get("_log_sink") for part in loop.model.modules())
