"""The parts that move when a model moves to its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.train_loop.run.placement import move_state

META = torch.device("meta")


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizer_state_goes_where_torchs_own_loading_puts_it(options: dict[str, Any]) -> None:
    """The reference is ``Optimizer.load_state_dict`` over parameters that are on the device already."""
    layer = nn.Linear(2, 2)
    optimizer = optim.AdamW(layer.parameters(), **options)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    there = nn.Linear(2, 2, device=META)
    reference = optim.AdamW(there.parameters(), **{**options, "fused": None})
    for group in reference.param_groups:
        group.update(options)
    reference.load_state_dict(optimizer.state_dict())
    move_state(optimizer, META)
    for own, expected in zip(layer.parameters(), there.parameters(), strict=True):
        moved, loaded = optimizer.state[own], reference.state[expected]
        assert {name: value.device for name, value in moved.items()} == {n: v.device for n, v in loaded.items()}
    scalar = nn.Parameter(torch.ones((), device=META))  # as of fsdp, whose parameters are where they are stepped
    scaling = optim.AdamW([scalar])
    scaling.param_groups[0].update(options)
    scaling.state[scalar] = {"step": torch.tensor(1.0), "exp_avg": torch.tensor(0.5)}
    move_state(scaling)
    counter = META if options.get("fused") else torch.device("cpu")
    assert {name: value.device for name, value in scaling.state[scalar].items()} == {"step": counter, "exp_avg": META}


class Line(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, dtype=torch.float64)
        self.second = nn.Linear(2, 2, dtype=torch.float64)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


@pytest.mark.parametrize("mode", ["single", "dp"])
def test_a_model_keeps_its_parameters_where_conversions_overwrite_them(mode: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 2, dtype=torch.float64)
    torch.manual_seed(1)
    reference = Line()
    optimizer = optim.SGD(reference.parameters(), 0.1)
    nn.functional.mse_loss(reference(x), y).backward()
    optimizer.step()
    torch.manual_seed(1)
    model = Line()
    loop = cpu_loop(model, DataLoader(TensorDataset(x, y), 8), criterion=nn.MSELoss(), gpu_mode=mode, devices=2)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        loop.fit(num_epochs=1)
        assert torch.__future__.get_overwrite_module_params_on_conversion()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert model.second.weight is model.first.weight
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=0, atol=1e-12)
