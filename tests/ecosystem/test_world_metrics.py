"""torchmetrics inside the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from world import Entry, Parts, in_all_modes, loaders, plain, randint, randn

from trainloop import TTModel

TRAIN, HELD_OUT = 37, 11


class Measured(TTModel):
    """A metric with state, a submodule as Lightning's users have it; its state is part of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(6, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.accuracy.persistent(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        output = self(x)
        self.log("accuracy", (output.argmax(1) == y).double().mean())
        return criterion(output, y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        output = self(x)
        self.accuracy.update(output, y)
        return output, y, {}

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        if self.accuracy.update_called:
            self.log("metric", self.accuracy.compute())  # of all ranks, by torchmetrics' own exchange
            self.accuracy.reset()


def make_measured(batch: int, shuffle: bool) -> Parts:
    model = Measured().double()
    train, held_out = (TensorDataset(randn(n, 6, seed=n), randint(3, n, seed=n)) for n in (TRAIN, HELD_OUT))
    return Parts(
        model,
        optimizer=optim.Adam(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        **loaders(train, held_out, batch, shuffle),
    )


test_single, test_ddp = in_all_modes(
    Entry("torchmetrics", make_measured, plain(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))),
)
