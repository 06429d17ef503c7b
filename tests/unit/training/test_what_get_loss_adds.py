"""A head that get_loss itself adds, with its parameter group: as by hand in one process, otherwise a named error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.errors import ConfigurationError, TrainLoopError

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True) ** 2)
NORM = 0.1


class Grows(TTBasicModel):
    """Adds a head in the third call, to itself and to the optimizer of its loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)
        self.calls = 0
        self.optimizer = optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Any) -> Tensor:
        features = torch.tanh(self.body(x))
        found: Tensor = self.head(features)
        return found + self.more(features) if hasattr(self, "more") else found

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.more = nn.Linear(8, 1, dtype=torch.float64)
            with torch.no_grad():
                for p in self.more.parameters():
                    p.fill_(0.5)
            self.optimizer.add_param_group({"params": list(self.more.parameters())})
        x, y = batch_data
        loss: Tensor = nn.functional.mse_loss(self(x), y)
        return loss


def by_hand(accumulation: int) -> Grows:
    model, batches = Grows(), list(DataLoader(ROWS, 8))
    for first in range(0, len(batches), accumulation):
        model.optimizer.zero_grad()
        for batch in batches[first : first + accumulation]:
            (model.get_loss(batch, None, None) / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        model.optimizer.step()
    return model


def trained(accumulation: int = 1, **options: Any) -> Grows:
    model = Grows()
    loop = cpu_loop(model, DataLoader(ROWS, 8), model.optimizer, None, gradient_clip_norm=NORM, **options)
    return loop.fit(num_epochs=1, grad_accumulation=accumulation)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_the_norm_includes_the_gradients_of_its_first_step(accumulation: int) -> None:
    expected = dict(by_hand(accumulation).named_parameters())
    for name, p in trained(accumulation).named_parameters():
        assert torch.equal(p, expected[name]), name


def test_replicas_would_lose_it() -> None:
    with pytest.raises(ConfigurationError, match="gpu_mode='dp': more is registered"):
        trained(gpu_mode="dp", devices=2)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_with_different_weights_of_it_are_an_error(mode: str) -> None:
    with pytest.raises(TrainLoopError, match=r"the ranks' weights differ: more\.weight"):
        trained(gpu_mode=mode, devices=2)
