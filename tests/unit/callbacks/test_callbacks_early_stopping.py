"""Callbacks that end training early."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Raises, Scores, make_loop
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback
from trainloop.callbacks import (
    EarlyStopping,
    LRScheduler,
    ModelCheckpoint,
    ThresholdEarlyStopping,
    TimeLimit,
    early_stopping,
)
from trainloop.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*by its name, (lower|higher) is better")

NAN = math.nan


@pytest.mark.parametrize(
    "values, arguments, epochs, best, best_epoch",
    [
        pytest.param([1, 2, 3, 4], {"patience": 2}, 4, 4.0, 3, id="improves to the end"),
        pytest.param([1, 1, 5, 5], {}, 2, 1.0, 0, id="no patience: the first epoch without improvement"),
        pytest.param([1, 1, 5, 5], {"patience": 1}, 2, 1.0, 0, id="patience 1 is the same"),
        pytest.param([1, 1, 5, 5, 5, 9], {"patience": 2}, 5, 5.0, 2, id="an improvement starts the count anew"),
        pytest.param([3, 2, 1, 1], {"patience": 1, "mode": "min"}, 4, 1.0, 2, id="lower is better"),
        pytest.param([1, 1.4, 1.9, 3], {"patience": 2, "min_delta": 0.5}, 4, 3.0, 3, id="from the best, not the last"),
        pytest.param([1, 1.4, 1.5, 3], {"patience": 2, "min_delta": 0.5}, 3, 1.0, 0, id="more than min_delta"),
        pytest.param([NAN, NAN, 5], {"patience": 2}, 2, None, 0, id="nan is no improvement"),
        pytest.param([1, None, None, 2, 2, 9], {"patience": 1}, 5, 2.0, 3, id="epochs without a value don't count"),
        pytest.param([2, math.inf, 9], {"patience": 1}, 3, math.inf, 1, id="infinity can be the best"),
    ],
)
def test_stops_after_patience(
    values: list[Any], arguments: dict[str, Any], epochs: int, best: float | None, best_epoch: int
) -> None:
    loop = make_loop(validation=False)
    stopper = EarlyStopping("score", **arguments)
    # Passed first: it runs last all the same, when the epoch's values are there.
    loop.fit(num_epochs=len(values), callbacks=[stopper, Scores(values)])
    assert loop.epoch == epochs
    assert (stopper.best, stopper.best_epoch) == (best, best_epoch)
    assert stopper.stopped_epoch == (epochs - 1 if epochs < len(values) or loop.early_stop else None)


@pytest.mark.parametrize("name, rising_is_better", [("val_loss", False), ("Error_rate", False), ("accuracy", True)])
def test_auto_mode_goes_by_the_name(name: str, rising_is_better: bool) -> None:
    loop = make_loop(validation=True, end_auto_eval=False)
    model_logs_no_such = f"my_{name}"
    loop.fit(num_epochs=4, callbacks=[Scores([1, 2, 3, 4], model_logs_no_such), EarlyStopping(model_logs_no_such)])
    assert loop.epoch == (4 if rising_is_better else 2)


@pytest.mark.usefixtures("events_on_stdout")
def test_says_when_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    make_loop(validation=False).fit(num_epochs=3, callbacks=[Scores([0.5, 0.25, 1]), EarlyStopping("score")])
    assert (
        "EarlyStopping ended training after epoch 2: score = 0.25, best was 0.5 in epoch 1 (mode='max')."
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("events_on_stdout")
def test_says_the_least_difference_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    stopper = EarlyStopping("score", mode="max", min_delta=0.5)
    make_loop(validation=False).fit(num_epochs=3, callbacks=[Scores([0.5, 0.75, 1]), stopper])
    assert "score = 0.75, best was 0.5 in epoch 1 (mode='max', min_delta=0.5)." in capsys.readouterr().out


def test_validation_every_second_epoch() -> None:
    """An old value that is still the newest must not count as one more epoch without improvement."""
    loop = make_loop(end_auto_eval=2)
    stopper = EarlyStopping("val_loss", patience=2)
    loop.fit(num_epochs=8, callbacks=[stopper])
    assert loop.epoch == 8
    assert len(loop.history["val_loss"]) == 4


def test_a_second_fit_has_its_patience_anew() -> None:
    loop = make_loop(validation=False)
    stopper = EarlyStopping("score", patience=2)
    scores = Scores([5, 1, 1, 1, 1, 1, 1])
    loop.fit(num_epochs=7, callbacks=[scores, stopper])
    assert loop.epoch == 3
    loop.fit(num_epochs=4, callbacks=[scores, stopper])
    assert loop.epoch == 5
    assert stopper.best == 5.0


def test_patience_goes_on_after_resuming(tmp_path: Path) -> None:
    values: list[Any] = [5, 1, 1, 1, 1, 1]

    def callbacks() -> list[AbstractCallback]:
        return [Scores(values), EarlyStopping("score", patience=3), ModelCheckpoint(tmp_path / "checkpoints")]

    make_loop(validation=False).fit(num_epochs=2, callbacks=callbacks())
    loop = make_loop(validation=False)
    loop.fit(num_epochs=6, callbacks=callbacks(), resume_from="last")
    assert loop.epoch == 4


@pytest.mark.parametrize("patience, stopped, epochs", [(2, 2, 3), (4, None, 4)])
def test_a_resumed_run_knows_that_it_was_stopped(
    patience: int, stopped: int | None, epochs: int, tmp_path: Path
) -> None:
    def fit(patience: int, resume_from: str | None) -> tuple[int, int | None]:
        loop, stopper = make_loop(validation=False), EarlyStopping("score", patience=patience)
        callbacks = [stopper, Scores([5, 1, 1, 1]), ModelCheckpoint(tmp_path / "checkpoints")]
        loop.fit(num_epochs=4, callbacks=callbacks, resume_from=resume_from)
        return loop.epoch, stopper.stopped_epoch

    assert fit(2, None) == (3, 2)
    assert fit(patience, "last") == (epochs, stopped)


@pytest.mark.parametrize("make", [EarlyStopping, lambda name: ThresholdEarlyStopping(name, 1.0)])
def test_a_metric_that_is_not_there(make: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_loop().fit(num_epochs=2, callbacks=[make("f1")])
    message = str(error.value)
    assert "monitor='f1' is not in the history after epoch 1" in message
    assert all(f"'{name}'" in message for name in ("accuracy", "loss", "val_accuracy", "val_loss"))
    assert "self.log('f1', value)" in message


def test_val_loss_without_a_validation_loader_is_known_at_once() -> None:
    loop = make_loop(validation=False)
    with pytest.raises(ConfigurationError, match="monitor='val_loss', but the loop has no validation_loader"):
        loop.fit(num_epochs=2, callbacks=[EarlyStopping()])
    assert loop.global_step == 0


class LogsOnRankZero(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        self.log("mine", 1.0, rank_zero_only=True)
        return super().get_loss(batch_data, criterion, device)


def test_a_metric_that_only_rank_zero_knows() -> None:
    with pytest.raises(ConfigurationError, match="monitor='mine' was logged with rank_zero_only=True"):
        make_loop(LogsOnRankZero()).fit(num_epochs=2, callbacks=[EarlyStopping("mine", mode="max")])


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize(
    "values, arguments, epochs",
    [
        pytest.param([5, 6, 5], {"threshold": 5}, 3, id="reached"),
        pytest.param([5, 4, 6], {"threshold": 5}, 2, id="missed once"),
        pytest.param([4, 4, 6, 4, 4, 4], {"threshold": 5, "patience": 2}, 6, id="patience starts anew when reached"),
        pytest.param([5, 4, 6], {"threshold": 5, "mode": "min"}, 3, id="lower is better, missed at the very end"),
        pytest.param([NAN, 9], {"threshold": 5}, 1, id="nan reaches nothing"),
    ],
)
def test_threshold(values: list[Any], arguments: dict[str, Any], epochs: int, capsys: Any) -> None:
    loop = make_loop(validation=False)
    stopper = ThresholdEarlyStopping("score", **arguments)
    loop.fit(num_epochs=len(values), callbacks=[Scores(values), stopper])
    assert loop.epoch == epochs
    state = stopper.state_dict()
    again = ThresholdEarlyStopping("score", **arguments)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert ("has not reached" in capsys.readouterr().out) == loop.early_stop


class Clock(AbstractCallback):
    """A clock that stands still but for one second a batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("clock", execution_order=-1)
        self.now = 100.0
        monkeypatch.setattr(early_stopping, "time", SimpleNamespace(monotonic=lambda: self.now))

    def on_batch_end(self) -> None:
        self.now += 1.0


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize(
    "limit",
    [TimeLimit(10), TimeLimit(timedelta(seconds=10)), TimeLimit(minutes=1 / 6), TimeLimit(4, minutes=0.1)],
    ids=["seconds", "timedelta", "minutes", "sum"],
)
def test_time_limit_ends_the_running_step(
    limit: TimeLimit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = make_loop()
    loop.fit(num_epochs=5, callbacks=[limit, Clock(monkeypatch)])
    assert loop.global_step == 10
    assert limit.elapsed_s == 10.0
    assert "the limit of 0:00:10 was reached at step 10." in capsys.readouterr().out
    # The time of a second fit is its own.
    loop.fit(num_epochs=1, callbacks=[limit, Clock(monkeypatch)])
    assert loop.global_step == 10 + STEPS_PER_EPOCH


def test_time_of_resumed_runs_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [Clock(monkeypatch), TimeLimit(10), ModelCheckpoint(tmp_path / "checkpoints")]

    make_loop().fit(num_epochs=1, callbacks=callbacks())
    loop = make_loop()
    loop.fit(num_epochs=5, callbacks=callbacks(), resume_from="last")
    assert loop.global_step == 10


def test_the_clock_stops_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = TimeLimit(1000)
    clock = Clock(monkeypatch)
    with pytest.raises(OSError, match="no more"):
        make_loop().fit(num_epochs=1, callbacks=[clock, limit, Raises(OSError("no more"), "on_epoch_end")])
    clock.now += 500.0
    assert limit.elapsed_s == STEPS_PER_EPOCH


class EveryThirdStep(AbstractCallback):
    """Logs a score at every third step, once."""

    def __init__(self) -> None:
        super().__init__("every third step", execution_order=-5)

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step and loop.global_step % 3 == 0:
            self.log("score", 1.0)


def test_a_value_within_an_epoch_is_judged_once_if_the_run_resumes(tmp_path: Path) -> None:
    """With accumulation, the first micro-batch after a resume still has the step of the checkpoint."""

    def fit(steps: int, folder: str) -> tuple[int, int]:
        stopper = EarlyStopping("score", patience=100, every_n_steps=3)
        plateau = LRScheduler(ReduceLROnPlateau, interval="step", monitor="score", frequency=3, mode="max")
        keeper = ModelCheckpoint(tmp_path / folder, every_n_steps=3, every_n_epochs=None)
        loop = make_loop(validation=False, seed=0)
        loop.train_loader = DataLoader(make_data(), 4)  # 26 batches
        callbacks = [EveryThirdStep(), stopper, plateau, keeper]
        loop.fit(num_iterations=steps, grad_accumulation=2, callbacks=callbacks, resume_from="last")
        return stopper.epochs_without_improvement, plateau.scheduler.num_bad_epochs

    whole = fit(24, "whole")
    assert whole == (3, 3)
    fit(18, "pieces")
    assert fit(24, "pieces") == whole


def test_another_loop_judges_the_step_at_which_the_loop_before_ended() -> None:
    stopper = EarlyStopping("score", patience=100, every_n_steps=3)
    plateau = LRScheduler(ReduceLROnPlateau, interval="step", monitor="score", frequency=3, mode="max")
    for _ in range(2):
        loop = make_loop(validation=False)
        loop.fit(num_iterations=3, callbacks=[EveryThirdStep(), stopper, plateau])
        assert stopper.best == 1.0
        assert plateau.scheduler.last_epoch == 1


def test_early_stopping_that_never_decided_is_reported() -> None:
    with pytest.warns(match=r"every_n_steps=5\): training ended after 4 steps, so 'score' was never read"):
        make_loop().fit(num_iterations=4, callbacks=[EarlyStopping("score", every_n_steps=5, mode="max")])
