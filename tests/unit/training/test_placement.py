"""The parts that move when a model moves to its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

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
