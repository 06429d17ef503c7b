"""The callback that ends training when values are no numbers any more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Scores, make_loop
from kit.warned import warnings_of
from torch import Tensor, nn, optim

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TTBasicModel
from trainloop.callbacks import TerminateOnNaN
from trainloop.callbacks.watch.nan import NonFinite
from trainloop.callbacks.weights.gradient import norms_of
from trainloop.errors import ConfigurationError


class Breaks(Net):
    """In one batch the gradient of ``side``, or the loss itself, is no number."""

    def __init__(self, batch: int, what: str) -> None:
        super().__init__()
        self.side = nn.Parameter(torch.ones(2))
        self.batch = batch
        self.what = what  # of the training batch with the index `batch`

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        loss = super().get_loss(batch_data, criterion, device) + 0.0 * self.side.sum()
        if not self.training or self.batch < 0:
            return loss
        self.batch -= 1
        if self.batch >= 0:
            return loss
        if self.what == "gradient":
            return loss + torch.sqrt(self.side * 0.0).sum()  # 0, whose derivative is infinity times 0
        return loss * math.nan if self.what == "nan" else loss + math.inf


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize("every", [None, 1, 3, 100])
def test_names_step_and_parameter(every: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    guard = TerminateOnNaN(check_every_n_steps=every)
    loop = make_loop(Breaks(8, "gradient"))
    loop.fit(num_epochs=4, callbacks=[guard])
    # The loss of the broken step is a number still, its gradient of one parameter is not.
    assert guard.found == NonFinite(1, 9, "the gradient of 'side' is not finite", ("side",))
    assert loop.global_step == {None: 9, 1: 9, 3: 10, 100: 14}[every]
    assert "Training ends: the gradient of 'side' is not finite in step 9 (epoch 2)." in capsys.readouterr().out


@pytest.mark.parametrize("step", [1, 3, 8])  # in the first step, within an epoch, in the second one
def test_names_a_parameter_that_a_callback_has_added(step: int) -> None:
    class Adds(AbstractCallback):
        def on_batch_begin(self) -> None:
            loop = self.train_loop_obj
            if loop.global_step == step - 1:
                loop.model.side = nn.Parameter(torch.ones(2))
                loop.optimizer.add_param_group({"params": [loop.model.side]})

    class BreaksLater(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
            loss = super().get_loss(batch_data, criterion, device)
            return loss + torch.sqrt(self.side * 0.0).sum() if hasattr(self, "side") else loss

    guard = TerminateOnNaN()
    loop = make_loop(BreaksLater())
    loop.fit(num_epochs=4, callbacks=[Adds(), guard])
    assert guard.found is not None
    assert (guard.found.step, guard.found.parameters) == (step, ("side",))


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_loss_that_is_no_number(what: str) -> None:
    guard = TerminateOnNaN()
    loop = make_loop(Breaks(3, what))
    loop.fit(num_epochs=2, callbacks=[guard])
    assert loop.global_step == 4
    assert guard.found is not None
    assert (guard.found.epoch, guard.found.step) == (0, 4)
    assert guard.found.what.startswith("the loss is not finite")


def test_a_loss_alone_when_gradients_are_not_looked_at() -> None:
    guard = TerminateOnNaN(gradients=False)
    make_loop(Breaks(3, "nan")).fit(num_epochs=2, callbacks=[guard])
    assert guard.found == NonFinite(0, 4, "the loss is not finite")


def test_the_micro_batch_counts_as_its_step() -> None:
    guard = TerminateOnNaN(gradients=False, check_every_n_steps=2)
    loop = make_loop(Breaks(4, "inf"))  # the fifth batch: the first of the third step
    loop.fit(num_epochs=2, callbacks=[guard], grad_accumulation=2)
    assert guard.found is not None
    assert guard.found.step == 3


def test_finds_nothing_where_nothing_is() -> None:
    guard = TerminateOnNaN()
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[guard])
    assert guard.found is None
    assert loop.global_step == 2 * STEPS_PER_EPOCH


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_looks_at_a_metric_after_each_epoch(value: float) -> None:
    guard = TerminateOnNaN("score")
    loop = make_loop(validation=False)
    loop.fit(num_epochs=4, callbacks=[Scores([1.0, value, 1.0, 1.0]), guard])
    assert guard.found == NonFinite(1, 2 * STEPS_PER_EPOCH, f"score is {value}")
    assert loop.epoch == 2


def test_steps_that_amp_skipped_are_no_concern() -> None:
    # A scale so large that the first backward passes overflow: the scaler skips the step and halves the scale.
    loop = make_loop(use_amp={"init_scale": 2.0**40, "growth_interval": 1000})
    guard = TerminateOnNaN()
    skipped = CountsSkipped()
    loop.fit(num_epochs=8, callbacks=[guard, skipped])
    assert skipped.count > 3
    assert skipped.count < loop.global_step
    assert guard.found is None


class CountsSkipped(AbstractCallback):
    count = 0

    def on_after_optimizer_step(self) -> None:
        self.count += self.train_loop_obj.step_skipped


class TwoLosses(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        x, y = batch_data
        a, b = self(x)
        return MultiLoss(
            {"a": criterion(a, y), "b": criterion(b, y) + torch.sqrt(self.b.bias * 0.0).sum()}, {"a": 0, "b": 1}
        )


def test_several_optimizers() -> None:
    torch.manual_seed(0)
    model = TwoLosses()
    optimizer = MultiOptimizer([optim.SGD(model.a.parameters(), lr=0.1), optim.SGD(model.b.parameters(), lr=0.1)])
    guard = TerminateOnNaN()
    make_loop(model, optimizer=optimizer, validation=False).fit(num_epochs=1, callbacks=[guard])
    assert guard.found is not None
    assert (guard.found.step, guard.found.parameters) == (1, ("b.bias",))


class Embeds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return criterion(self(x) + self.table(y) / (self.table(y).detach().sum() * 0.0), y)


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    guard = TerminateOnNaN()
    model = Embeds()
    make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1)).fit(num_epochs=1, callbacks=[guard])
    assert guard.found is not None
    assert "table.weight" in guard.found.parameters


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_large_gradients_are_finite(dtype: torch.dtype, factor: float) -> None:
    """Their sum of squares is not, nor is a float64 in float32."""

    class Steep(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
            x, y = batch_data
            return super().get_loss((x.to(dtype), y), criterion, device) * factor

    guard = TerminateOnNaN()
    model = Steep().to(dtype)
    loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=1e-5 / factor))
    loop.fit(num_epochs=1, callbacks=[guard])
    assert guard.found is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_largest_value_on_the_cpu_is_torch_s_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cases = [torch.randn(4, 6).to(dtype), -torch.ones(3).to(dtype), torch.randn(4, 6).to(dtype)[:, ::2], torch.zeros(2)]
    cases += [torch.tensor([1.0, nan]).to(dtype) for nan in (math.nan, math.inf, -math.inf)]
    for found, tensor in zip(norms_of(cases, math.inf), cases, strict=True):
        expected = torch.linalg.vector_norm(tensor, math.inf)
        assert torch.equal(found, expected) or (found.isnan() and expected.isnan())
        assert found.dtype == expected.dtype


def test_a_metric_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="TerminateOnNaN: monitor='f1' is not in the history"):
        make_loop().fit(num_epochs=1, callbacks=[TerminateOnNaN("f1")])


def test_state_goes_into_checkpoints() -> None:
    guard = TerminateOnNaN()
    make_loop().fit(num_epochs=2, callbacks=[guard])
    again = TerminateOnNaN()
    again.load_state_dict(guard.state_dict())
    assert again.state_dict()["metric"]["seen"] == 2


# -- without the callback ----------------------------------------------------------------------------------------------


def nan_warnings(batch: int, callbacks: list[AbstractCallback]) -> list[str]:
    loop = make_loop(Breaks(batch, "nan"), validation=False)
    return warnings_of(lambda: loop.fit(num_epochs=3, callbacks=callbacks), "TerminateOnNaN")


def test_the_first_epoch_with_a_loss_that_is_nan_is_told_once() -> None:
    (text,) = nan_warnings(STEPS_PER_EPOCH, [])
    assert text.startswith("NaN in the training loss of epoch 2 (loss). Use fit(callbacks=[TerminateOnNaN()]) to end")
    assert nan_warnings(STEPS_PER_EPOCH, [TerminateOnNaN()]) == []
    assert nan_warnings(-1, []) == []


def test_where_warnings_are_errors_it_costs_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    loop = make_loop(Breaks(0, "nan"), validation=False)
    loop.fit(num_epochs=2)  # pytest makes errors of warnings
    assert loop.epoch == 2
    assert capfd.readouterr().err.count("NaN in the training loss of epoch 1 (loss). ") == 1


def test_one_of_several_losses() -> None:
    class Two(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            loss = super().get_loss(batch_data, criterion, device)
            return MultiLoss({"a": loss, "b": loss.detach() * math.nan})

    with pytest.warns(UserWarning, match=r"NaN in the training loss of epoch 1 \(loss, loss_b\)\. "):
        make_loop(Two(), validation=False).fit(num_epochs=1)
