"""fp16 in steps in which parameters of an optimizer have no gradient: torch's scaler would refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, make_loop
from kit.warned import warnings_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import ExponentialMovingAverage, LRScheduler


class Two(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        # the second depends on both networks: with the second one frozen, it can still be differentiated
        return MultiLoss({"a": criterion(self.a(x), y), "b": criterion(self.b(x) + self.a(x), y)}, {"a": 0, "b": 1})

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self.a(batch_data[0]), batch_data[1], {}


class Yielding(Two):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        yield from super().get_loss(batch_data, criterion, device).items()


class Apart(Two):
    """With the second network frozen, the second loss has no graph."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        return MultiLoss({"a": criterion(self.a(x), y), "b": criterion(self.b(x), y)})


class Freeze(AbstractCallback):
    """Freezes a network for the first steps."""

    def on_batch_begin(self) -> None:
        self.train_loop_obj.model.b.requires_grad_(self.train_loop_obj.global_step > 2)


def trained(
    cls: type[Two], *, frozen: bool, fp16: bool = True, callbacks: Sequence[AbstractCallback] = ()
) -> tuple[Tensor, Tensor]:
    model = cls()
    data = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80, torch.ones(20, 1))
    loop = TrainLoop(
        model,
        DataLoader(data, 4),
        optimizer=MultiOptimizer({name: torch.optim.SGD(getattr(model, name).parameters(), 0.1) for name in "ab"}),
        criterion=nn.MSELoss(),
        accelerator="cpu",
        use_amp={"init_scale": 8.0} if fp16 else False,  # no step overflows
        progress_bar=False,
    )
    loop.fit(num_epochs=1, callbacks=[*callbacks, *([Freeze("freeze")] if frozen else [])])
    return model.a.weight.detach(), model.b.weight.detach()


@pytest.mark.parametrize("cls", [Two, Yielding])
def test_a_frozen_network_keeps_its_weights_until_it_is_unfrozen(cls: type[Two]) -> None:
    free, _ = trained(cls, frozen=False)
    with_frozen, b = trained(cls, frozen=True)
    assert torch.equal(free, with_frozen)
    assert not torch.equal(b, cls().b.weight)
    torch.testing.assert_close(b, trained(cls, frozen=True, fp16=False)[1], atol=1e-2, rtol=0)


class Broken(Net):
    """From a given step on, its loss is finite but its gradients are NaN."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.steps, self.first = 0, first

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        self.steps += self.training
        weight = self.fc.weight
        return loss + 0 * (weight - weight).abs().sqrt().sum() if self.steps > self.first else loss


@pytest.mark.parametrize(
    "first, epochs, number", [(0, 3, 21), (0, 1, 7), (STEPS_PER_EPOCH, 4, 21), (STEPS_PER_EPOCH, 3, None)]
)
def test_a_run_whose_steps_are_all_skipped_is_reported(first: int, epochs: int, number: int | None) -> None:
    """Otherwise nothing shows it: the losses are finite, and equal in all epochs."""
    loop = make_loop(Broken(first), use_amp={"init_scale": 8.0}, end_auto_eval=False)
    found = warnings_of(lambda: loop.fit(num_epochs=epochs), "AMP has skipped")
    assert len(found) == (number is not None)
    assert all(f"the last {number} optimizer steps" in text for text in found)


class OneBroken(Two):
    """The gradients of its second network are NaN, though its loss is finite."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        weight = self.b.weight
        broken = criterion(self.b(x), y) + 0 * (weight - weight).abs().sqrt().sum()
        return MultiLoss({"a": criterion(self.a(x), y), "b": broken}, {"a": 0, "b": 1})


class OneBrokenYields(OneBroken):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        yield from super().get_loss(batch_data, criterion, device).items()


@pytest.mark.parametrize("cls", [OneBroken, OneBrokenYields])
def test_an_optimizer_whose_steps_are_all_skipped_is_named(cls: type[Two]) -> None:
    before = cls().b.weight
    with pytest.warns(UserWarning, match=r"AMP has skipped the last 5 optimizer steps of optimizer 1 .*so its weights"):
        a, b = trained(cls, frozen=False)
    assert torch.equal(b, before)
    assert not torch.equal(a, cls().a.weight)


@pytest.mark.parametrize("cls", [OneBroken, OneBrokenYields])
def test_schedules_count_the_steps_of_their_optimizers_and_an_average_those_of_any(cls: type[Two]) -> None:
    schedules = [LRScheduler(ExponentialLR, "step", optimizer_idx=i, gamma=0.5) for i in range(2)]
    average = ExponentialMovingAverage(0.5)
    trained(cls, frozen=False, callbacks=[*schedules, average])
    assert [schedule.scheduler.last_epoch for schedule in schedules] == [5, 0]
    assert average.updates == 5


@pytest.mark.parametrize("fp16", [False, True])
def test_a_loss_of_a_frozen_network_alone_is_no_error(fp16: bool) -> None:
    (one, frozen), (other, trained_) = trained(Apart, frozen=True, fp16=fp16), trained(Apart, frozen=False, fp16=fp16)
    assert torch.equal(one, other)
    assert not torch.equal(frozen, trained_)


@pytest.mark.parametrize("mode", ["single", pytest.param("fsdp", marks=pytest.mark.long)])
def test_parameters_of_float16_are_refused_with_advice(mode: str) -> None:
    loop = make_loop(model=Net().half(), gpu_mode=mode, devices=2 if mode == "fsdp" else 1, use_amp="fp16")
    with pytest.raises(Exception, match=r"parameters of the \w+ are float16. Convert the model back"):
        loop.fit(num_epochs=1)
