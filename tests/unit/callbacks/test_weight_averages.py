"""Averages of weights of unusual models and optimizers, late and rare updates, and SWA's BatchNorm statistics."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from kit.small_loop import STEPS_PER_EPOCH, Net, make_loop
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ExponentialMovingAverage, ModelCheckpoint, StochasticWeightAveraging, WeightAverage
from trainloop.errors import ConfigurationError


class Record(AbstractCallback):
    """The weights after each step, as the hand-written average reads them."""

    def __init__(self) -> None:
        super().__init__("record", execution_order=-100)
        self.seen: list[Tensor] = []

    def on_after_optimizer_step(self) -> None:
        self.seen.append(flat(self.train_loop_obj.model))

    def average(self, decay: float, *, every: int = 1, start: int = 0, first: Tensor | None = None) -> Tensor:
        average = first
        for step, weights in enumerate(self.seen, start=1):
            if step <= start or average is None:
                average = weights.clone()
            elif step % every == 0:
                average = decay * average + (1 - decay) * weights
        assert average is not None
        return average


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("start_from", ["first", "initial"])
def test_without_an_update_the_trained_weights_stay(start_from: Any) -> None:
    loop, record = make_loop(), Record()
    ema = ExponentialMovingAverage(every_n_steps=100, evaluate=True, start_from=start_from)
    with pytest.warns(UserWarning, match="ended after 7 steps, before the first update"):
        loop.fit(1, callbacks=[ema, record])
    assert torch.equal(flat(loop.model), record.seen[-1])
    if start_from == "first":
        assert loop.history["ema_val_loss"] == loop.history["val_loss"]


def test_a_change_of_the_weights_by_a_callback_with_a_lower_order_is_averaged() -> None:
    class Clamps(AbstractCallback):
        def on_after_optimizer_step(self) -> None:
            with torch.no_grad():
                for p in self.train_loop_obj.model.parameters():
                    p.clamp_(-0.1, 0.1)

    loop = make_loop()
    loop.fit(1, callbacks=[ExponentialMovingAverage(0.9), Clamps("clamps", execution_order=-51)])
    assert flat(loop.model).abs().max() <= 0.1 + 1e-6


def test_until_start_step_the_average_equals_the_weights() -> None:
    loop, record = make_loop(), Record()
    ema = ExponentialMovingAverage(0.9, every_n_steps=4, start_step=2 * STEPS_PER_EPOCH, evaluate=True)
    loop.fit(3, callbacks=[ema, record])
    assert loop.history["ema_val_loss"][:2] == loop.history["val_loss"][:2]
    torch.testing.assert_close(flat(loop.model), record.average(0.9, every=4, start=2 * STEPS_PER_EPOCH))


def test_start_from_the_initial_weights() -> None:
    loop, record = make_loop(), Record()
    first = flat(loop.model)
    loop.fit(1, callbacks=[ExponentialMovingAverage(0.9, every_n_steps=3, start_from="initial"), record])
    torch.testing.assert_close(flat(loop.model), record.average(0.9, every=3, first=first))


@pytest.mark.parametrize("warmup", [True, 0.5, lambda n: (1 + n) / (10 + n)])
def test_warm_up(warmup: Any) -> None:
    loop, record = make_loop(), Record()
    first = average = flat(loop.model)
    loop.fit(1, callbacks=[ExponentialMovingAverage(0.8, warmup=warmup, start_from="initial"), record])
    for n, weights in enumerate(record.seen):
        decay = warmup(n) if callable(warmup) else 1 - (1 + n) ** -(2 / 3 if warmup is True else warmup)
        average = min(decay, 0.8) * average + (1 - min(decay, 0.8)) * weights
    torch.testing.assert_close(flat(loop.model), average)
    assert not torch.equal(average, first)


class AssignsData(optim.SGD):
    """An optimizer that gives parameters new memory, as vector_to_parameters does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_parameters_with_new_memory(average: str) -> None:
    model = Net()
    loop, record = make_loop(model, optimizer=AssignsData(model.parameters(), lr=0.1)), Record()
    callback: Any = ExponentialMovingAverage(0.5) if average == "ema" else StochasticWeightAveraging(start=0)
    loop.fit(2, callbacks=[callback, record])
    ends = (record.seen[STEPS_PER_EPOCH - 1] + record.seen[-1]) / 2
    torch.testing.assert_close(flat(loop.model), record.average(0.5) if average == "ema" else ends)


class Complex(TTBasicModel):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.dtype) @ self.weight).abs().float() + self.bias


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
def test_complex_and_16_bit_weights(dtype: torch.dtype) -> None:
    model = Complex(dtype)
    seen: list[Tensor] = []

    class Weights(AbstractCallback):
        def on_after_optimizer_step(self) -> None:
            seen.append(model.weight.detach().clone())

    ema = ExponentialMovingAverage(0.99)
    make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1)).fit(2, callbacks=[Weights("weights"), ema])
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    average = seen[0].to(wide)
    for weight in seen[1:]:
        average = 0.99 * average + 0.01 * weight.to(wide)
    torch.testing.assert_close(ema.average["weight"], average)
    assert torch.equal(model.weight, average.to(dtype)) or dtype.is_complex
    assert ema.average["weight"].dtype == wide
    torch.testing.assert_close(model.weight.detach().to(wide), average, rtol=1e-2, atol=1e-2)


