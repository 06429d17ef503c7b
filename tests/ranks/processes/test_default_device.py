"""torch.set_default_device: ranks have the caller's setting, and tensors of exchanges name their own device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainloop
from trainloop import TTModel

# Functions of torch that create tensors on the default device.
CREATE = set(
    "arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm"
    " scalar_tensor sparse_coo_tensor tensor zeros".split()
)
NO_EXCHANGES = {"pretrained", "tabular"}


def test_every_tensor_is_created_on_a_device_that_is_named() -> None:
    package = Path(trainloop.__file__).parent
    wrong = []
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] in NO_EXCHANGES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "torch"
                and node.func.attr in CREATE
                and all(keyword.arg != "device" for keyword in node.keywords)
            ):
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1, device="cpu")

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return criterion(self.linear(batch_data[0]), batch_data[1])

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self.linear(batch_data[0]), batch_data[1], {}


def trained(mode: str) -> torch.Tensor:
    model = Net()
    data = TensorDataset(torch.arange(80.0, device="cpu").reshape(20, 4) / 80, torch.ones(20, 1, device="cpu"))
    loop = cpu_loop(
        model,
        DataLoader(data, 4),
        criterion=nn.MSELoss(),
        validation_loader=DataLoader(data, 4),
        gpu_mode=mode,
        devices=2,
    )
    loop.fit(num_epochs=2)
    return model.linear.weight.detach()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp"])
def test_a_run_does_not_use_the_default_device(mode: str) -> None:
    expected = trained(mode)
    torch.set_default_device("meta")
    try:
        weights = trained(mode)
    finally:
        torch.set_default_device(None)
    assert torch.equal(weights, expected)
