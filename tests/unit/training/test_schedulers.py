"""Learning rate schedules: torch's own, stepped once a step or an epoch, whatever the step is made of."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Scores, make_loop
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from conftest import make_data
from trainloop import AbstractCallback, MultiOptimizer
from trainloop.callbacks import AbstractScheduler, LearningRateMonitor, LRScheduler, ModelCheckpoint
from trainloop.checkpoint.plain import plain
from trainloop.errors import ConfigurationError
from trainloop.schedulers import warmup

# Most tests here are not about lengths; those that are ask for the warning, or make it an error.
pytestmark = pytest.mark.filterwarnings("ignore:.*the schedule ends after:UserWarning")

WEIGHT = [nn.Parameter(torch.ones(2))]


class Rates(AbstractCallback):
    """The learning rate of each step, and of each epoch's end."""

    def __init__(self) -> None:
        super().__init__("rates", execution_order=1000)
        self.steps: list[float] = []
        self.epochs: list[float] = []

    def on_after_gradient_update(self) -> None:
        self.steps.append(float(self.train_loop_obj.optimizer.param_groups[0]["lr"]))

    def on_epoch_end(self) -> None:
        self.epochs.append(float(self.train_loop_obj.optimizer.param_groups[0]["lr"]))


def rates_by_hand(make: Any, count: int, lr: float = 0.1) -> list[float]:
    optimizer = optim.SGD(WEIGHT, lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


class WarmUp(lr_scheduler.LRScheduler):
    """Holds the scheduler that follows it; torch's ``state_dict`` returns that object."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.after = lr_scheduler.CosineAnnealingLR(optimizer, 9)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch < 4:
            return [rate * (self.last_epoch + 1) / 4 for rate in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()


class Stateless:
    """A class of one's own, which is not torch's and has no ``state_dict``; it holds another scheduler of its kind."""

    def __init__(self, optimizer: optim.Optimizer, held: bool = False) -> None:
        self.optimizer, self.count = optimizer, 0
        self.decay = lambda count: 0.9**count
        self.after = None if held else Stateless(optimizer, held=True)

    def step(self) -> None:
        self.count += 1
        if self.after is not None and self.count > 3:
            self.after.step()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * self.decay(self.count)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def sequential(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 3])]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


SCHEDULES = [
    pytest.param(lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.5}, id="StepLR"),
    pytest.param(lr_scheduler.MultiStepLR, {"milestones": [2, 5]}, id="MultiStepLR"),
    pytest.param(lr_scheduler.CosineAnnealingLR, {"T_max": 8}, id="CosineAnnealingLR"),
    pytest.param(lr_scheduler.OneCycleLR, {"max_lr": 0.2, "total_steps": 40}, id="OneCycleLR"),
    pytest.param(lr_scheduler.LambdaLR, {"lr_lambda": lambda n: 0.9**n}, id="LambdaLR"),
    pytest.param(sequential, {}, id="a function: SequentialLR"),
    pytest.param(WarmUp, {}, id="a scheduler that holds another"),
    pytest.param(Stateless, {}, id="a class without state_dict"),
]


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("scheduler, arguments", SCHEDULES)
def test_any_scheduler_of_torch(scheduler: Any, arguments: dict[str, Any], interval: Any) -> None:
    expected = rates_by_hand(lambda optimizer: scheduler(optimizer, **arguments), 12)
    loop, rates = make_loop(), Rates()
    loop.fit(num_epochs=3, callbacks=[rates, LRScheduler(scheduler, interval, **arguments)], grad_accumulation=3)
    # Seven batches are three steps: two of three micro-batches, one of one.
    assert rates.steps == [expected[i if interval == "step" else i // 3] for i in range(9)]


@pytest.mark.parametrize("scheduler, arguments", SCHEDULES)
def test_goes_on_after_resuming(scheduler: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    expected = rates_by_hand(lambda optimizer: scheduler(optimizer, **arguments), 14)

    def callbacks(rates: Rates) -> list[AbstractCallback]:
        schedule = LRScheduler(scheduler, "step", **arguments)
        return [schedule, rates, ModelCheckpoint(tmp_path / "checkpoints", every_n_steps=5, every_n_epochs=None)]

    first, second = Rates(), Rates()
    make_loop(seed=0).fit(num_iterations=5, callbacks=callbacks(first))
    make_loop(seed=0).fit(num_iterations=14, callbacks=callbacks(second), resume_from="last")
    assert first.steps + second.steps == expected


@pytest.mark.parametrize("scheduler, arguments", SCHEDULES)
@pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer does not step here
def test_state_can_stand_in_a_checkpoint(scheduler: Any, arguments: dict[str, Any]) -> None:
    """And what comes back from there, where dicts of any kind are dicts, is a state to go on with."""
    loop = make_loop()
    schedule = LRScheduler(scheduler, "step", **arguments)
    loop.fit(num_iterations=3, callbacks=[schedule])
    loop = make_loop()
    again = LRScheduler(scheduler, "step", **arguments)
    again.register_train_loop_object(loop)
    again.on_train_begin()
    loop.optimizer.load_state_dict(schedule.train_loop_obj.optimizer.state_dict())
    again.load_state_dict(plain(schedule.state_dict()))
    for _ in range(6):
        again.scheduler.step()
        schedule.scheduler.step()
    assert again.scheduler.get_last_lr() == schedule.scheduler.get_last_lr()


def test_a_second_fit_goes_on_with_the_schedule() -> None:
    expected = rates_by_hand(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), 14)
    loop, rates = make_loop(), Rates()
    schedule = LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.9)
    for _ in range(2):
        loop.fit(num_epochs=1, callbacks=[schedule, rates])
    assert rates.steps == expected
    # With another loop it begins anew.
    other, rates = make_loop(), Rates()
    other.fit(num_epochs=1, callbacks=[schedule, rates])
    assert rates.steps == expected[:7]


def test_frequency() -> None:
    loop, rates = make_loop(), Rates()
    loop.fit(num_epochs=1, callbacks=[rates, LRScheduler(lr_scheduler.ExponentialLR, "step", frequency=3, gamma=0.5)])
    assert rates.steps == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025]


def test_a_scheduler_that_is_made_already() -> None:
    loop, rates = make_loop(), Rates()
    made = lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    callback = LRScheduler(made)
    loop.fit(num_epochs=2, callbacks=[callback, rates])
    assert callback.scheduler is made
    assert rates.epochs == [0.05, 0.025]


def test_not_for_a_step_that_amp_skipped(recwarn: pytest.WarningsRecorder) -> None:
    class Skips(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("skips", execution_order=-1)
            self.pattern: list[bool] = []

        def on_after_optimizer_step(self) -> None:
            self.pattern.append(self.train_loop_obj.step_skipped)

    loop = make_loop(use_amp={"init_scale": 2.0**40, "growth_interval": 1000})
    skips, rates = Skips(), Rates()
    loop.fit(num_epochs=6, callbacks=[skips, rates, LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.9)])
    assert skips.pattern[0]
    assert not skips.pattern[-1]
    taken = 0
    for skipped, rate in zip(skips.pattern, rates.steps, strict=True):
        assert rate == pytest.approx(0.1 * 0.9**taken)
        taken += not skipped
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_plateau() -> None:
    values: list[Any] = [1.0, 1.0, None, 1.0, 2.0, 3.0]
    optimizer = optim.SGD(WEIGHT, lr=0.1)
    by_hand = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1, factor=0.5)
    expected = []
    for value in values:
        if value is not None:  # an epoch without a value is no epoch without improvement
            by_hand.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    plateau = LRScheduler(lr_scheduler.ReduceLROnPlateau, monitor="score", mode="max", patience=1, factor=0.5)
    loop, rates = make_loop(validation=False), Rates()
    loop.fit(num_epochs=6, callbacks=[plateau, Scores(values), rates])
    assert rates.epochs == expected
    assert expected[3] < expected[0]


def two_optimizers() -> tuple[Net, MultiOptimizer]:
    model = Net()
    return model, MultiOptimizer([optim.SGD([model.fc.weight], lr=0.1), optim.SGD([model.fc.bias], lr=0.2)])


def test_each_optimizer_has_its_own() -> None:
    model, both = two_optimizers()
    loop = make_loop(model, optimizer=both)
    schedules: list[AbstractCallback] = [
        LRScheduler(lr_scheduler.ExponentialLR, optimizer_idx=0, gamma=0.5),
        LRScheduler(lr_scheduler.ExponentialLR, optimizer_idx=both[1], gamma=0.25),
        LRScheduler(lr_scheduler.ExponentialLR(both[1], gamma=0.5)),
    ]
    loop.fit(num_epochs=1, callbacks=schedules)
    assert [group["lr"] for group in both.param_groups] == [0.05, 0.025]


@pytest.mark.parametrize("index", [None, 2, -1, "decoder"])
def test_which_optimizer_must_be_told(index: Any) -> None:
    model, both = two_optimizers()
    words = (
        "the loop has 2 optimizers. Choose one"
        if index is None
        else f"optimizer_idx={index!r}: must be the index of one of the loop's optimizers (0 to 1)"
    )
    with pytest.raises(ConfigurationError) as error:
        make_loop(model, optimizer=both).fit(
            num_epochs=1, callbacks=[LRScheduler(lr_scheduler.StepLR, optimizer_idx=index, step_size=1)]
        )
    assert words in str(error.value)


def test_a_monitor_of_a_scheduler_that_reads_no_metric_is_refused() -> None:
    schedule = LRScheduler(lr_scheduler.StepLR, monitor="val_loss", step_size=1)
    with pytest.raises(ConfigurationError, match="monitor='val_loss': StepLR reads no metric"):
        make_loop().fit(num_epochs=1, callbacks=[schedule])


def test_another_optimizer_s_scheduler() -> None:
    foreign = lr_scheduler.StepLR(optim.SGD(WEIGHT, lr=0.1), 1)
    with pytest.raises(ConfigurationError, match="the given SGD is not one of the loop's optimizers"):
        make_loop().fit(num_epochs=1, callbacks=[LRScheduler(foreign)])
    loop = make_loop()
    loop.optimizer = None
    with pytest.raises(ConfigurationError, match="LRScheduler: the loop has no optimizer"):
        LRScheduler(lr_scheduler.StepLR, step_size=1).register_train_loop_object(loop)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: LRScheduler(lr_scheduler.StepLR(optim.SGD(WEIGHT, lr=1), 1), gamma=0.5),
            "so these arguments can't be passed to it: gamma. Pass the class: LRScheduler(StepLR, ...)",
        ),
        (
            lambda: LRScheduler(lr_scheduler.ReduceLROnPlateau, "step"),
            "metrics are known only once per epoch. Use interval",
        ),
        (
            lambda: LRScheduler(lr_scheduler.StepLR, optim.SGD(WEIGHT, lr=1), step_size=1),
            "gets the loop's optimizer. Leave",
        ),  # type: ignore[arg-type]
        (
            lambda: LRScheduler(lr_scheduler.StepLR, optimizer=None, step_size=1),
            "gets the loop's optimizer. Leave it out",
        ),
    ],
)
def test_arguments_that_cannot_work(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


class TakesTheEpoch:
    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None:
        raise AssertionError("not called")


@pytest.mark.parametrize(
    "schedule, words",
    [
        (LRScheduler(TakesTheEpoch), r"TakesTheEpoch.step\(\) can't be called without arguments: .* 'epoch'. If"),
        (LRScheduler(lr_scheduler.StepLR, size=1), r"StepLR can't be called with .* \(size\): .*It takes .*step_size"),
        (LRScheduler(lambda optimizer: None), "scheduler made None: it must be a function"),
    ],
)
def test_what_is_no_schedule_is_known_before_training(schedule: LRScheduler, words: str) -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=words):
        loop.fit(num_epochs=1, callbacks=[schedule])
    assert loop.global_step == 0


def test_a_function_may_make_a_plateau_scheduler() -> None:
    with pytest.raises(ConfigurationError, match="metrics are known only once per epoch"):
        make_loop().fit(num_epochs=1, callbacks=[LRScheduler(lambda o: lr_scheduler.ReduceLROnPlateau(o), "step")])


def test_plateau_without_validation_is_known_at_once() -> None:
    with pytest.raises(
        ConfigurationError, match="LRScheduler: monitor='val_loss', but the loop has no validation_loader"
    ):
        make_loop(validation=False).fit(num_epochs=1, callbacks=[LRScheduler(lr_scheduler.ReduceLROnPlateau)])


class Own(AbstractScheduler, AbstractCallback):
    """As AIToolbox's users write them: the scheduler is put into ``self.scheduler``, and stepped by hand."""

    def on_train_loop_registration(self) -> None:
        self.scheduler = lr_scheduler.StepLR(self.train_loop_obj.optimizer, 1, gamma=0.5)

    def on_epoch_end(self) -> None:
        self.scheduler.step()


@pytest.mark.filterwarnings("error:Detected call of:UserWarning")
def test_a_resumed_run_may_begin_with_a_step_of_the_schedule(tmp_path: Path) -> None:
    """The checkpoint of an epoch's last step is resumed at the end of this epoch, where the schedule steps."""

    def halved() -> LRScheduler:
        return LRScheduler(lr_scheduler.StepLR, step_size=1, gamma=0.5)

    whole = make_loop(seed=0)
    saves = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=STEPS_PER_EPOCH)
    whole.fit(num_epochs=2, callbacks=[halved(), saves])
    again = make_loop(seed=0)
    first = sorted(tmp_path.glob("*.pt"))[0]
    again.fit(num_epochs=2, callbacks=[halved(), ModelCheckpoint(tmp_path / "x")], resume_from=first)
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert again.history["loss"] == whole.history["loss"]