def test_lazy_layers_and_layers_that_are_added_later() -> None:
    class Grows(AbstractCallback):
        def on_epoch_begin(self) -> None:
            if self.train_loop_obj.epoch == 1:
                loop.model.extra = nn.Parameter(torch.ones(2))

    model = Net()
    model.fc = nn.LazyLinear(3)  # type: ignore[assignment]
    loop, record = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1)), Record()
    ema = ExponentialMovingAverage(0.5)
    loop.fit(1, callbacks=[ema, record])
    torch.testing.assert_close(flat(loop.model), record.average(0.5))
    loop = make_loop()
    loop.fit(2, callbacks=[ema, Grows("grows")])
    assert set(ema.average) == {"fc.weight", "fc.bias", "extra"}
    assert torch.equal(ema.average["extra"], torch.ones(2))


@pytest.mark.parametrize("make", [ExponentialMovingAverage, partial(StochasticWeightAveraging, start=0)])
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_batch_begin", "on_batch_end"])
def test_the_average_of_a_layer_that_a_callback_enlarges_begins_with_its_weights(make: Any, hook: str) -> None:
    class Enlarges(AbstractCallback):
        def enlarge(self) -> None:
            loop = self.train_loop_obj
            if loop.epoch == 1 and loop.model.fc.out_features == 3:
                loop.model.fc = nn.Linear(loop.model.fc.in_features, 7)

    setattr(Enlarges, hook, Enlarges.enlarge)
    loop, average = make_loop(), make()
    before = loop.model.fc.weight.detach().clone()
    loop.fit(3, callbacks=[average, Enlarges("enlarges")])
    assert before.shape[0] == 3
    assert average.average["fc.weight"].shape[0] == 7
    # No optimizer has the new weights, which therefore stay.
    torch.testing.assert_close(average.average["fc.weight"], loop.model.fc.weight.detach())


def test_a_rule_of_one_s_own() -> None:
    class Mine(WeightAverage):
        def __init__(self) -> None:
            super().__init__(apply_on_train_end=True)

        def on_after_optimizer_step(self) -> None:
            self.update(get_ema_multi_avg_fn(0.9) if self.updates else None)

    loop, record = make_loop(), Record()
    loop.fit(1, callbacks=[Mine(), record])
    torch.testing.assert_close(flat(loop.model), record.average(0.9))


def test_load_best_by_the_average_s_loss_loads_the_average(tmp_path: Path) -> None:
    loop = make_loop()
    loop.model.tied = loop.model.fc.weight
    best = ModelCheckpoint(tmp_path, monitor="ema_val_loss", keep=1)
    loop.fit(3, callbacks=[ExponentialMovingAverage(0.9, evaluate=True, apply_on_train_end=False), best])
    assert loop.evaluate_loss_on_validation_set() != best.best_value
    best.load_best()
    assert loop.evaluate_loss_on_validation_set() == best.best_value == min(loop.history["ema_val_loss"])


def test_several_averages_have_losses_of_their_own(tmp_path: Path) -> None:
    def averages(*decays: float) -> list[ExponentialMovingAverage]:
        return [ExponentialMovingAverage(decay, evaluate=True, apply_on_train_end=False) for decay in decays]

    loop = make_loop()
    best = ModelCheckpoint(tmp_path, monitor="ema_0.9_val_loss", keep=1)
    loop.fit(3, callbacks=[*averages(0.5, 0.9), best])
    for decay in (0.5, 0.9):
        alone = make_loop()
        alone.fit(3, callbacks=averages(decay))
        assert loop.history[f"ema_{decay}_val_loss"] == alone.history["ema_val_loss"]
    best.load_best()
    assert loop.evaluate_loss_on_validation_set() == best.best_value == min(loop.history["ema_0.9_val_loss"])
    with pytest.raises(ConfigurationError, match=r"several averages have decay=0.5"):
        loop.fit(1, callbacks=averages(0.5, 0.5))


