"""A run that has ended, started again by the same line: nothing is done, and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Scores, make_loop
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import EarlyStopping, ExponentialMovingAverage, ModelCheckpoint, TimeLimit
from trainloop.errors import CheckpointError


class Calls(AbstractCallback):
    """Writes down which hooks are called, and logs at the end of training."""

    def __init__(self) -> None:
        super().__init__("calls")
        self.heard: list[str] = []

    def on_train_begin(self) -> None:
        self.heard.append("train begin")

    def on_epoch_begin(self) -> None:
        self.heard.append(f"epoch {self.train_loop_obj.epoch}")

    def on_train_end(self) -> None:
        self.heard.append("train end")
        self.log("at_the_end", 1.0)


def make_whole() -> TrainLoop:
    tl = make_loop(seed=3)
    tl.test_loader = tl.validation_loader
    return tl


def files() -> dict[str, tuple[int, int]]:
    return {path: (os.stat(f"kept/{path}").st_mtime_ns, os.stat(f"kept/{path}").st_ino) for path in os.listdir("kept")}


def state_of(tl: TrainLoop) -> Any:
    weights = {name: value.tolist() for name, value in tl.model.state_dict().items()}
    optimizer = tl.optimizer.state_dict()["state"]
    momentum = {key: value["momentum_buffer"].tolist() for key, value in optimizer.items()}
    return weights, momentum, tl.history.to_dict(), tl.history.rows(), tl.epoch, tl.global_step, tl.early_stop


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize("length", [{"num_epochs": 2}, {"num_iterations": STEPS_PER_EPOCH + 3}], ids=str)
@pytest.mark.parametrize("average", [False, True])
def test_a_finished_run_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], length: dict[str, int], average: bool
) -> None:
    def callbacks() -> list[Any]:
        more = [ExponentialMovingAverage(decay=0.9)] if average else []
        return [Calls(), ModelCheckpoint("kept"), *more]

    first = make_whole()
    first.fit(**length, callbacks=callbacks(), resume_from="last")
    assert len(first.history["test_loss"]) == len(first.history["at_the_end"]) == 1
    before, written = state_of(first), files()
    for _ in range(2):
        again, taken = make_whole(), callbacks()
        random = torch.get_rng_state()
        capsys.readouterr()
        again.fit(**length, callbacks=taken, resume_from="last")
        assert state_of(again) == before
        assert files() == written
        assert taken[0].heard == []
        assert torch.equal(torch.get_rng_state(), random)
        printed = capsys.readouterr().out
        assert printed.startswith("Nothing left to do: ")
        assert printed.count("\n") == 1
    # More of it goes on, with what was trained and not with its average.
    longer = {name: number + STEPS_PER_EPOCH for name, number in length.items()}
    straight, resumed = make_whole(), make_whole()
    straight.fit(**length, callbacks=callbacks()[2:])
    resumed.fit(**longer, callbacks=(more := callbacks()), resume_from="last")
    assert more[0].heard[0] == "train begin"
    assert more[0].heard[-1] == "train end"
    assert resumed.epoch > straight.epoch


def test_the_end_of_training_is_made_up_for(folder: Path) -> None:
    """Killed after the last epoch and before the tests: they are done when it is resumed, into the last epoch's row."""

    class Killed(AbstractCallback):
        def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
            if dataset_info["type"] == "test":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_whole().fit(num_epochs=2, callbacks=[Calls(), ModelCheckpoint("kept"), Killed()])
    undisturbed, resumed, calls = make_whole(), make_whole(), Calls()
    undisturbed.fit(num_epochs=2, callbacks=[Calls()])
    resumed.fit(num_epochs=2, callbacks=[calls, ModelCheckpoint("kept")], resume_from="last")
    assert calls.heard == ["train begin", "train end"]
    assert state_of(resumed) == state_of(undisturbed)


class Prunes(AbstractCallback):
    """Changes the structure after the first epoch, and again where a run resumes."""

    def __init__(self) -> None:
        super().__init__("prunes")
        self.begins: list[tuple[bool, int]] = []

    def prune(self) -> None:
        prune.l1_unstructured(self.train_loop_obj.model.fc, "weight", amount=0.5)

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        self.begins.append((loop.resumed, loop.epoch))
        if loop.resumed and loop.epoch >= 1:
            self.prune()

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch == 0:
            self.prune()