def test_a_scheduler_callback_of_one_s_own(tmp_path: Path) -> None:
    make_loop().fit(num_epochs=2, callbacks=[Own("own"), ModelCheckpoint(tmp_path)])
    loop, own = make_loop(), Own("own")
    loop.fit(num_epochs=3, callbacks=[own, ModelCheckpoint(tmp_path)], resume_from="last")
    assert own.scheduler.last_epoch == 3
    assert loop.optimizer.param_groups[0]["lr"] == 0.0125
    assert Own("own").state_dict() == {}


@pytest.mark.parametrize(
    "callback, factor",
    [
        (warmup.ConstantWithWarmupScheduler(4), lambda n: min(n / 4, 1.0)),
        (warmup.LinearWithWarmupScheduler(4, 14), lambda n: n / 4 if n < 4 else (14 - n) / 10),
        (
            warmup.CosineWithWarmupScheduler(4, 14),
            lambda n: n / 4 if n < 4 else 0.5 * (1 + math.cos(math.pi * (n - 4) / 10)),
        ),
        (
            warmup.HardRestartsCosineWithWarmupScheduler(4, 14, num_cycles=2),
            lambda n: n / 4 if n < 4 else 0.5 * (1 + math.cos(math.pi * ((n - 4) / 5 % 1))),
        ),
    ],
    ids=["constant", "linear", "cosine", "restarts"],
)
def test_warmup(callback: Any, factor: Any) -> None:
    pickle.dumps((callback.factory, callback.factory_kwargs))  # no closures: it goes to other processes as it is
    loop, rates = make_loop(), Rates()
    loop.fit(num_epochs=2, callbacks=[callback, rates])
    assert rates.steps == pytest.approx([0.1 * factor(n) for n in range(2 * STEPS_PER_EPOCH)], abs=1e-12)
    loop.fit(num_epochs=1, callbacks=[callback, rates])  # past the end: it stays at 0, and does not rise again
    if "Constant" not in type(callback).__name__ and "Cosine" not in type(callback).__name__:
        assert rates.steps[-1] == 0.0


