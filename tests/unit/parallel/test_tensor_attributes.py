"""Attributes that code sets on parameters and buffers (``weight._no_weight_decay = True``), in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel

X = torch.randn(27, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True))
MODES = [("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2)]


class Decays(TTBasicModel):
    """Its loss decays the parameters that are not marked; a buffer is marked, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
        self.register_buffer("one", torch.ones((), dtype=torch.float64))
        self.first.weight._rate = 0.5  # type: ignore[assignment]
        for layer in (self.first, self.last):
            layer.bias._no_weight_decay = True  # type: ignore[assignment]
        vars(self.one)["factor"] = 0.1

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh())

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        decayed = [p for p in self.parameters() if not hasattr(p, "_no_weight_decay")]
        penalty = sum(p.square().sum() for p in decayed)
        return super().get_loss(batch_data, criterion, device) + vars(self.one)["factor"] * self.one * penalty


class Rates(AbstractCallback):
    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        for p in self.train_loop_obj.model.parameters():
            if p.grad is not None:
                p.grad.mul_(getattr(p, "_rate", 1.0))

    def on_after_optimizer_step(self) -> None:
        weight = self.train_loop_obj.model.last.weight
        weight.steps = getattr(weight, "steps", 0) + 1


def made(mode: str, ranks: int) -> TrainLoop[Any]:
    model = Decays()
    devices = {} if mode == "single" else {"devices": ranks}
    batches = DataLoader(ROWS, batch_size=6 // (ranks if mode in ("ddp", "fsdp") else 1))
    sgd = optim.SGD(model.parameters(), lr=0.05)
    return cpu_loop(model, batches, sgd, nn.MSELoss(), gpu_mode=mode, **devices)


def by_hand() -> Decays:
    model = Decays()
    sgd = optim.SGD(model.parameters(), lr=0.05)
    for batch in DataLoader(ROWS, batch_size=6):
        sgd.zero_grad()
        model.get_loss(batch, nn.MSELoss(), torch.device("cpu")).backward()
        model.first.weight.grad.mul_(0.5)
        sgd.step()
    return model


@pytest.mark.long
@pytest.mark.parametrize(("mode", "ranks"), MODES, ids=[mode for mode, _ in MODES])
def test_get_loss_and_callbacks_read_the_attributes_of_parameters(mode: str, ranks: int) -> None:
    tl = made(mode, ranks)
    tl.fit(num_epochs=1, callbacks=[Rates("rates")])
    torch.testing.assert_close(list(tl.model.parameters()), list(by_hand().parameters()), rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "ranks"), MODES, ids=[mode for mode, _ in MODES])
def test_an_attribute_that_a_callback_sets_comes_back_and_is_there_in_the_next_fit(mode: str, ranks: int) -> None:
    tl = made(mode, ranks)
    tl.fit(num_epochs=1, callbacks=[Rates("rates")])
    assert tl.model.last.weight.steps == 5
    tl.fit(num_epochs=1, callbacks=[Rates("rates")])
    assert tl.model.last.weight.steps == 10
    assert tl.model.first.weight._rate == 0.5


class Marked(Decays):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        assert self.last.bias._no_weight_decay
        assert vars(self.one)["factor"]
        return super().get_loss(batch_data, criterion, device)


def test_tools_that_try_out_a_loop_copy_the_attributes() -> None:
    tl = made("single", 1)
    tl.model.__class__ = Marked  # its assertion fails in a copy without the attributes
    assert tl.find_lr().rates
