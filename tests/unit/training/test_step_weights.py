"""Losses with a weight, in one process: where one batch is the step, nothing is multiplied and divided again."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from kit.small_loop import Net, make_loop
from kit.warned import warnings_of
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import MultiLoss, TrainLoop, TTModel
from trainloop.errors import ConfigurationError


class Tagger(TTModel):
    """A loss that is a mean over real tokens, with their number; padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.encode = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        self.decode = nn.Linear(12, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(self.encode(self.embed(tokens)))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        (tokens,) = batch_data
        return criterion(self(tokens).transpose(1, 2), tokens), (tokens != 0).sum()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0]), batch_data[0], {}


def sentences() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (50, 11), generator=generator)
    lengths = torch.randint(2, 12, (50, 1), generator=generator)
    return TensorDataset(tokens * (torch.arange(11) < lengths))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_weighted_loss_is_bit_identical_to_the_loop_by_hand(clip: float | None) -> None:
    torch.manual_seed(0)
    ours = Tagger()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(sentences(), batch_size=8)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    torch.manual_seed(1)
    optimizer, loss_and_weight = optim.AdamW(theirs.parameters(), lr=0.01), reference.by_get_loss(criterion)
    reference.train_accumulated(
        theirs, loader, optimizer, lambda *batch: loss_and_weight(*batch)[0], 2, accumulation=1, max_norm=clip
    )
    torch.manual_seed(1)
    tl = cpu_loop(ours, loader, optim.AdamW(ours.parameters(), lr=0.01), criterion, gradient_clip_norm=clip)
    tl.fit(num_epochs=2)
    assert reference.identical(ours, theirs)


class InPlace(TorchDispatchMode):
    """Count multiplications in place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.mul_
        return func(*args, **(kwargs or {}))


class Counted(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device), (batch_data[1] >= 0).sum()


@pytest.mark.parametrize("ignored, multiplications", [(0, 0), (5, 1)])
def test_gradients_are_not_multiplied_by_one(ignored: int, multiplications: int) -> None:
    x, y = make_data().tensors
    y[:ignored] = -100
    model = Counted()
    loop = cpu_loop(model, DataLoader(TensorDataset(x[:48], y[:48]), 16))
    with InPlace() as found:
        loop.fit(num_epochs=1, grad_accumulation=3)
    assert found.count == multiplications * len(list(model.parameters()))


class Weighted(Net):
    weight: Any = 5.0
    parts = False

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        weight = self.weight if len(batch_data[1]) == 16 else 2 * self.weight
        return MultiLoss({"a": (loss, weight), "b": loss}) if self.parts else (loss, weight)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("weight", [5, np.int64(5), np.float32(5), torch.tensor(5), torch.tensor([5.0])])
def test_a_weight_may_be_any_number(weight: Any, parts: bool) -> None:
    def losses(weight: Any) -> Any:
        torch.manual_seed(0)
        model = Weighted()
        model.weight, model.parts = weight, parts
        loop = cpu_loop(model, loader := DataLoader(make_data(), 16), validation_loader=loader)
        loop.fit(num_epochs=2, grad_accumulation=2)
        return [*loop.history["loss"], *loop.history["val_loss"]]

    assert losses(weight) == pytest.approx(losses(5.0), rel=1e-6)


class Moody(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        return loss if len(batch_data[0]) < 16 else (loss, 1.0)


def test_a_weight_now_and_then_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Return a weight for all batches or for none"):
        make_loop(Moody()).fit(num_epochs=1, grad_accumulation=7)


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25), 5, torch.tensor(1.0)])
def test_a_weight_that_may_be_a_metric_is_warned_of(weight: Any) -> None:
    model = Weighted()
    model.weight = weight
    loop = TrainLoop(model, DataLoader(make_data(), 16), optimizer=optim.SGD(model.parameters(), 0.1))
    loop.criterion = nn.CrossEntropyLoss()
    found = warnings_of(lambda: loop.fit(num_epochs=1), "with the weight 0.25. The weight is the number of units")
    assert len(found) == (float(weight) == 0.25)


class WeighsNothing(Net):
    form = "pair"

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        if self.form == "parts":
            return MultiLoss({"a": (loss, 0), "b": (loss.square(), torch.tensor(0))})
        return loss, torch.tensor([0.0]) if self.form == "tensor" else 0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("form", ["pair", "tensor", "parts"])
def test_a_batch_of_weight_0_has_no_gradient(form: str, accumulation: int) -> None:
    model = WeighsNothing()
    model.form = form
    before = copy.deepcopy(model.state_dict())
    sgd = optim.SGD(model.parameters(), 0.1)
    loop = TrainLoop(model, DataLoader(make_data(), 16), None, None, sgd, nn.CrossEntropyLoss(), accelerator="cpu")
    loop.fit(num_epochs=1, grad_accumulation=accumulation)
    assert reference.identical(model.state_dict(), before)


class Bag(Tagger):
    """The same mean over tokens, with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.embed, self.decode = nn.Embedding(30, 12, sparse=sparse), nn.Linear(12, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decode(self.embed(tokens).tanh())


@pytest.mark.parametrize("accumulation", [1, 3])
def test_sparse_gradients_are_divided_by_the_weight_of_a_step(accumulation: int) -> None:
    found = []
    for sparse in (False, True):
        model = Bag(sparse)
        loader = DataLoader(sentences(), batch_size=4)
        criterion = nn.CrossEntropyLoss(ignore_index=0)
        loop = TrainLoop(model, loader, None, None, optim.SGD(model.parameters(), lr=1.0), criterion, accelerator="cpu")
        loop.fit(num_epochs=1, grad_accumulation=accumulation)
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])