def test_a_finished_run_whose_callback_changed_the_structure(folder: Path) -> None:
    first, again, longer, whole = (make_loop(seed=3) for _ in range(4))
    first.fit(num_epochs=2, callbacks=[Prunes(), ModelCheckpoint("kept")])
    prunes = Prunes()
    again.fit(num_epochs=2, callbacks=[prunes, ModelCheckpoint("kept")], resume_from="last")
    assert state_of(again) == state_of(first)
    assert prunes.begins == [(True, 2)]
    longer.fit(num_epochs=3, callbacks=[Prunes(), ModelCheckpoint("kept")], resume_from="last")
    whole.fit(num_epochs=3, callbacks=[Prunes()])
    assert state_of(longer) == state_of(whole)


class MakesItsState(AbstractCallback):
    """Loads its state into what it makes when training begins, as a callback that averages weights does."""

    def on_train_begin(self) -> None:
        self.average = AveragedModel(self.train_loop_obj.model)

    def on_epoch_end(self) -> None:
        self.average.update_parameters(self.train_loop_obj.model)

    def on_train_end(self) -> None:
        self.train_loop_obj.model.load_state_dict(self.average.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.long)])
def test_a_finished_run_whose_callback_makes_its_state_when_training_begins(folder: Path, mode: str) -> None:
    first, again = (make_loop(seed=3, gpu_mode=mode, devices=1 if mode == "single" else 2) for _ in range(2))
    callbacks = [MakesItsState("averages"), MakesItsState("averages")]
    for loop, callback, resume in zip((first, again), callbacks, (None, "last"), strict=True):
        loop.fit(num_epochs=2, callbacks=[callback, ModelCheckpoint("kept")], resume_from=resume)
    assert state_of(again) == state_of(first)
    assert [one.average.n_averaged.item() for one in callbacks] == [2, 2]


def test_a_callback_that_can_not_load_its_state_is_an_error(folder: Path) -> None:
    class Breaks(MakesItsState):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError("on purpose")

    make_loop(seed=3).fit(num_epochs=1, callbacks=[Breaks("averages"), ModelCheckpoint("kept")])
    loop = make_loop(seed=3)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        loop.fit(num_epochs=1, callbacks=[Breaks("averages"), ModelCheckpoint("kept")], resume_from="last")
    assert (loop.resumed, loop.epoch, loop.global_step) == (False, 0, 0)


def test_a_finished_run_of_another_model_is_an_error_and_changes_nothing(folder: Path) -> None:
    first, other = make_loop(seed=3), make_loop(seed=3)
    first.fit(num_epochs=1, callbacks=[Prunes(), ModelCheckpoint("kept")])
    before = state_of(other)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        other.fit(num_epochs=1, callbacks=[Calls(), ModelCheckpoint("kept")], resume_from="last")
    assert state_of(other) == before


class Stops(AbstractCallback):
    """Ends training as users write it."""

    def __init__(self, epoch: int = 1) -> None:
        super().__init__("stops")
        self.epoch = epoch

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch == self.epoch:
            self.stop()

    def stop(self) -> None:
        self.end_training()


