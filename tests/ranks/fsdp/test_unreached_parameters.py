"""Losses that reach other parameters on other ranks: fsdp equals one process, or names a unit of only some ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import needs_fsdp_on_cpu
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import WorkerFailedError

pytestmark = [pytest.mark.long, needs_fsdp_on_cpu]
EPOCHS, SIZE = 2, 4


class Heads(TTBasicModel):
    """Two heads, of which a batch uses that of its first row, and a layer that no batch uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body, self.unused = nn.Linear(4, 6), nn.Linear(6, 4)
        heads = nn.Linear(6, 4), nn.Linear(6, 4)
        self.heads = nn.ModuleList(heads) if kind == "units" else nn.ModuleDict(dict(zip("lr", heads, strict=True)))
        self.scale = nn.Parameter(torch.tensor(0.5))  # not sharded, as it is a single number
        self.heads["l" if kind != "units" else 0].bias.requires_grad_(kind != "frozen")  # type: ignore[index]
        self.double()

    def forward(self, x: Tensor, left: bool) -> Tensor:
        head = list(self.heads.children())[not left]
        y = head(torch.tanh(self.body(x)))
        return y * self.scale if left and self.kind == "scalar" else y

    def loss(self, x: Tensor, is_left: Tensor) -> Tensor:
        left = bool(is_left[0])
        if self.kind != "forces":
            return ((self(x, left) - x) ** 2).mean()
        inputs = x.detach().requires_grad_()
        y = self(inputs, left)
        (forces,) = torch.autograd.grad(y.sum(), inputs, create_graph=True)
        return (forces**2).mean() + (y**2).mean()

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        return self.loss(*batch_data)

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        x, is_left = batch_data
        return self(x, bool(is_left[0])), x, {}


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor, adapts: bool) -> Tensor:
        y = torch.tanh(self.layer(x))
        return y + self.adapter(x) if adapts else y


class Optional(Heads):
    """Frozen units with a trained adapter, and a root with a head, which only some batches use."""

    def __init__(self) -> None:
        super().__init__("optional")
        self.blocks = nn.ModuleList([Adapter(), Adapter()])
        self.requires_grad_(False)
        for part in (self.heads, *(block.adapter for block in self.blocks)):
            part.requires_grad_(True)
        self.start = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.double()

    def loss(self, x: Tensor, is_left: Tensor) -> Tensor:
        left = bool(is_left[0])
        y = self.start(x)
        for block in self.blocks:
            y = block(y, left)
        return (y - x).square().mean() + (self.heads["l"](torch.tanh(self.body(y))).square().mean() if left else 0.0)


def _data(length: int) -> TensorDataset:
    draws = torch.Generator(device="cpu").manual_seed(length)
    x = torch.randn(length, 4, generator=draws, dtype=torch.float64, device="cpu")
    return TensorDataset(x, torch.rand(length, generator=draws, device="cpu") < 0.5)


def _optimizer(model: nn.Module) -> optim.Optimizer:
    # Its decay changes parameters whose gradients are zeros, rather than None.
    return optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def _trained(model: Heads, data: TensorDataset, ranks: int, accumulation: int, callbacks: Any = ()) -> list[Tensor]:
    loop = cpu_loop(model, DataLoader(data, SIZE), _optimizer(model), None, gpu_mode="fsdp", devices=ranks)
    loop.fit(num_epochs=EPOCHS, grad_accumulation=accumulation, callbacks=list(callbacks))
    return list(model.parameters())


def _by_hand(model: Heads, data: TensorDataset, ranks: int, accumulation: int) -> list[Tensor]:
    optimizer = _optimizer(model)
    of_ranks = [range(len(data))[rank::ranks] for rank in range(ranks)]
    batches = [[own[i : i + SIZE] for i in range(0, len(own), SIZE)] for own in of_ranks]
    for first in list(range(0, max(map(len, batches)), accumulation)) * EPOCHS:
        step = [data[list(batch)] for own in batches for batch in own[first : first + accumulation]]
        total = sum(len(x) for x, _ in step)
        optimizer.zero_grad()
        torch.stack([model.loss(*batch) * len(batch[0]) / total for batch in step]).sum().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("kind", ["heads", "scalar", "frozen", "forces"])
@pytest.mark.parametrize("ranks, accumulation, length", [(2, 1, 48), (3, 2, 50)])
def test_ranks_may_reach_other_parameters(kind: str, ranks: int, accumulation: int, length: int) -> None:
    data = _data(length)
    trained = _trained(Heads(kind), data, ranks, accumulation)
    torch.testing.assert_close(trained, _by_hand(Heads(kind), data, ranks, accumulation), rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks, accumulation, length", [(2, 1, 48), (3, 2, 50)])
def test_only_some_ranks_may_reach_the_trained_parameters_of_a_unit(ranks: int, accumulation: int, length: int) -> None:
    data = _data(length)
    trained = _trained(Optional(), data, ranks, accumulation)
    torch.testing.assert_close(trained, _by_hand(Optional(), data, ranks, accumulation), rtol=0, atol=1e-12)


def test_ranks_that_run_other_units_are_an_error_before_the_step(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"depend on heads\.0\.bias, .*'shard': \[Block\]\}"):
        _trained(Heads("units"), _data(48), 2, 1, [ModelCheckpoint(tmp_path)])
    assert not list(tmp_path.glob("checkpoint*"))


def test_ranks_that_run_units_in_another_order_are_an_error() -> None:
    rows = torch.arange(32, device="cpu")
    rank, batch = rows % 2, rows // 2 // SIZE
    data = TensorDataset(_data(32).tensors[0], (rank + batch) % 2 == 0)  # in each step, each rank uses both heads
    with pytest.raises(WorkerFailedError, match=r"in another order than those of other ranks, .*'shard': \[Block\]\}"):
        _trained(Heads("units"), data, 2, 2)


@pytest.mark.parametrize("method", ["evaluate", "predict_with_model"])
def test_ranks_that_evaluate_with_other_units_are_an_error(method: str) -> None:
    """Units of one size would be mixed: each rank would evaluate with a half of each head."""
    data = TensorDataset(_data(16).tensors[0], torch.arange(16, device="cpu") // SIZE % 2 == 0)
    loop = cpu_loop(Heads("units"), None, None, None, gpu_mode="fsdp", devices=2)
    with pytest.raises(WorkerFailedError, match=r"in an evaluation, some ranks .*'shard': \[Block\]\}"):
        getattr(loop, method)(DataLoader(data, SIZE))


class Experts(Heads):
    """Trains both heads, but evaluates with one."""

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return sum(super(Experts, self).forward(x, one) for one in ([True, False] if self.training else [left]))


def test_copies_of_a_sharded_model_may_evaluate_with_other_units() -> None:
    """Only the ranks of one copy exchange parameters."""
    data = TensorDataset(_data(32).tensors[0], torch.arange(32, device="cpu") // SIZE % 4 < 2)
    losses = []
    for ranks in (1, 4):
        model = Experts("units")
        train, val = DataLoader(data, 32 // ranks), DataLoader(data, SIZE)
        mode = {"gpu_mode": "fsdp", "devices": ranks} if ranks > 1 else {}
        loop = cpu_loop(model, train, _optimizer(model), None, validation_loader=val, **mode)
        loop.fit(num_epochs=2, fsdp_model_args={"replicas": 2} if mode else None)
        losses.append(loop.history["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