def test_warmup_resumes_by_the_arguments_it_is_given() -> None:
    long, loop = warmup.LinearWithWarmupScheduler(0, 100), make_loop()
    short = warmup.LinearWithWarmupScheduler(0, 14)
    make_loop().fit(num_epochs=1, callbacks=[short])
    long.register_train_loop_object(loop)
    long.load_state_dict(short.state_dict())
    long.scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 92 / 100)


def test_learning_rate_monitor() -> None:
    loop = make_loop()
    loop.fit(
        num_epochs=2,
        callbacks=[LearningRateMonitor(every_n_steps=3), LRScheduler(lr_scheduler.ExponentialLR, gamma=0.1)],
    )
    assert loop.history["lr"] == [0.1, pytest.approx(0.01)]
    assert loop.history.step_indices("lr") == [1, 3, 6, 9, 12]


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["Linear", "Cosine", "HardRestartsCosine"])
def test_a_schedule_takes_the_length_of_its_fit(name: str) -> None:
    make = getattr(warmup, f"{name}WithWarmupScheduler")
    rates, known = Rates(), Rates()
    make_loop().fit(num_epochs=2, callbacks=[make(2), rates], grad_accumulation=2)
    make_loop().fit(num_epochs=2, callbacks=[make(2, num_training_steps=8), known], grad_accumulation=2)
    assert rates.steps == known.steps
    assert len(rates.steps) == 8
    assert 0 < rates.steps[-1] < 0.03  # the next step would have none


