"""A loop on the CPU and a model of plain layers, as many tests need them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn, optim

from trainloop import TrainLoop, TTBasicModel, TTModel

Model = TypeVar("Model", bound=TTModel)


def cpu_loop(
    model: Model, train_loader: Any, optimizer: Any = ..., criterion: Any = ..., **options: Any
) -> TrainLoop[Model]:
    """``TrainLoop`` on the CPU, without a progress bar; by default with plain SGD and cross entropy.

    ``options`` are other arguments of ``TrainLoop``. In the mode ``single``, ``devices`` doesn't count.
    """
    if options.get("gpu_mode") == "single":
        options.pop("devices", None)
    return TrainLoop(
        model,
        train_loader,
        optimizer=optim.SGD(model.parameters(), lr=0.1) if optimizer is ... else optimizer,
        criterion=nn.CrossEntropyLoss() if criterion is ... else criterion,
        **{"accelerator": "cpu", "progress_bar": False, **options},
    )


class Layers(TTBasicModel):
    """Layers that follow each other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