ENDS = {
    "EarlyStopping": (lambda: EarlyStopping("score", patience=1), lambda: EarlyStopping("score", patience=9)),
    "TimeLimit": (lambda: TimeLimit(1e-6), lambda: TimeLimit(hours=9)),
    "stops": (Stops, None),
}


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_a_callback_ended_stays_so(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    make, later = ENDS[name]

    def callbacks(end: Any) -> list[Any]:
        return [Scores([3.0, 2.0, 4.0, 5.0, 6.0, 7.0]), Calls(), ModelCheckpoint("kept"), *([end] if end else [])]

    first = make_whole()
    first.fit(num_epochs=5, callbacks=callbacks(make()))
    assert f"{name} ended" in capsys.readouterr().out or name == "stops"  # which gives no reason, and there is no table
    before, written = state_of(first), files()
    assert first.epoch < 5
    again = make_whole()
    again.fit(num_epochs=5, callbacks=(taken := callbacks(make())), resume_from="last")
    assert state_of(again) == before
    assert files() == written
    assert taken[1].heard == []
    printed = capsys.readouterr().out
    assert printed.startswith(f"Nothing left to do: {name} ended training after epoch {first.epoch}")
    # It goes on without the callback, or where that would not have ended it: to the end.
    for_all = later() if later else None
    on = make_whole()
    on.fit(num_epochs=5, callbacks=(taken := callbacks(for_all)), resume_from="last")
    assert on.epoch == 5
    assert taken[1].heard == ["train begin", *(f"epoch {i}" for i in range(first.epoch, 5)), "train end"]
    # More epochs than the run was to have go on, too.
    longer = make_whole()
    longer.fit(num_epochs=6, callbacks=callbacks(make()), resume_from="last")
    assert longer.epoch > first.epoch


@pytest.mark.parametrize("which", [0, 1])
def test_an_end_holds_if_another_callback_of_its_class_would_not_end_the_run(folder: Path, which: int) -> None:
    """Each monitors a metric of its own, under one name."""

    def fit() -> TrainLoop:
        ends = [EarlyStopping("score", patience=1), EarlyStopping("loss", patience=9)]
        callbacks = [Scores([3.0, 2.0, 1.0, 1.0, 1.0]), *(ends[::-1] if which else ends), ModelCheckpoint("kept")]
        tl = make_loop(seed=3)
        tl.fit(num_epochs=5, callbacks=callbacks, resume_from="last")
        return tl

    first = fit()
    assert first.epoch == 2
    assert state_of(fit()) == state_of(first)


class StopsAfter(AbstractCallback):
    def __init__(self, epochs: int) -> None:
        super().__init__("stops")
        self.epochs = epochs

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch + 1 == self.epochs:
            self.end_training(f"{self.epochs} epochs")


@pytest.mark.parametrize(("kept", "epochs"), [((2, 3), 2), ((3, 2), 2), ((3,), 3)])
def test_an_end_does_not_hold_if_only_another_callback_of_its_class_is_left(
    folder: Path, kept: tuple[int, ...], epochs: int
) -> None:
    def fit(*ends: int) -> int:
        tl = make_loop(seed=3)
        callbacks = [*map(StopsAfter, ends), ModelCheckpoint("kept")]
        tl.fit(num_epochs=5, callbacks=callbacks, resume_from="last")
        return tl.epoch

    assert fit(2, 3) == 2
    assert fit(*kept) == epochs


@pytest.mark.parametrize("name", ENDS)
def test_an_end_is_in_a_checkpoint_that_is_written_after_the_epoch(folder: Path, name: str) -> None:
    """No checkpoint is due at the end of an epoch, and no callback has work at the end of training."""

    def fit() -> TrainLoop:
        tl = make_loop(seed=3)
        keeper = ModelCheckpoint("kept", every_n_epochs=None, every_n_steps=2)
        tl.fit(num_epochs=5, callbacks=[Scores([3.0, 2.0, 4.0]), keeper, ENDS[name][0]()], resume_from="last")
        return tl

    first = fit()
    assert first.epoch < 5
    assert state_of(fit()) == state_of(first)


def test_an_end_names_all_who_asked_after_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    tl = make_loop()
    tl.progress_bar = True
    tl.fit(num_epochs=3, callbacks=[Scores([1.0, 0.0, 0.0]), EarlyStopping("score", patience=1), Stops()])
    *_, row, line = capsys.readouterr().out.rstrip().split("\n")
    assert row.split()[0] == "2"
    assert (
        line == "stops and EarlyStopping ended training after epoch 2: score = 0, best was 1 in epoch 1 (mode='max')."
    )


@pytest.mark.usefixtures("events_on_stdout")
def test_a_run_that_early_stop_has_ended_is_not_trained_on_unless_more_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who assigns the attribute is not known, so that the end holds with other callbacks, too."""
    first = make_whole()
    first.fit(num_epochs=3, callbacks=[ModelCheckpoint("kept"), FromThread()])
    assert first.epoch == 1
    again = make_whole()
    again.fit(num_epochs=3, callbacks=[ModelCheckpoint("kept")], resume_from="last")
    assert state_of(again) == state_of(first)
    assert "Nothing left to do: early_stop ended training after epoch 1." in capsys.readouterr().out
    longer = make_whole()
    longer.fit(num_epochs=4, callbacks=[ModelCheckpoint("kept")], resume_from="last")
    assert longer.epoch == 4


class FromThread(AbstractCallback):
    """As a button in a notebook does it: another thread sets the attribute."""

    def on_batch_end(self) -> None:
        import threading

        loop = self.train_loop_obj
        thread = threading.Thread(target=setattr, args=(loop, "early_stop", True))
        thread.start()
        thread.join()


@pytest.mark.parametrize("length", [{"num_epochs": 1}, {"num_iterations": 3}], ids=str)
def test_pieces_that_resume_where_this_loop_ended_train_nothing_and_warn(folder: Path, length: dict[str, int]) -> None:
    loop, keeper = make_loop(seed=3), ModelCheckpoint("kept")
    loop.fit(**length, callbacks=[keeper], resume_from="last")
    step = loop.global_step
    with pytest.warns(UserWarning, match=rf"trained nothing: this loop has already trained to step {step}"):
        loop.fit(**length, callbacks=[keeper], resume_from="last")
    assert loop.global_step == step
    loop.fit(**length, callbacks=[keeper])
    assert loop.global_step == 2 * step