def test_a_second_fit_extends_a_schedule_without_a_length() -> None:
    loop, schedule, rates = make_loop(), warmup.LinearWithWarmupScheduler(0), Rates()
    loop.fit(num_epochs=1, callbacks=[schedule, rates])
    with pytest.warns(UserWarning, match=r"extended to 14 optimizer steps, .* jumps from 0 to 0\.05"):
        loop.fit(num_epochs=1, callbacks=[schedule, rates])
    expected = [0.1 * (1 - step / 7) for step in range(7)] + [0.1 * (1 - step / 14) for step in range(7, 14)]
    assert rates.steps == pytest.approx(expected)


def test_hard_restarts_restart() -> None:
    rates = Rates()
    schedule = warmup.HardRestartsCosineWithWarmupScheduler(0, num_cycles=2)
    make_loop().fit(num_epochs=2, callbacks=[schedule, rates])
    assert rates.steps[0] == rates.steps[7] == 0.1
    once = partial_factor(warmup.HardRestartsCosineWithWarmupScheduler(0, 10))
    assert once(9) < 0.05 < 0.9 < once(1)  # down once, as Transformers' default


def partial_factor(schedule: Any) -> Any:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return schedule.factory(optimizer, **schedule.factory_kwargs).lr_lambdas[0]


