"""A classifier of rows in dict batches, and its hand-written loop: what the entries about loaders train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from world import Items, Parts, plain, randint, randn

from trainloop import TTModel

TRAIN, HELD_OUT = 37, 11


class Rows(TTModel):
    """Batches are dicts of columns ``x`` and ``y``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1).double())

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return F.cross_entropy(self(batch_data["x"]), batch_data["y"])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data["x"]), batch_data["y"], {}


by_hand = plain(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))


def columns(number: int) -> dict[str, Any]:
    return {"x": randn(number, 6, seed=number).tolist(), "y": randint(3, number, seed=number).tolist()}


def items(number: int) -> Items:
    table = columns(number)
    return Items([{"x": torch.tensor(x), "y": y} for x, y in zip(table["x"], table["y"])])


def parts_of(train: Any, held_out: Any) -> Parts:
    model = Rows().double()
    return Parts(model, train, optim.Adam(model.parameters(), lr=0.01), held_out)
