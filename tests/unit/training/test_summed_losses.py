"""Losses that are sums over samples: recognised, and the same in every mode; here in one process."""

from __future__ import annotations

import copy
import functools
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from conftest import make_data
from trainloop import ModelWrap, MultiLoss, TrainLoop, TTBasicModel
from trainloop._support.reduction import adds_samples, in_place_of, sum_rule
from trainloop.data.batch_model_feed_defs import AbstractModelFeedDefinition
from trainloop.errors import ConfigurationError


class VAE(TTBasicModel):
    """pytorch/examples, vae/main.py, without its noise: a reconstruction and the divergence, both sums."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Any:
        mu, logvar = self.encode(x).chunk(2, 1)
        return torch.sigmoid(self.decode(mu + torch.exp(0.5 * logvar))), mu, logvar

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x = batch_data[0].sigmoid()
        drawn, mu, logvar = self(x)
        return criterion(drawn, x) - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class Parts(VAE):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x = batch_data[0].sigmoid()
        drawn, mu, logvar = self(x)
        divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return MultiLoss({"drawn": criterion(drawn, x), "divergence": divergence})


class Divided(VAE):
    """Its criterion is a sum, but its loss is a mean."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device) / len(batch_data[0])


class ByHand(VAE):
    """No criterion: the model says it."""

    loss_reduction = "sum"

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, functools.partial(F.binary_cross_entropy, reduction="sum"), device)


class Yielding(VAE):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield super().get_loss(batch_data, criterion, device)


BCE = nn.BCELoss(reduction="sum")
KINDS = [(VAE, BCE), (Parts, BCE), (Divided, BCE), (ByHand, None), (Yielding, BCE)]


def loss_by_hand(model: VAE, x: Tensor) -> Tensor:
    x = x.sigmoid()
    drawn, mu, logvar = model(x)
    return F.binary_cross_entropy(drawn, x, reduction="sum") - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@pytest.mark.long(every=2)