@pytest.mark.parametrize(
    "schedule, words",
    [
        (
            lambda: warmup.LinearWithWarmupScheduler(0, 7),
            "ends after optimizer step 7, but the training ends after .* step 14",
        ),
        (lambda: warmup.CosineWithWarmupScheduler(0, 70), "ends after optimizer step 70, but the training ends after"),
        (lambda: LRScheduler(lr_scheduler.PolynomialLR, interval="step", total_iters=7), "ends after optimizer step 7"),
        (
            lambda: LRScheduler(lr_scheduler.PolynomialLR, interval="step", frequency=2, total_iters=4),
            "step 8, but the training",
        ),
        (
            lambda: LRScheduler(lr_scheduler.OneCycleLR, interval="step", max_lr=0.1, total_steps=28),
            "ends after optimizer step 28, but the training ends after optimizer step 14",
        ),
        (
            lambda: LRScheduler(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=14),
            r"after epoch 14, but .* after epoch 2 \(optimizer step 14 of this fit\).*pass interval='step'",
        ),
        (lambda: LRScheduler(lr_scheduler.CosineAnnealingLR, "step", T_max=2), "ends after optimizer step 2, but"),
        (lambda: LRScheduler(lr_scheduler.CosineAnnealingLR, T_max=14), "ends after epoch 14, but"),
        (lambda: LRScheduler(lr_scheduler.MultiStepLR, milestones=[5, 10]), "ends after epoch 10, but"),
        (lambda: LRScheduler(lr_scheduler.LinearLR, "step", total_iters=100), "ends after optimizer step 100, but"),
        (lambda: LRScheduler(sequential), "ends after epoch 7, but"),
        (lambda: warmup.ConstantWithWarmupScheduler(50), "ends after optimizer step 50, but"),
    ],
)
def test_a_schedule_of_another_length_than_the_training_is_warned_of_once(schedule: Any, words: str) -> None:
    with pytest.warns(UserWarning, match=words) as caught:
        make_loop().fit(num_epochs=2, callbacks=[schedule()])
    assert len(caught) == 1


@pytest.mark.filterwarnings("error", "ignore:The epoch parameter in")  # PyTorch 2.6, of its own SequentialLR
@pytest.mark.parametrize(
    "schedule",
    [
        lambda: LRScheduler(lr_scheduler.LinearLR, "step", total_iters=5),
        lambda: LRScheduler(lr_scheduler.MultiStepLR, "step", milestones=[3, 5]),
        lambda: LRScheduler(sequential, "step"),
        lambda: LRScheduler(lr_scheduler.StepLR, step_size=100),
        lambda: warmup.ConstantWithWarmupScheduler(5),
        lambda: LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=14),
    ],
)
def test_a_schedule_that_may_end_earlier_is_no_mistake(schedule: Any) -> None:
    make_loop().fit(num_epochs=2, callbacks=[schedule()])


def test_a_one_cycle_that_is_one_step_too_short_is_told_before_its_error() -> None:
    schedule = LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=13)
    with (
        pytest.warns(UserWarning, match="ends after optimizer step 13, but .* after optimizer step 14"),
        pytest.raises(ValueError, match="Tried to step 14 times"),
    ):
        make_loop().fit(num_epochs=2, callbacks=[schedule])


def test_iterations_are_epochs_too() -> None:
    with pytest.warns(UserWarning, match=r"after epoch 14, but .* after epoch 2 \(optimizer step 14 of this fit\)"):
        make_loop().fit(num_iterations=14, callbacks=[LRScheduler(lr_scheduler.CosineAnnealingLR, T_max=14)])


@pytest.mark.filterwarnings("error")
def test_a_rate_that_an_ended_schedule_has_left_is_told() -> None:
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[LRScheduler(lr_scheduler.CosineAnnealingLR, "step", T_max=14)])
    with pytest.warns(UserWarning, match=r"has left a learning rate of .* \(initially 0\.1\), and this fit has no"):
        loop.fit(num_epochs=1)
    loop.optimizer.param_groups[0]["lr"] = 0.1
    loop.fit(num_epochs=1)
    schedule = LRScheduler(lr_scheduler.CosineAnnealingLR, "step", T_max=7)
    loop.fit(num_epochs=1, callbacks=[schedule])
    with pytest.warns(UserWarning, match="ends after optimizer step 7, but .* after optimizer step 14"):
        loop.fit(num_epochs=1, callbacks=[schedule])


def test_a_schedule_without_a_length_needs_a_loader_that_has_one() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(make_data())

    loop = make_loop()
    loop.train_loader = torch.utils.data.DataLoader(Stream(), 16)
    with pytest.raises(ConfigurationError, match=r"train_loader has no length.*Pass num_training_steps"):
        loop.fit(num_epochs=1, callbacks=[warmup.LinearWithWarmupScheduler(0)])
    assert loop.num_optimizer_steps(num_epochs=1) is None
    assert loop.num_optimizer_steps(num_iterations=9, grad_accumulation=2) == 5


