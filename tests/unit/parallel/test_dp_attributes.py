"""Attributes that a model's methods set: in dp, as in one process, or with a warning that names them."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.warned import warnings_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTBasicModel
from trainloop.errors import ConfigurationError

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Anneals(Net):
    """The penalty grows with the number of steps, which the model counts."""

    step = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.step += 1
        layer: Any = self.layer
        layer.calls = getattr(layer, "calls", 0.0) + 0.5
        weight = min(1.0, self.step / 6)
        return super().get_loss(batch_data, criterion, device) + weight * self.layer.weight.square().sum()


class CountsRows(Net):
    rows = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.rows += len(batch_data[0])
        return super().get_loss(batch_data, criterion, device)


class Averages(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((), dtype=torch.float64)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch_data[0].mean()
        return super().get_loss(batch_data, criterion, device)


class CountsInContainers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, float] = {"steps": 0}
        self.kinds: Counter[str] = Counter()
        self.losses = [0.0]
        self.same_counts = self.counts

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.counts["steps"] += 1
        self.kinds["train"] += 1
        loss = super().get_loss(batch_data, criterion, device)
        self.losses.append(float(batch_data[0].sum()))
        return loss * min(1.0, self.counts["steps"] / 6)


class CountsInNestedContainers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"name": "a", "train": {"steps": 0, "by_kind": {}}, "sums": [0.0], "size": (1, 2)}
        self.in_train, self.sums = self.state["train"], self.state["sums"]
        self.kinds: defaultdict[str, int] = defaultdict(int)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        train = self.state["train"]
        self.in_train["steps"] += 1
        train["by_kind"]["a"] = train["by_kind"].get("a", 0) + 1
        self.state["sums"].append(float(batch_data[0].sum()))
        self.kinds["a"] += 1
        return super().get_loss(batch_data, criterion, device) * min(1.0, train["steps"] / 6)


class SumsInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sums = {"x": 0.0}

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.sums["x"] += float(batch_data[0].sum())
        return super().get_loss(batch_data, criterion, device)


class AnnealedLoss(nn.Module):
    step = 0

    def forward(self, output: Any, target: Any) -> Any:
        self.step += 1
        return nn.functional.mse_loss(output, target) * min(1.0, self.step / 6)


class AnnealedByBuffer(nn.Module):
    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, output: Any, target: Any) -> Any:
        self.step += 1
        return nn.functional.mse_loss(output, target) * (self.step / 6).clamp(max=1)


class PlainAnnealedLoss:
    step = 0

    def __call__(self, output: Any, target: Any) -> Any:
        return AnnealedLoss.forward(self, output, target)  # type: ignore[arg-type]


class Centred(AnnealedByBuffer):
    def forward(self, output: Any, target: Any) -> Any:
        loss = nn.functional.mse_loss(output - self.step, target)
        with torch.no_grad():
            self.step.mul_(0.9).add_(0.1 * output.mean())
        return loss


class KeepsFeatures(Net):
    """Keeps what a callback reads after a step, and what all batches have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.features = self.mask = None

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        self.features = x.mean(0)
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], dtype=x.dtype)
        return criterion(self(x * self.mask), y)


class SumsLosses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        self.total += loss.detach()
        return loss


class SumsLossesWithTheirGraph(Net):
    total: Any = 0.0

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        self.total = self.total + loss
        return loss