@pytest.mark.parametrize(("kind", "criterion"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("mode", ["single", "accumulated", "dp"])
def test_equals_the_loop_by_hand(kind: Any, criterion: Any, mode: str) -> None:
    torch.manual_seed(0)
    ours = kind().double()
    theirs = copy.deepcopy(ours)
    batches = [(x.double(), y) for x, y in DataLoader(make_data(), batch_size=24)]
    optimizer = optim.Adam(theirs.parameters(), lr=0.01)
    losses, validation = [], 0.0
    for _ in range(2):
        total = 0.0
        for x, _ in batches:
            loss = loss_by_hand(theirs, x)
            total += loss.item()
            (loss / len(x) if kind is Divided else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total / 101)
        validation = sum(loss_by_hand(theirs, x).item() for x, _ in batches) / 101
    if mode == "accumulated":
        loader: Any = [(x[i : i + 5], y[i : i + 5]) for x, y in batches for i in range(0, len(x), 5)]  # 5 5 5 5 4, 5
    else:
        loader = batches
    tl = cpu_loop(
        ours,
        loader,
        optim.Adam(ours.parameters(), lr=0.01),
        criterion,
        validation_loader=batches,
        gpu_mode="dp" if mode == "dp" else "single",
        devices=3 if mode == "dp" else "auto",
    )
    tl.fit(num_epochs=2, grad_accumulation=5 if mode == "accumulated" else 1)
    difference = reference.largest_difference(ours, theirs)
    assert difference <= (0.0 if mode == "single" and kind is not Parts else 1e-12)
    assert tl.history["loss"] == pytest.approx(losses, rel=1e-9)  # a mean over samples, whatever the loss is
    assert tl.history["val_loss"][-1] == pytest.approx(validation, rel=1e-9)


class SumAndMean(VAE):
    """The criterion's sum, a mean of its own, and a mean over units of its own, which get_loss yields or returns."""

    def losses(self, x: Tensor, criterion: Any) -> dict[str, Any]:
        drawn, mu, _ = self(x)
        return {"drawn": criterion(drawn, x), "mu": 0.1 * mu.square().mean(), "out": (drawn.square().mean(), len(x))}

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return MultiLoss(self.losses(batch_data[0].sigmoid(), criterion))


class YieldsBoth(SumAndMean):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x = batch_data[0].sigmoid()
        for _ in range(2):
            yield "drawn", self.losses(x, criterion)["drawn"] / len(x)
        yield "mu", self.losses(x, criterion)["drawn"]


class DeclaresSums(SumAndMean):
    loss_reduction = "sum"

    def losses(self, x: Tensor, criterion: Any) -> dict[str, Any]:
        return {**super().losses(x, criterion), "mu": self(x)[1].square().sum()}


@pytest.mark.parametrize("mode", ["accumulated", "dp"])
@pytest.mark.parametrize("kind", [SumAndMean, DeclaresSums])
def test_sums_and_means_of_one_multiloss(kind: Any, mode: str) -> None:
    torch.manual_seed(0)
    ours = kind().double()
    theirs = copy.deepcopy(ours)
    whole = [(x.double(), y) for x, y in DataLoader(make_data(), batch_size=24)]
    optimizer = optim.SGD(theirs.parameters(), lr=0.001)
    shown: dict[str, float] = {"drawn": 0.0, "mu": 0.0, "out": 0.0}
    for x, _ in whole:
        losses = theirs.losses(x.sigmoid(), BCE)
        (losses["drawn"] + losses["mu"] + losses["out"][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, loss in losses.items():
            mean = loss[0] if isinstance(loss, tuple) else loss
            is_sum = name == "drawn" or (name == "mu" and kind is DeclaresSums)
            shown[name] += mean.item() * (1 if is_sum else len(x)) / 101
    small = [(x[i : i + 7], y[i : i + 7]) for x, y in whole for i in range(0, len(x), 7)]  # 7 7 7 3, and 5
    tl = cpu_loop(
        ours,
        small if mode == "accumulated" else whole,
        optim.SGD(ours.parameters(), lr=0.001),
        BCE,
        gpu_mode="dp" if mode == "dp" else "single",
        devices=3 if mode == "dp" else "auto",
    )
    tl.fit(num_epochs=1, grad_accumulation=4 if mode == "accumulated" else 1)
    assert reference.largest_difference(ours, theirs) < 1e-12
    for name, mean in shown.items():
        assert tl.history[f"loss_{name}"] == [pytest.approx(mean, rel=1e-9)]
    with torch.no_grad():
        drawn = sum(theirs.losses(x.sigmoid(), BCE)["drawn"].item() for x, _ in whole) / 101
    assert tl.evaluate(whole)["loss_drawn"] == pytest.approx(drawn, rel=1e-9)


@pytest.mark.parametrize("where", [{}, {"gpu_mode": "dp", "accelerator": "cpu", "devices": 3}])
def test_an_evaluation_reads_each_yielded_loss(where: Any) -> None:
    """One optimizer's losses are means of the criterion's sum, the other's is this sum itself."""
    torch.manual_seed(0)
    tl = TrainLoop(YieldsBoth(), None, criterion=BCE, progress_bar=False, **where)
    loss = tl.evaluate(DataLoader(make_data(), batch_size=24))
    assert loss["loss_drawn"] == pytest.approx(loss["loss_mu"], rel=1e-6)


def test_a_weight_speaks_for_itself() -> None:
    class Weighted(VAE):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return super().get_loss(batch_data, criterion, device) / len(batch_data[0]), len(batch_data[0])

    states = []
    for kind in (Weighted, Divided):
        torch.manual_seed(0)
        model = kind()
        loader = DataLoader(make_data(), batch_size=10)
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        loop = cpu_loop(model, loader, optimizer, BCE)
        loop.fit(num_epochs=1, grad_accumulation=3)
        states.append((model.state_dict(), loop.history["loss"]))
    assert reference.largest_difference(states[0][0], states[1][0]) < 1e-6
    assert states[0][1] == pytest.approx(states[1][1], rel=1e-6)


class Nested(nn.Module):
    def __init__(self, *reductions: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.MSELoss(reduction=reduction) for reduction in reductions)


@dataclass
class Weighted:
    loss: nn.Module
    weight: float = 0.5

    def __call__(self, *args: Tensor) -> Any:
        return self.weight * self.loss(*args)


# A criterion may also be any of these around a module.
AROUND: list[Callable[[nn.Module], Any]] = [
    lambda loss: deque([loss]),
    lambda loss: Weighted(loss),
    lambda loss: SimpleNamespace(main=loss),
    lambda loss: functools.partial(F.mse_loss, loss=loss),
    lambda loss: loss.forward,
    lambda loss: Weighted(loss).__call__,
    lambda loss: lambda *args: loss(*args),
    lambda loss: type("Own", (), {"__init__": lambda own: setattr(own, "parts", {"main": loss})})(),
]


def declaring(reduction: str | None) -> Any:
    model = VAE()
    model.loss_reduction = reduction
    return model


@pytest.mark.parametrize(
    ("model", "criterion", "is_sum"),
    [
        (None, nn.MSELoss(), False),
        (None, nn.MSELoss(reduction="sum"), True),
        (None, nn.KLDivLoss(reduction="batchmean"), False),
        (None, nn.MSELoss(reduction="none"), False),
        (None, None, False),
        (None, F.mse_loss, False),
        (None, functools.partial(F.mse_loss, reduction="sum"), True),
        (None, functools.partial(nn.MSELoss(reduction="sum")), True),
        (None, Nested("sum", "sum"), True),
        (None, Nested("sum", "mean"), False),
        (None, Nested(), False),
        (None, {"a": nn.L1Loss(reduction="sum"), "b": [nn.MSELoss(reduction="sum")]}, True),
        *((None, around(nn.MSELoss(reduction="sum")), True) for around in AROUND),
        *((None, around(nn.MSELoss()), False) for around in AROUND),
        (None, deque([nn.L1Loss(reduction="sum"), nn.L1Loss()]), False),
        (None, VAE().get_loss, False),
        (declaring("mean"), nn.MSELoss(reduction="sum"), False),
        (declaring("sum"), nn.MSELoss(), True),
        (declaring(None), nn.MSELoss(reduction="sum"), True),
    ],
    # No address in a name: two processes that share the tests out have to call them alike.
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_who_says_so(model: Any, criterion: Any, is_sum: bool) -> None:
    assert (sum_rule(model, criterion) is not None) == is_sum


def test_a_division_tells() -> None:
    rule = sum_rule(None, nn.MSELoss(reduction="sum"))
    assert rule is not None
    layer, sigma = nn.Linear(3, 2), nn.Parameter(torch.tensor(2.0))
    x = torch.ones(5, 3)
    outputs = layer(x / x.sum())  # the model's own divisions are none of the loss
    loss = nn.MSELoss(reduction="sum")(outputs / 7, torch.zeros(5, 2))
    for is_sum in (
        loss,
        loss + loss,
        0.5 * loss,
        loss / sigma,
        loss.double(),
        loss.detach(),
        loss.reshape(1),
        loss.mean(),
    ):
        assert rule(is_sum)
    for is_mean in (loss / 5, loss.div(5) + 1, loss / torch.tensor(5), 0.1 * (loss / 5) + loss):
        assert not rule(is_mean)
    assert rule({"a": loss, "b": loss / 5, "c": 0.1 * outputs.mean(), "d": outputs.sum() + outputs.mean()}) == {
        "a",
        "d",
    }
    loss /= 5
    assert not rule(loss)


class CopiesAttributes(Tensor):
    """Gives a copy of its attributes to each result, like MONAI's MetaTensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor) and isinstance(args[0], Tensor):
            vars(result).update(copy.deepcopy(vars(args[0])))
        return result


def test_a_loss_that_copies_its_attributes_can_be_read_in_place_of_another() -> None:
    loss = (torch.ones(4, requires_grad=True) * 2).mean().as_subclass(CopiesAttributes)
    added = in_place_of(loss + torch.zeros(()), loss)
    assert not added.detach().requires_grad
    rule = sum_rule(None, nn.MSELoss(reduction="sum"))
    assert rule is not None
    assert rule(added) == rule(loss)


def test_what_several_wrappers_make_of_a_loss_is_read_like_the_loss() -> None:
    """As in ddp with find_unused_parameters, whose wrapper adds to the loss and returns another tensor of it."""
    rule = sum_rule(None, nn.MSELoss(reduction="sum"))
    assert rule is not None
    x = torch.ones(4, 2, requires_grad=True)
    for loss, is_sum in ((F.mse_loss(x, x * 0), False), (F.mse_loss(x, x * 0, reduction="sum"), True)):
        added = in_place_of(loss + torch.zeros(4, requires_grad=True).sum(), loss)
        assert [rule(one) for one in (loss, added, in_place_of(added.clone(), added))] == [is_sum] * 3


def test_a_feed_says_it_too_and_other_words_are_refused() -> None:
    class Feed(AbstractModelFeedDefinition):
        loss_reduction = "sum"

        def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return F.mse_loss(model(batch_data[0]), batch_data[0], reduction="sum")

        def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> Any:
            return model(batch_data[0]), batch_data[1], {}

    loop = cpu_loop(ModelWrap(nn.Linear(8, 8), Feed()), None, criterion=None)
    few, many = (loop.evaluate_model_loss(DataLoader(make_data(100), batch_size=size)) for size in (5, 50))
    assert few == pytest.approx(many)
    with pytest.raises(ConfigurationError, match=r"VAE.loss_reduction='Sum': must be 'mean', 'sum' or None"):
        TrainLoop(declaring("Sum"), None)


def undeclared(loss: Any, *, yields: bool = False) -> type[VAE]:
    class Undeclared(VAE):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x = batch_data[0].sigmoid()
            drawn, mu, _ = self(x)
            return loss(drawn, x, mu)

    class YieldsIt(Undeclared):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            yield super().get_loss(batch_data, criterion, device)

    return YieldsIt if yields else Undeclared


def squares(drawn: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(drawn, x, reduction="sum")


SUMS: dict[str, Any] = {
    "sum": lambda drawn, x, mu: F.binary_cross_entropy(drawn, x, reduction="sum") + 0.5 * mu.pow(2).sum(),
    "part": lambda drawn, x, mu: MultiLoss({"drawn": 0.5 * squares(drawn, x), "mu": mu.pow(2).sum()}),
    "times a learned weight": lambda drawn, x, mu: squares(drawn, x) * nn.Parameter(torch.tensor(2.0)),
}
MEANS: dict[str, Any] = {
    "divided": lambda drawn, x, mu: squares(drawn, x) / len(x),
    "of each sample": lambda drawn, x, mu: torch.stack([squares(a, b) for a, b in zip(drawn, x, strict=True)]).mean(),
    "with a weight": lambda drawn, x, mu: (squares(drawn, x) / len(x), len(x)),
    "a penalty": lambda drawn, x, mu: F.mse_loss(drawn, x) + 0.1 * F.mse_loss(mu, mu.detach(), reduction="sum"),
}


@pytest.mark.parametrize("name", [*SUMS, "yielded"])
@pytest.mark.parametrize("declared", [None, "sum", "mean"])
def test_a_sum_that_nothing_declares_is_reported(name: str, declared: str | None) -> None:
    model = undeclared(SUMS.get(name, SUMS["sum"]), yields=name == "yielded")()
    model.loss_reduction = declared  # type: ignore[assignment]
    loader = DataLoader(make_data(12), batch_size=4)
    loop = cpu_loop(model, loader, optim.SGD(model.parameters(), lr=0.01), None)
    loop.fit(1)  # nothing is averaged: the gradients are those of a hand-written loop
    if declared is None:
        with pytest.warns(UserWarning, match=r"taken to return a mean.*Set loss_reduction = 'sum'"):
            loop.fit(1, grad_accumulation=2)
    else:
        loop.fit(1, grad_accumulation=2)


@pytest.mark.parametrize("name", MEANS)
def test_means_that_use_sums_are_not_reported(name: str) -> None:
    model = undeclared(MEANS[name])()
    loader = DataLoader(make_data(12), batch_size=4)
    sgd = optim.SGD(model.parameters(), lr=0.01)
    cpu_loop(model, loader, sgd, None, validation_loader=loader).fit(2, grad_accumulation=2)


def test_a_loss_times_a_number_is_read_within_dispatch_modes() -> None:
    model = undeclared(lambda drawn, x, mu: 0.001 * F.mse_loss(drawn, x))()
    loader = DataLoader(make_data(12), batch_size=4)
    sgd = optim.SGD(model.parameters(), lr=0.01)
    loop = cpu_loop(model, loader, sgd, None)
    with FlopCounterMode(display=False):
        loop.fit(1, grad_accumulation=2)
    assert loop.progress.global_step == 2


class SeesOperations(TorchDispatchMode):
    """A mode as in steps of ranks with unequal numbers of samples."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_numbers_in_a_loss_are_read_in_a_mode_that_sees_operations() -> None:
    x = torch.ones(3, requires_grad=True)
    total = F.mse_loss(x, torch.zeros(3), reduction="sum")
    with SeesOperations():
        assert not adds_samples(F.mse_loss(x, x.detach()) + 0.01 * x.abs().sum())
        assert not adds_samples(0.01 * total)
        assert adds_samples(2.0 * total)
