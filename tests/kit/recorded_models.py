"""Models and data whose steps are recorded: they draw from all random generators, so a replay has to put all back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainloop import TTBasicModel


class Broken(Exception):
    pass


class Noisy(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape) * random.random() * np.random.rand()
        result: Tensor = self.layers(x + noise.to(x))
        return result

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self.checked(x, criterion(self(x), y))

    def checked(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return the loss; for a batch with a bad sample, whose first value is 0, do what the test is about."""
        raise NotImplementedError


class CarriesHidden(Noisy):
    """To be a base beside another :class:`Noisy`."""

    carried_state = {"hidden": 1}

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(1, 6)
        self.hidden = (0.5 * self.hidden + x.mean(0, keepdim=True)).detach()
        return super().forward(x + self.hidden)


class HasCritic(Noisy):
    """Alternating: the second loss is checked, after the first one's optimizer has stepped."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(6, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Iterator[Any]:
        x, y = batch_data
        noise = torch.randn(x.shape)
        yield "critic", (self.critic(x) - self.critic(noise)).mean()
        loss = criterion(self(x), y) + self.critic(noise + torch.rand(1)).mean() * self.layers[0].weight.sum()
        yield "net", self.checked(x, loss)


class Augmented(TensorDataset):
    """Augmentation in the main process, from all generators."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return (x if x[0] == 0 else x + 0.1 * torch.randn(6) * random.random() * np.random.rand()), y