def test_the_number_of_optimizer_steps_is_known_before_fit() -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match="num_epochs or num_iterations"):
        loop.num_optimizer_steps()
    assert loop.num_optimizer_steps(num_epochs=2) == 2 * STEPS_PER_EPOCH
    assert loop.num_optimizer_steps(num_epochs=2, grad_accumulation=3) == 2 * 3  # 3, 3 and 1 micro-batches
    for wrong in ({"num_epochs": -1}, {"num_epochs": 1.5}, {"num_iterations": True}, {"grad_accumulation": 0}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}=.*must be an int"):
            loop.num_optimizer_steps(**{"num_epochs": 2, **wrong})
    with pytest.raises(ConfigurationError, match="num_epochs or num_iterations, not both"):
        loop.num_optimizer_steps(num_epochs=1, num_iterations=2)
    assert loop.num_optimizer_steps(num_iterations=9, grad_accumulation=3) == 3 + 1
    of_ranks = make_loop(gpu_mode="ddp", accelerator="cpu", devices=2)
    assert of_ranks.num_optimizer_steps(num_epochs=1) == 4  # 101 samples, 32 a step
    for kwargs in ({"num_epochs": 2, "grad_accumulation": 3}, {"num_iterations": 9, "grad_accumulation": 3}):
        trained = make_loop()
        trained.fit(**kwargs)
        assert trained.global_step == loop.num_optimizer_steps(**kwargs)


@pytest.mark.parametrize("devices", [None, 1])
def test_the_ranks_of_a_launcher_count_before_fit(monkeypatch: pytest.MonkeyPatch, devices: int | None) -> None:
    two_hosts = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    for name, value in {**two_hosts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    loop = make_loop(gpu_mode="ddp", accelerator="cpu", **({} if devices is None else {"devices": devices}))
    assert (loop.num_optimizer_steps(num_epochs=1), loop.effective_batch_size) == (4, 32)  # 101 samples
    assert (loop.rank, loop.world_size, loop.is_main_process()) == (1, 2, False)
    alone = make_loop()
    assert (alone.rank, alone.world_size, alone.is_main_process()) == (0, 1, True)
    assert (alone.num_optimizer_steps(num_epochs=1), alone.effective_batch_size) == (7, 16)


def test_the_number_of_steps_is_known_of_a_fit_that_continues_an_epoch(tmp_path: Path) -> None:
    loop, length = make_loop(), {"num_iterations": 10, "grad_accumulation": 2}
    for trained in (6, 11, 17):  # of 7 batches, an epoch has 4 steps; the calls begin after 0, 3 and 6 batches
        planned, before = loop.num_optimizer_steps(**length), loop.global_step
        within = Within(lambda tl: tl.num_optimizer_steps())
        schedule = LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=None)
        loop.fit(
            **length, callbacks=[within, schedule, ModelCheckpoint(tmp_path / str(trained), every_n_steps=1, keep=9)]
        )
        assert loop.global_step == trained
        assert {planned, *within.values} == {trained - before} == {schedule.scheduler.total_steps}
    third = next(path for path in sorted((tmp_path / "17").iterdir()) if "=00000014" in path.name)
    schedule = LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=None)
    loop = make_loop()
    loop.fit(**length, callbacks=[schedule, ModelCheckpoint(tmp_path)], resume_from=third)
    assert (loop.global_step, schedule.scheduler.total_steps) == (17, 6)


class Within(AbstractCallback):
    def __init__(self, read: Any) -> None:
        super().__init__("within")
        self.read, self.values = read, set[Any]()

    def on_train_begin(self) -> None:
        self.values.add(self.read(self.train_loop_obj))

    on_batch_end = on_train_end = on_train_begin


@pytest.mark.parametrize(
    ("schedule", "length", "expected"),
    [
        (LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, total_steps=None), {"num_epochs": 2}, 14),
        (LRScheduler(lr_scheduler.CosineAnnealingLR, T_max=None), {"num_epochs": 3}, 3),
        (LRScheduler(lr_scheduler.CosineAnnealingLR, "step", T_max=None), {"num_iterations": 9}, 9),
        (LRScheduler(lr_scheduler.LinearLR, "step", total_iters=lambda n: n // 2), {"num_epochs": 2}, 7),
        (LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.1, epochs=1, steps_per_epoch=14), {"num_epochs": 2}, 14),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_length_may_be_that_of_the_run(
    schedule: LRScheduler, length: dict[str, int], expected: int, accumulation: int
) -> None:
    tl = make_loop()
    tl.fit(**length, grad_accumulation=accumulation, callbacks=[schedule])
    state = schedule.scheduler.state_dict()
    if accumulation == 2 and schedule.interval == "step" and "epochs" not in schedule.factory_kwargs:
        expected = {14: 8, 9: 5, 7: 4}[expected]  # an epoch has 7 batches, so 4 steps
    assert next(state[name] for name in ("total_steps", "T_max", "total_iters") if name in state) == expected


def test_a_length_that_is_unknown_is_an_error() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from make_data()

    tl = make_loop()
    tl.train_loader = DataLoader(Stream(), 16)
    with pytest.raises(ConfigurationError, match=r"total_steps is to be computed .* has no length"):
        tl.fit(num_epochs=1, callbacks=[LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=1.0, total_steps=None)])


def test_groups_with_equal_names_are_logged_apart() -> None:
    """A rate is the largest of an epoch: under one name, the smaller one would not be seen."""
    model = Net()
    groups = [{"params": [model.fc.weight], "lr": 0.1}, {"params": [model.fc.bias], "lr": 0.01}]
    loop = make_loop(model, optimizer=optim.SGD([{**group, "name": "head"} for group in groups]))
    loop.fit(num_epochs=1, callbacks=[LearningRateMonitor()])
    assert (loop.history["lr/head/group0"], loop.history["lr/head/group1"]) == ([0.1], [0.01])


class AddsAGroup(AbstractCallback):
    """Unfreeze the bias in the second epoch."""

    def on_epoch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.epoch == 1:
            loop.optimizer.add_param_group({"params": [loop.model.fc.bias], "lr": 0.05})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n),
        lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda n: 0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        sequential,
    ],
)
def test_an_added_group_is_scheduled_as_by_torch_or_named(make: Any) -> None:
    optimizer = optim.SGD(WEIGHT, lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    expected: list[float] | None = None
    try:
        for epoch in range(3):
            if epoch == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.05})
            optimizer.step()
            scheduler.step()
        expected = [group["lr"] for group in optimizer.param_groups]
    except (ValueError, KeyError):  # depends on torch's version
        pass
    model = Net()
    loop = make_loop(model, optimizer=optim.SGD([model.fc.weight], lr=0.1, momentum=0.9))
    callbacks = [AddsAGroup("adds a group"), LRScheduler(make)]
    if expected is None:
        message = r"was made for 1 parameter group of the optimizer, which has 2 now, .* Give the optimizer all groups"
        with pytest.raises(ConfigurationError, match=message):
            loop.fit(num_epochs=3, callbacks=callbacks)
    else:
        loop.fit(num_epochs=3, callbacks=callbacks)
        assert [group["lr"] for group in loop.optimizer.param_groups] == expected


