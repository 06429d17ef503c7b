"""A trained model in a program without this library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from torch import Tensor, nn

from trainloop import ModelWrap, TTBasicModel


class Net(TTBasicModel):
    """With branches, and with attributes that TTModel declares set on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.loss_reduction = "mean"
        self.carried_state = {"hidden": 1}
        self.hidden = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(0) > 2:
            x = x * 2
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        self.log("mean", x.mean())
        return criterion(self(x), y)


class Feed:
    def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(model(batch_data[0]), batch_data[1])

    def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> Any:
        return model(batch_data[0]), batch_data[1], {}


def trained(model: Any) -> Any:
    return make_loop(model).fit(num_epochs=1).eval()


def test_any_model_can_be_scripted_before_and_after_training() -> None:
    x = torch.randn(5, 8)
    inner = nn.Sequential(nn.Linear(8, 3))
    for model in (Net(), ModelWrap(inner, Feed())):
        for ready in (model, trained(model)):
            scripted = torch.jit.script(ready)
            for rows in (5, 1):  # both branches
                assert torch.equal(scripted(x[:rows]), ready(x[:rows]))


LOADS = """
import sys
sys.modules["trainloop"] = None  # an import of it fails
import torch
from torch import nn
inputs, expected = torch.load("rows.pt", weights_only=True)
class Served(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
    def forward(self, x):
        return self.fc(x * 2)
plain = Served()
plain.load_state_dict(torch.load("weights.pt", weights_only=True))
for served in (plain, torch.jit.load("traced.ts"), torch.jit.load("scripted.ts"), torch.export.load("e.pt2").module()):
    assert torch.allclose(served(inputs), expected), served
print("served")
"""


@pytest.mark.long
def test_all_forms_load_where_this_library_is_missing(tmp_path: Path) -> None:
    model, x = trained(Net()), torch.randn(5, 8)
    torch.save((x, model(x).detach()), tmp_path / "rows.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.warns(torch.jit.TracerWarning):  # of the branch
        torch.jit.trace(model, x).save(str(tmp_path / "traced.ts"))
    torch.jit.script(model).save(str(tmp_path / "scripted.ts"))
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "e.pt2")
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "served\n", done.stderr
