"""checkpoint_modules: the same numbers, less kept, and no trace of what is computed twice."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.errors import ConfigurationError
from trainloop.train_loop.run.recompute import chosen_modules, recomputing


class Block(TTBasicModel):
    """With all that a second computation could show by: a draw, running statistics, a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.log("calls", 1.0, reduce="sum")
        return x + self.layers(x)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Watches(AbstractCallback):
    def on_epoch_end(self) -> None:
        model = self.train_loop_obj.model
        assert isinstance(model.blocks[0], Block)
        assert type(copy.deepcopy(model.blocks[0])) is Block
        torch.save(model, io.BytesIO())


def trained(choice: Any, **arguments: Any) -> TrainLoop[Net]:
    model = Net()
    loop = TrainLoop(
        model,
        DataLoader(make_data(), 16),
        DataLoader(make_data(33), 16),
        None,
        optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        accelerator="cpu",
        seed=1,
        progress_bar=False,
        checkpoint_modules=choice,
        **arguments,
    )
    loop.fit(num_epochs=2, callbacks=[Watches()])
    return loop


@pytest.mark.long(every=2)
@pytest.mark.parametrize(
    "mode", [{}, {"gpu_mode": "dp", "devices": 2}, {"use_amp": "bf16"}], ids=["single", "dp", "amp"]
)
@pytest.mark.parametrize(
    "choice", [Block, "blocks.*", [nn.Linear, "blocks.1"], lambda name, module: name == "blocks.2"]
)
def test_numbers_are_the_same(choice: Any, mode: dict[str, Any]) -> None:
    plain, lean = trained(None, **mode), trained(choice, **mode)
    expected, found = plain.model.state_dict(), lean.model.state_dict()
    assert list(expected) == list(found)
    if mode.get("gpu_mode") == "dp":  # replicas draw their dropout in threads
        assert torch.equal(
            expected["blocks.0.layers.1.num_batches_tracked"], found["blocks.0.layers.1.num_batches_tracked"]
        )
    else:
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
        assert plain.history["loss"] == lean.history["loss"]
    assert plain.history["calls"] == lean.history["calls"]  # computed twice, logged once
    assert {type(module) for module in lean.model.modules()} == {type(module) for module in plain.model.modules()}


class Penalised(Net):
    """Its loss has a penalty on gradients, so that two backward passes recompute a module."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        x = x.requires_grad_()
        with torch.enable_grad():
            out = self(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return criterion(out, y) + slope.square().mean()


def test_a_penalty_on_gradients_is_the_same() -> None:
    states = []
    for choice in (None, Block):
        model = Penalised().double()
        data = make_data()
        tensors = torch.utils.data.TensorDataset(data.tensors[0].double(), data.tensors[1])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        loop = TrainLoop(
            model,
            DataLoader(tensors, 16),
            None,
            None,
            optimizer,
            nn.CrossEntropyLoss(),
            checkpoint_modules=choice,
            progress_bar=False,
        )
        torch.manual_seed(1)
        loop.fit(num_epochs=2)
        states.append((model.state_dict(), loop.history["calls"]))
    (expected, calls), (found, again) = states
    assert all(torch.allclose(value, found[name], atol=1e-12) for name, value in expected.items())
    assert calls == again


def test_less_is_kept() -> None:
    model, x, kept = Net(), make_data().tensors[0], []
    for choice in (None, Block):
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with recomputing(model, choice), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


def test_which_modules_are_meant() -> None:
    model = Net()
    blocks = list(model.blocks)
    assert chosen_modules(model, Block) == chosen_modules(model, "blocks.*") == blocks
    assert chosen_modules(model, [Block, nn.Linear]) == [*blocks, model.head]  # none inside another one
    assert chosen_modules(model, None) == []
    for wrong, words in {
        "block.*": "no module of Net matches 'block",
        nn.LSTM: "matches LSTM",
        3: "must be a module class",
    }.items():
        with pytest.raises(ConfigurationError, match=words):
            TrainLoop(model, None, checkpoint_modules=wrong)
