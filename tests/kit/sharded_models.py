"""Models for sharding: repeated blocks, tied, frozen and scalar parameters, several losses, losses that are yielded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from trainloop.model import TTModel
from trainloop.optim import MultiLoss

CPU = torch.device("cpu")
# The loop refuses fsdp on the CPU with an older one, see tests/unit/arguments/test_arguments.py.
needs_fsdp_on_cpu = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.10"), reason="fsdp on the CPU needs PyTorch 2.10"
)
FSDP = pytest.param("fsdp", marks=needs_fsdp_on_cpu)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, size + 3)
        self.down = nn.Linear(size + 3, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(TTModel):
    """Words to hidden, blocks, and back to words by the same weights; sizes divide by no number of ranks."""

    def __init__(self, seed: int = 0, words: int = 11, size: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(3)])
        self.head = nn.Linear(size, words)
        self.head.weight = self.words.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].up.weight.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x).mean(1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.temperature

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        # A parameter used beside any forward, and forward called twice.
        return criterion(self(x), y) + criterion(self(x + 1), y) + 1e-3 * self.head.bias.square().sum()

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        x, y = batch_data
        return self(x), y, {"row": [f"row {label}" for label in y.tolist()]}


class Weighted(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        units = y.to(self.head.bias.dtype) + 1
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return (losses * units).sum() / units.sum(), units.sum()


class Normed(Tower):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.words(x).mean(1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.temperature


class Hollow(Tower):
    """Has parameters without elements, in a block and outside: of an adapter of rank 0, say."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.blocks[0].narrow = nn.Parameter(torch.empty(3, 0))
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum() + self.blocks[0].narrow.sum()


class OneRow(Tower):
    """Has a matrix of one row, which torch can't divide evenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale(self.words(x).mean(1))


class TwoLosses(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        hidden = self.blocks[0](self.words(x).mean(1))
        return MultiLoss({"words": hidden.square().mean(), "rest": criterion(self(x), y)}, {"words": 0, "rest": 1})


class Yielding(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Iterator[Any]:
        x, y = batch_data
        yield 0, self.blocks[0](self.words(x).mean(1)).square().mean()
        yield 1, criterion(self(x), y)


def words(seed: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10, (size, 4), generator=generator), torch.randint(0, 10, (size,), generator=generator)