class Norms(TTBasicModel):
    """BatchNorm layers that are used never, in some batches, once and twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never = nn.BatchNorm1d(8)
        self.sometimes = nn.BatchNorm1d(8)
        self.once = nn.BatchNorm1d(8, momentum=0.3)
        self.twice = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(x)
        if x.shape[0] < 16:  # the last batch of an epoch
            x = self.sometimes(x)
        return self.fc(self.twice(self.twice(x) + 1))


def test_each_batchnorm_counts_its_own_batches() -> None:
    model = Norms()
    loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.05))
    model.never.running_mean += 5  # type: ignore[operator]

    class Trained(AbstractCallback):
        def on_train_begin(self) -> None:
            self.swa = AveragedModel(copy.deepcopy(model))

        def on_epoch_end(self) -> None:
            self.swa.update_parameters(model)

    trained = Trained("trained")
    loop.fit(2, callbacks=[trained, StochasticWeightAveraging(start=0)])
    by_hand = trained.swa.module
    update_bn(((x,) for x, _ in loop.train_loader), by_hand)
    for name in ("sometimes", "once", "twice"):
        ours, theirs = getattr(model, name), getattr(by_hand, name)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        assert ours.num_batches_tracked == theirs.num_batches_tracked
    assert torch.equal(model.never.running_mean, torch.full((8,), 5.0))  # type: ignore[arg-type]
    assert model.once.momentum == 0.3


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_training_continues_from_the_trained_weights_with_several_averages(
    reverse: bool, resumed: bool, tmp_path: Path
) -> None:
    def made() -> tuple[TrainLoop, list[Any]]:
        model = Norms()
        averages = [StochasticWeightAveraging(start=0), ExponentialMovingAverage(0.9)]
        loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.05))
        return loop, [*(averages[::-1] if reverse else averages), ModelCheckpoint(tmp_path)]

    whole, callbacks = made()
    whole.fit(4, callbacks=callbacks[1:2])  # only the last average
    loop, callbacks = made()
    loop.fit(2, callbacks=callbacks)
    if resumed:
        loop, callbacks = made()
    loop.fit(4 if resumed else 2, callbacks=callbacks, resume_from="last" if resumed else None)
    assert loop.history["val_loss"] == whole.history["val_loss"]
    torch.testing.assert_close(loop.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["second fit", "pieces", "resumed"])
def test_training_continues_with_the_statistics_of_the_trained_weights(way: str, tmp_path: Path) -> None:
    def loop() -> TrainLoop:
        model = Norms()
        return make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.05))

    def fit(loop: TrainLoop, swa: StochasticWeightAveraging | None = None, **kwargs: Any) -> None:
        average = swa or StochasticWeightAveraging(start=0)
        loop.fit(callbacks=[average, ModelCheckpoint(tmp_path / kwargs.pop("folder", "other"))], **kwargs)

    whole, parts, swa = loop(), loop(), StochasticWeightAveraging(start=0)
    fit(whole, num_epochs=4)
    if way == "second fit":
        fit(parts, swa, num_epochs=2)
        fit(parts, swa, num_epochs=2)
    elif way == "pieces":
        for number in (9, 8, 11):
            fit(parts, swa, num_iterations=number)
    else:
        fit(loop(), num_epochs=2, folder="kept")
        fit(parts, num_epochs=4, folder="kept", resume_from="last")
    assert parts.history["val_loss"] == whole.history["val_loss"]
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_statistics_of_layers_in_evaluation_mode_stay() -> None:
    model = Norms()
    model.twice.eval()
    before = {name: value.clone() for name, value in model.twice.state_dict().items()}
    make_loop(model).fit(2, callbacks=[StochasticWeightAveraging(start=0)])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(model.twice.state_dict()[name], before[name])
    assert model.once.num_batches_tracked == STEPS_PER_EPOCH


def test_statistics_of_a_model_that_is_one_graph() -> None:
    data = TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))
    models = [nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for compiled, net in zip((False, {"fullgraph": True, "backend": "eager"}), models, strict=True):
        sgd = optim.SGD(net.parameters(), lr=0.1)
        loop = cpu_loop(Layers(net), DataLoader(data, 8), sgd, compile=compiled)
        loop.fit(2, callbacks=[StochasticWeightAveraging(start=0)])
    for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_that_is_added_while_the_rate_changes_begins_with_its_own_rate() -> None:
    class Unfreeze(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("unfreeze", execution_order=-100)
            self.rates: list[list[float]] = []

        def on_epoch_begin(self) -> None:
            loop = self.train_loop_obj
            if loop.epoch == 2:
                loop.optimizer.add_param_group({"params": [loop.model.fc.bias], "lr": 0.01})

        def on_epoch_end(self) -> None:
            self.rates.append([group["lr"] for group in self.train_loop_obj.optimizer.param_groups])

    model, unfreeze = Net(), Unfreeze()
    loop = make_loop(model, optimizer=optim.SGD([model.fc.weight], lr=0.1))
    swa = StochasticWeightAveraging(0.05, start=1, anneal_epochs=2, anneal_strategy="linear")
    loop.fit(4, callbacks=[unfreeze, swa])
    expected = [[0.1], [0.1], [0.075, 0.03], [0.05, 0.05]]
    assert [pytest.approx(rates) for rates in expected] == unfreeze.rates


class Conditioned(nn.BatchNorm1d):
    """BatchNorm that takes a second input."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + shift


def test_statistics_of_a_batchnorm_with_two_inputs() -> None:
    class Shifts(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = Conditioned(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(x, x.mean()))

    loop = make_loop(Shifts())
    loop.fit(num_epochs=1, callbacks=[StochasticWeightAveraging(0.1, start=0)])
    means = [x.mean(0) for x, _ in loop.train_loader]
    torch.testing.assert_close(loop.model.norm.running_mean, torch.stack(means).mean(0))