@pytest.mark.parametrize(
    ("kind", "interval", "name", "ends"),
    [
        (lr_scheduler.PolynomialLR, "epoch", "total_iters", "epoch 2. .* after epoch 4"),
        (lr_scheduler.CosineAnnealingLR, "step", "T_max", "step 14. .* after optimizer step 28"),
        (lr_scheduler.LinearLR, "step", "total_iters", "step 14. .* after optimizer step 28"),
    ],
)
def test_a_run_that_resumes_for_longer_warns_of_the_shorter_schedule(
    tmp_path: Path, kind: Any, interval: Any, name: str, ends: str
) -> None:
    def fit(epochs: int) -> None:
        schedule = LRScheduler(kind, interval, **{name: None})
        make_loop(seed=0).fit(epochs, callbacks=[schedule, ModelCheckpoint(tmp_path)], resume_from="last")

    fit(2)
    fit(2)  # nothing is left to do: no warning
    with pytest.warns(UserWarning, match=f"continues the schedule of its checkpoint, which ends after .*{ends}"):
        fit(4)


def test_a_warm_up_of_another_length_is_no_reason_to_warn(tmp_path: Path) -> None:
    for epochs in (2, 3):
        schedule = LRScheduler(lr_scheduler.LinearLR, "step", total_iters=2 * epochs)
        make_loop(seed=0).fit(epochs, callbacks=[schedule, ModelCheckpoint(tmp_path)], resume_from="last")


class Replace(AbstractCallback):
    """Gives the loop another optimizer in a hook: after these steps, or once."""

    def __init__(self, hook: str, *steps: int) -> None:
        super().__init__("replace")
        self.optimizer: Any = None
        self.steps = steps
        setattr(self, hook, self.replace)

    def replace(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step in self.steps or (self.optimizer is None and not self.steps):
            self.optimizer = optim.SGD(loop.model.parameters(), lr=0.5, momentum=0.9)
            if isinstance(loop.optimizer, MultiOptimizer):
                loop.optimizer.optimizer_list[0] = self.optimizer
            else:
                loop.optimizer = self.optimizer


@pytest.mark.parametrize("in_list", [False, True], ids=["assigned", "in a MultiOptimizer"])
@pytest.mark.parametrize(
    ("hook", "before"),
    [
        ("on_multiprocess_start", 0),
        ("on_train_begin", 0),
        ("on_after_optimizer_step", 1),
        ("on_batch_end", 1),
        ("on_epoch_end", 7),
    ],
)
@pytest.mark.parametrize(
    ("make", "by_hand"),
    [
        (
            lambda: LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.9),
            lambda optimizer, steps: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        ),
        (
            lambda: LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.2, total_steps=None),
            lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps),
        ),
        (
            lambda: warmup.LinearWithWarmupScheduler(2),
            lambda optimizer, steps: lr_scheduler.LambdaLR(
                optimizer, lambda step: step / 2 if step < 2 else max(0.0, 1 - (step - 2) / (steps - 2))
            ),
        ),
    ],
)
def test_another_optimizer_begins_the_schedule_again_for_the_steps_left(
    make: Any, by_hand: Any, hook: str, before: int, in_list: bool
) -> None:
    rates, loop = Rates(), make_loop(seed=0)
    loop.optimizer = MultiOptimizer([loop.optimizer]) if in_list else loop.optimizer
    loop.fit(3, callbacks=[make(), Replace(hook), rates])
    steps = 3 * STEPS_PER_EPOCH
    first = rates_by_hand(lambda optimizer: by_hand(optimizer, steps), before)
    second = rates_by_hand(lambda optimizer: by_hand(optimizer, steps - before), steps - before - 1, lr=0.5)
    assert rates.steps[: steps - 1] == pytest.approx(first + second)