class Yields(Net):
    """Yields two losses for each batch, each of which is followed by a step; the loss counts 2 calls for each batch."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        yield criterion(self(x), y)
        yield criterion(self(x), y)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self(batch_data[0]), batch_data[1])


def trained(model: Any, replicas: int, criterion: Any = None) -> tuple[Any, list[str]]:
    how: Any = {"gpu_mode": "dp", "devices": replicas} if replicas else {}
    loader = DataLoader(ROWS, 8)
    loop = cpu_loop(model, loader, criterion=criterion or nn.MSELoss(), validation_loader=loader, **how)
    return model, warnings_of(lambda: loop.fit(num_epochs=2), "so the change is lost")


def test_a_count_of_steps_is_that_of_one_process() -> None:
    (one, _), (other, said) = trained(Anneals(), 0), trained(Anneals(), 2)
    assert (other.step, other.layer.calls, said) == (one.step, one.layer.calls, []) == (16, 8.0, [])
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


def test_a_count_of_steps_in_a_dict_is_that_of_one_process() -> None:
    (one, _), (other, said) = trained(CountsInContainers(), 0), trained(CountsInContainers(), 2)
    assert (other.counts, other.kinds, said) == (one.counts, one.kinds, []) == ({"steps": 16}, {"train": 16}, [])
    assert other.same_counts is other.counts
    parts = other.losses[1:]  # of each part, as in nn.DataParallel
    assert [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)] == pytest.approx(one.losses[1:])
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


def test_counts_in_nested_dicts_are_those_of_one_process() -> None:
    (one, _), (other, said) = trained(CountsInNestedContainers(), 0), trained(CountsInNestedContainers(), 2)
    assert said == []
    sums = other.state.pop("sums")[1:]
    assert [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)] == pytest.approx(one.state.pop("sums")[1:])
    assert (other.state, other.kinds) == (one.state, one.kinds)
    assert one.state["train"] == {"steps": 16, "by_kind": {"a": 16}}
    assert other.in_train is other.state["train"]
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_does_not_depend_on_the_samples_replaces_none() -> None:
    model, _ = trained(KeepsFeatures(), 2)
    assert torch.equal(model.mask, torch.ones_like(model.mask))
    assert model.features is None


@pytest.mark.parametrize("kind", [AnnealedLoss, AnnealedByBuffer, PlainAnnealedLoss])
def test_a_criterion_counts_the_steps_of_one_process(kind: Any) -> None:
    criteria = [kind(), kind()]
    (one, _), (other, said) = (trained(Net(), n, loss) for n, loss in zip((0, 2), criteria, strict=True))
    assert [int(loss.step) for loss in criteria] == [16, 16]
    assert not said
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [AnnealedLoss, AnnealedByBuffer, PlainAnnealedLoss])
def test_a_criterion_of_yielded_losses_counts_those_of_one_process(kind: Any) -> None:
    criteria = [kind(), kind()]
    (one, _), (other, _) = (trained(Yields(), n, loss) for n, loss in zip((0, 2), criteria, strict=True))
    assert [int(loss.step) for loss in criteria] == [16, 16]
    torch.testing.assert_close(other.layer.weight, one.layer.weight, rtol=1e-12, atol=1e-12)


def test_a_buffer_of_a_criterion_that_depends_on_the_samples_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"get_loss changes step, but each replica has only a part"):
        trained(Net(), 2, Centred())


class Attacks(Net):
    """Adversarial weights: a second loss at the weights' worst neighbour, after which the weights are put back."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        weight: Any = self.layer.weight
        (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
        before = weight.data.clone()
        weight.data.add_(0.1 * gradient)
        loss = loss + super().get_loss(batch_data, criterion, device)
        weight.data = before
        return loss


def test_values_that_a_replica_puts_back_in_vain_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"get_loss changes layer\.weight, but each replica has only a part"):
        trained(Attacks(), 2)


class StartsFromTheFirstBatch(Net):
    """The layer gets its bias from the first batch, as in ActNorm."""

    started = False

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        if not self.started:
            self.layer.bias.data.fill_(-batch_data[0].mean())
            self.started = True
        return super().get_loss(batch_data, criterion, device)


class Momentum(Net):
    """A momentum encoder, which equals the layer before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(3, 1, dtype=torch.float64).requires_grad_(False)
        self.slow.load_state_dict(self.layer.state_dict())

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
            slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
        return super().get_loss(batch_data, criterion, device) + (self(batch_data[0]) * self.slow(batch_data[0])).mean()


class CentresData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros((), dtype=torch.float64))

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.centre.data.lerp_(batch_data[0].mean(), 0.1)
        return super().get_loss(batch_data, criterion, device)


class CountsInData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.count.data.add_(1)
        return super().get_loss(batch_data, criterion, device)


class WithRagged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


class NamesWithDots(Net):
    """As ``TensorDictParams`` of tensordict, which torch's ``register_buffer`` would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers["actor.scale"] = torch.tensor(2.0)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self._buffers["actor.scale"]


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("model", [WithRagged, NamesWithDots])
def test_an_unusual_buffer_is_no_error(model: Any) -> None:
    trained(model(), 2)


