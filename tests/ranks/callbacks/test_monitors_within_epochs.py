"""A metric that is logged every n steps: checkpoints, early stopping and plateaus judge its newest value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.small_loop import STEPS_PER_EPOCH, make_loop
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainloop import AbstractCallback, checkpoint
from trainloop.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint
from trainloop.errors import ConfigurationError

VALUES = [3.5, 2.6, 3.6, 3.0, 3.3, 3.1, 3.2]


class Validates(AbstractCallback):
    """Every two steps, log the next of some values, in one of three ways."""

    def __init__(self, how: str = "log") -> None:
        super().__init__("validates")
        self.how = how

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step % 2 or not loop.global_step:
            return
        value = VALUES[loop.global_step // 2 - 1]
        if self.how == "insert":
            loop.insert_metric_result_into_history("step_val_loss", value)
        elif self.how == "by rank":  # the mean over ranks counts
            offset = (0.5 if loop.rank else -0.5) * (loop.world_size > 1)
            self.log("step_val_loss", value + offset, batch_size=1)
        else:
            self.log("step_val_loss", value)


def modes() -> list[Any]:
    return [("single", {}), ("ddp", {"gpu_mode": "ddp", "devices": 2}), ("fsdp", {"gpu_mode": "fsdp", "devices": 2})]


@pytest.mark.parametrize("how", ["log", "insert"])
def test_the_best_checkpoint_in_one_process(how: str, tmp_path: Path) -> None:
    loop, best = make_loop(), ModelCheckpoint(tmp_path, every_n_steps=2, monitor="step_val_loss", keep=1)
    loop.fit(2, callbacks=[Validates(how), best])
    assert best.best_value == 2.6
    assert best.load_best()["place"]["global_step"] == 4


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_best_checkpoint_of_ranks(mode: str, tmp_path: Path) -> None:
    kwargs = dict(modes())[mode]
    loop = make_loop(accelerator="cpu", **kwargs)
    best = ModelCheckpoint(tmp_path, every_n_steps=2, monitor="step_val_loss", keep=1)
    loop.fit(num_iterations=12, callbacks=[Validates("by rank"), best])
    assert best.best_value == pytest.approx(2.6)
    assert checkpoint.load(best.best_path or "")["place"]["global_step"] == 4


def test_every_step_s_metric_is_judged_by_its_mean(tmp_path: Path) -> None:
    loop = make_loop()
    best = ModelCheckpoint(tmp_path, every_n_steps=2, monitor="accuracy", keep=1)
    loop.fit(3, callbacks=[best])
    assert best.best_value == max(loop.history["accuracy"])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_early_stopping_within_an_epoch(mode: str) -> None:
    loop = make_loop(accelerator="cpu", **dict(modes())[mode])
    stop = EarlyStopping("step_val_loss", patience=2, every_n_steps=2)
    loop.fit(num_iterations=40, callbacks=[Validates("by rank"), stop])
    assert loop.global_step == 8  # 2.6, then 3.6 and 3.0
    assert stop.best == pytest.approx(2.6)


def test_plateaus_within_an_epoch() -> None:
    loop = make_loop()
    plateau = LRScheduler(ReduceLROnPlateau, "step", "step_val_loss", frequency=2, patience=1, factor=0.1)
    loop.fit(num_iterations=STEPS_PER_EPOCH + 2, callbacks=[Validates(), plateau])
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(ConfigurationError, match="frequency=n"):
        LRScheduler(ReduceLROnPlateau, "step")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_stopping_and_plateaus_judge_the_newest_value_of_a_metric_of_every_step(mode: str) -> None:
    loop = make_loop(accelerator="cpu", **dict(modes())[mode])
    rate = loop.optimizer.param_groups[0]["lr"]
    plateau = LRScheduler(
        ReduceLROnPlateau, "step", "accuracy", frequency=3, mode="max", patience=0, threshold=2.0, factor=0.5
    )
    stop = EarlyStopping("accuracy", min_delta=2.0, patience=2, every_n_steps=3)  # no accuracy is better by 2
    loop.fit(num_iterations=40, callbacks=[plateau, stop])
    assert loop.global_step == 9
    assert stop.best == loop.history.steps("accuracy")[2]
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)


@pytest.mark.parametrize("how", ["log", "insert"])
def test_a_value_counts_once_however_often_it_is_read(how: str) -> None:
    loop = make_loop()
    rate = loop.optimizer.param_groups[0]["lr"]
    stop = EarlyStopping("step_val_loss", patience=2, every_n_steps=1)
    plateau = LRScheduler(ReduceLROnPlateau, "step", "step_val_loss", patience=0, factor=0.5)
    loop.fit(num_iterations=40, callbacks=[Validates(how), plateau, stop])
    assert loop.global_step == 8  # 2.6, then 3.6 and 3.0
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)


def test_a_metric_of_the_end_of_epochs_is_judged_there() -> None:
    loop = make_loop()
    rate = loop.optimizer.param_groups[0]["lr"]
    stop = EarlyStopping("val_loss", min_delta=1e6, patience=2, every_n_steps=2)
    never = {"threshold": 1e6, "threshold_mode": "abs", "patience": 0}
    plateau = LRScheduler(ReduceLROnPlateau, "step", "val_loss", frequency=2, factor=0.5, **never)
    loop.fit(9, callbacks=[plateau, stop])
    assert loop.epoch == 3
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)


def test_a_metric_of_the_end_of_epochs_is_judged_there_if_fits_cut_the_epoch() -> None:
    loop = make_loop()
    stop = EarlyStopping("val_loss", min_delta=1e6, patience=9, every_n_steps=1)
    plateau = LRScheduler(ReduceLROnPlateau, "step", "val_loss")
    for steps in (2, STEPS_PER_EPOCH - 2):
        loop.fit(num_iterations=steps, callbacks=[plateau, stop])
    assert loop.epoch == 1
    assert stop.epochs_without_improvement == 1  # the end of the first fit had the first value
    assert plateau.scheduler.last_epoch == 1


LATE = STEPS_PER_EPOCH + 3


class ValidatesLate(AbstractCallback):
    """Logs its first value only in the second epoch."""

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == LATE:
            self.log("step_val_loss", 1.0)


JUDGES: dict[str, Any] = {
    "stopping": lambda name, folder: EarlyStopping(name, patience=9, every_n_steps=LATE),
    "checkpoint": lambda name, folder: ModelCheckpoint(folder, None, LATE, monitor=name, keep=1),
    "plateau": lambda name, folder: LRScheduler(ReduceLROnPlateau, "step", monitor=name, frequency=LATE),
}


@pytest.mark.parametrize("judge", JUDGES)
def test_a_metric_may_come_after_the_first_epoch(judge: str, tmp_path: Path) -> None:
    loop, callback = make_loop(), JUDGES[judge]("step_val_loss", tmp_path)
    loop.fit(3, callbacks=[ValidatesLate(), callback])
    assert loop.epoch == 3
    if judge != "plateau":
        assert (callback.best if judge == "stopping" else callback.best_value) == 1.0


@pytest.mark.parametrize("judge", JUDGES)
def test_a_metric_that_nothing_logs_by_then_is_an_error(judge: str, tmp_path: Path) -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"monitor='other_loss' is not in the history after epoch 2"):
        loop.fit(3, callbacks=[ValidatesLate(), JUDGES[judge]("other_loss", tmp_path)])
