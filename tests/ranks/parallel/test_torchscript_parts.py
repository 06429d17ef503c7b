"""A model with a TorchScript module in it trains like the model that it was made from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import nn


class Deep(Net):
    def __init__(self, *, scripted: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        hidden = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.hidden: Any = torch.jit.script(hidden) if scripted else hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.hidden(x))


def loop_of(scripted: bool, mode: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return make_loop(Deep(scripted=scripted), gpu_mode=mode, **kwargs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("mode", "devices"), [("single", 1), ("dp", 1), ("dp", 2), ("ddp", 1), ("ddp", 2)])
def test_it_trains_as_the_plain_module(mode: str, devices: int) -> None:
    plain, scripted = (loop_of(kind, mode, devices=devices) for kind in (False, True))
    for loop in (plain, scripted):
        loop.fit(num_epochs=2)
    assert scripted.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-5)
    assert scripted.history["val_loss"] == pytest.approx(plain.history["val_loss"], rel=1e-5)
    torch.testing.assert_close(scripted.model.state_dict(), plain.model.state_dict())
