"""Small models whose get_loss does what a wrapper must cope with, and how far two sets of gradients are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainloop.model import TTModel
from trainloop.optim import MultiLoss

CPU = torch.device("cpu")


class Net(TTModel):
    """Its ``get_loss`` calls submodules directly, forward twice, and one of them outside forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.encoder.weight
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x))) * self.scale

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        direct = self.head(torch.relu(self.tied(x)))
        penalty = sum(p.square().sum() for p in self.head.parameters())
        return criterion(self(x), y) + criterion(self(x + 1), y) + criterion(direct, y) + 1e-3 * penalty

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        x, y = batch_data
        return self(x).argmax(1), y, {"row": [f"row {label}" for label in y.tolist()], "fixed": 3}


class WithUnused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.tied = self.encoder[0]


class Weighted(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        units = y + 1
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return (losses * units).sum() / units.sum(), units.sum()


class TwoLosses(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        losses = {"whole": criterion(self(x), y), "head": criterion(self.head(torch.relu(self.tied(x))), y)}
        return MultiLoss(losses, {"whole": 0, "head": 0})


def batch_of(seed: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def furthest(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> float:
    """The largest difference; infinite where one has a gradient and the other has none."""
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def total_of(output: Any) -> Tensor:
    """The one loss to go backward from."""
    if isinstance(output, MultiLoss):
        return output.total()
    return output[0] if isinstance(output, tuple) else output