@pytest.mark.parametrize(
    ("model", "what"),
    [(StartsFromTheFirstBatch, "layer.bias"), (Momentum, "slow.weight"), (CentresData, "centre")],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_changes_through_data_are_an_error(model: Any, what: str, accumulation: int) -> None:
    net = model()
    tl = cpu_loop(net, DataLoader(ROWS, batch_size=4), criterion=nn.MSELoss(), gpu_mode="dp", devices=2)
    with pytest.raises(ConfigurationError, match=f"get_loss changes {what}, but each replica has only a part"):
        tl.fit(num_epochs=1, grad_accumulation=accumulation)


def test_a_count_through_data_is_that_of_one_process() -> None:
    (one, _), (other, said) = (trained(CountsInData(), n) for n in (0, 2))
    assert int(one.count) == int(other.count) > 0
    assert not said


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (CountsRows, "get_loss changes rows,"),
        (SumsInADict, "get_loss changes sums,"),
        (Averages, "get_loss_eval changes mean,"),
        (KeepsFeatures, "get_loss changes features,"),
        (SumsLosses, "get_loss changes total,"),
        (SumsLossesWithTheirGraph, "get_loss changes total,"),
    ],
)
def test_what_is_computed_from_a_part_is_warned_of_once(model: Any, what: str) -> None:
    _, said = trained(model(), 2)
    assert len(said) == 1
    assert f"gpu_mode='dp': {what} but each replica has only a part of the batch" in said[0]


class ChangesInPlace(Net):
    """Counts the steps in an object that replicas share; a hook keeps the last output."""

    def __init__(self, kept: Any, change: Any) -> None:
        super().__init__()
        self.kept, self.change = kept, change
        self.outputs: dict[str, Any] = {}
        self.layer.register_forward_hook(lambda module, given, output: self.outputs.__setitem__("last", output))

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.change(self.kept)
        return super().get_loss(batch_data, criterion, device)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (torch.zeros(()), lambda kept: kept.add_(1)),
        (np.zeros(3), lambda kept: kept.__iadd__(1)),
        ([torch.zeros(2)], lambda kept: kept[0].add_(1)),
        ({"steps": 0, "sum": torch.zeros(2)}, lambda kept: kept.update(steps=kept["steps"] + 1)),
        ({}, lambda kept: kept.update(steps=kept.get("steps", 0) + 1)),
        (deque(maxlen=5), lambda kept: kept.append(1.0)),
    ],
)
def test_what_replicas_share_and_change_in_place_is_warned_of_once(kept: Any, change: Any) -> None:
    model = ChangesInPlace(kept, change)
    with pytest.warns(UserWarning, match=r"get_loss changes kept in place, but each replica .* not a count of") as said:
        trained_with_warnings(model)
    assert len([one for one in said if "in place" in str(one.message)]) == 1


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        ([], lambda kept: kept.append(torch.zeros(1))),  # in the order of the parts
        ({"last": torch.zeros(1), "name": "a"}, lambda kept: kept.update(last=torch.ones(1))),
        ({"nan": float("nan"), "last": torch.zeros(1)}, lambda kept: None),
    ],
)
def test_what_is_appended_or_replaced_is_not_warned_of(kept: Any, change: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*each replica has only a part")
        trained_with_warnings(ChangesInPlace(kept, change))


def trained_with_warnings(model: Any) -> None:
    cpu_loop(model, DataLoader(ROWS, 8), criterion=nn.MSELoss(), gpu_mode="dp", devices=2).fit(num_epochs=1)