@pytest.mark.parametrize(
    ("hook", "expected"), [("on_train_begin", [0.5, 0.25, 0.125]), ("on_epoch_end", [0.1, 0.5, 0.25])]
)
def test_a_schedule_of_epochs_does_not_step_before_another_optimizer_has_trained(
    hook: str, expected: list[float]
) -> None:
    rates = Rates()
    schedule = LRScheduler(lr_scheduler.ExponentialLR, gamma=0.5)
    make_loop(seed=0).fit(3, callbacks=[schedule, Replace(hook), rates])
    assert rates.steps[::STEPS_PER_EPOCH] == expected


@pytest.mark.parametrize("hook", ["on_after_optimizer_step", "on_batch_end", "on_epoch_end"])
def test_a_schedule_of_epochs_ends_with_the_training_after_another_optimizer(hook: str) -> None:
    schedule = LRScheduler(lr_scheduler.CosineAnnealingLR, T_max=None)
    make_loop(seed=0).fit(3, callbacks=[schedule, Replace(hook, STEPS_PER_EPOCH)])
    assert schedule.scheduler.T_max == schedule.scheduler.last_epoch == 2


def one_cycle() -> LRScheduler:
    return LRScheduler(lr_scheduler.OneCycleLR, "step", max_lr=0.2, total_steps=None)


@pytest.mark.parametrize(("hook", "steps"), [("on_epoch_end", [7, 14, 21]), ("on_train_end", [21])])
def test_each_optimizer_gets_a_schedule_for_its_steps(hook: str, steps: list[int]) -> None:
    loop, rates, schedule = make_loop(seed=0), Rates(), one_cycle()
    loop.fit(3, callbacks=[schedule, Replace(hook, *steps), rates])
    loop.fit(1, callbacks=[schedule, rates])  # an optimizer that the loop gets at the end is for the next fit
    expected = []
    for begin, end, planned in zip([0, *steps], [*steps, 28], [*(21 - n for n in [0, *steps[:-1]]), 7], strict=True):
        expected += rates_by_hand(lambda one: lr_scheduler.OneCycleLR(one, 0.2, planned), end - begin)  # noqa: B023
    assert rates.steps == pytest.approx(expected)


class Around(optim.Optimizer):
    """Contains another optimizer."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_a_schedule_of_a_contained_optimizer_begins_once() -> None:
    loop, rates = make_loop(seed=0), Rates()
    loop.optimizer = Around(loop.optimizer)
    schedule = LRScheduler(lambda one: lr_scheduler.LinearLR(one.inner, 0.25, total_iters=4), "step")
    for _ in range(2):
        loop.fit(1, callbacks=[schedule, rates])
    assert rates.steps == pytest.approx([0.025, 0.04375, 0.0625, 0.08125, *[0.1] * 10])


def test_a_schedule_whose_optimizer_was_replaced_is_an_error() -> None:
    loop = make_loop(seed=0)
    schedule = LRScheduler(lr_scheduler.StepLR(loop.optimizer, 1))
    with pytest.raises(ConfigurationError, match="SGD is not one of the loop's optimizers"):
        loop.fit(3, callbacks=[schedule, Replace("on_epoch_end")])


@pytest.mark.parametrize(
    "make",
    [
        lambda: LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.9),
        lambda: LRScheduler(lr_scheduler.CosineAnnealingLR, T_max=None),
        one_cycle,
        lambda: warmup.CosineWithWarmupScheduler(2),
    ],
)
def test_a_run_with_another_optimizer_resumes_its_schedule(make: Any, tmp_path: Path) -> None:
    def fit(replace: Replace, resume: Path | None = None) -> Any:
        loop = make_loop(seed=0)
        saves = ModelCheckpoint(tmp_path / (resume.stem if resume else "whole"), every_n_steps=2, keep=None)
        loop.fit(3, callbacks=[make(), replace, saves], resume_from=resume)
        return loop.model.state_dict()

    expected = fit(Replace("on_batch_end", 7))
    for step in (8, 14, 20):
        (saved,) = (tmp_path / "whole").glob(f"*step=*{step:02}.pt")
        resumed = fit(Replace("on_train_begin"), saved)
        assert all(torch.equal(resumed[name], expected[name]) for name in expected), step
