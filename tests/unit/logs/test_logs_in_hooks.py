"""Logs of hooks: the epoch they belong to, who sees them, and that a resumed run neither loses nor doubles them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Raises, make_loop

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.callbacks.reports.trackers import EpochValues
from trainloop.errors import ConfigurationError

HOOKS = [
    "on_multiprocess_start",
    "on_train_begin",
    "on_epoch_begin",
    "on_batch_begin",
    "on_after_gradient_update",
    "on_after_optimizer_step",
    "on_batch_end",
    "on_evaluation_begin",
    "on_evaluation_end",
    "on_epoch_end",
    "on_train_end",
]


class Counts(AbstractCallback):
    """Logs in each hook, by its name, how often it has been called: the sum of an epoch tells each call apart."""

    def __init__(self, hooks: list[str] = HOOKS) -> None:
        super().__init__("counts")
        self.calls = dict.fromkeys(hooks, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = dict(state["calls"])


def _counting(name: str) -> Any:
    def hook(self: Counts, *_: Any) -> None:
        if name in self.calls:
            self.calls[name] += 1
            self.log(name, self.calls[name], reduce="sum")

    return hook


for _name in HOOKS:
    setattr(Counts, _name, _counting(_name))


class Flushes(AbstractCallback):
    """Asks for the values of the steps so far in a hook, before the other callbacks; keeps their number and rows."""

    def __init__(self, hook: str) -> None:
        super().__init__("flushes", execution_order=-1)
        self.numbers: list[tuple[int, int]] = []
        self.rows: list[Any] = []
        setattr(self, hook, self.flush)

    def flush(self, *_: Any) -> None:
        loop = self.train_loop_obj
        loop.flush_logs()
        self.numbers.append((loop.global_step, len(loop.history.steps("loss"))))

    def on_log(self, rows: Any) -> None:
        self.rows += rows


OF_STEPS = ["on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end"]


@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize("hook", OF_STEPS)
def test_a_step_has_one_value_wherever_logs_are_flushed(hook: str, mode: str, tmp_path: Path) -> None:
    def trained(*others: AbstractCallback, resume_from: Path | None = None) -> TrainLoop:
        tl = make_loop(seed=1, gpu_mode=mode, devices=1 + (mode == "dp"))
        tl.fit(num_epochs=2, callbacks=[Counts(OF_STEPS), *others], grad_accumulation=2, resume_from=resume_from)
        return tl

    plain = trained().history
    flushes = Flushes(hook)
    flushed = trained(flushes, ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=9)).history
    assert flushed.to_dict() == plain.to_dict()
    for name in plain.step_names:
        assert flushed.steps(name) == plain.steps(name)
        assert flushed.step_indices(name) == plain.step_indices(name) == list(range(1, 9))
        assert [values[name] for _, values in flushes.rows if name in values] == plain.steps(name)
    assert all(step == values for step, values in flushes.numbers)
    saves = ModelCheckpoint(tmp_path / "resumed")
    resumed = trained(Flushes(hook), saves, resume_from=sorted(tmp_path.glob("checkpoint-*"))[0]).history
    assert {name: resumed.steps(name) for name in plain.step_names} == {n: plain.steps(n) for n in plain.step_names}


def expected_rows(epochs: int) -> list[dict[str, float]]:
    """The values of an epoch's row, counted by hand."""
    rows = []
    for epoch in range(epochs):
        first, last = 1 + epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH
        steps = float(sum(range(first, last + 1)))
        row = {"epoch": epoch + 1.0, **dict.fromkeys(HOOKS[3:7], steps)}
        row.update(on_epoch_begin=epoch + 1.0, on_epoch_end=epoch + 1.0)
        row.update(val_on_evaluation_begin=epoch + 1.0, val_on_evaluation_end=epoch + 1.0)
        rows.append(row)
    rows[0].update(on_multiprocess_start=1.0, on_train_begin=1.0)
    rows[-1].update(on_train_end=1.0)
    return rows


def rows_of_hooks(tl: TrainLoop) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name == "epoch" or "on_" in name} for row in tl.history.rows()
    ]


def test_what_a_hook_logs_belongs_to_its_epoch() -> None:
    tl, counts = make_loop(), Counts()
    tl.fit(num_epochs=3, callbacks=[counts])
    assert rows_of_hooks(tl) == expected_rows(3)
    # A step's hooks log the step's value, the others a value of the epoch only.
    assert sorted(tl.history.step_names) == sorted([*HOOKS[3:7], "accuracy", "loss"])
    for name in HOOKS[3:7]:
        assert tl.history.step_indices(name) == list(range(1, 3 * STEPS_PER_EPOCH + 1))
        assert tl.history.steps(name) == [float(i) for i in range(1, 3 * STEPS_PER_EPOCH + 1)]
    # A second fit: its first epoch is the fourth, its last the fifth.
    tl.fit(num_epochs=2, callbacks=[counts])
    assert tl.history["on_train_begin"] == tl.history["on_train_end"] == [1.0, 2.0]
    assert tl.history.epochs("on_train_begin") == [0, 3]
    assert tl.history.epochs("on_train_end") == [2, 4]


@pytest.mark.long
@pytest.mark.parametrize("every", [{"every_n_steps": 1, "every_n_epochs": None}, {"every_n_epochs": 1}])
def test_a_resumed_run_has_each_value_once(folder: Path, every: dict[str, Any]) -> None:
    """Ended in the middle of each step and begun again: the rows of a run that nobody disturbed."""

    # The newest checkpoint is the last step's, or the last epoch's: then its steps are counted again.
    for step in range(1, 2 * STEPS_PER_EPOCH, 4):
        keeper, tl = ModelCheckpoint(f"step{step}", **every), make_loop(seed=1)
        with pytest.raises(KeyboardInterrupt):
            tl.fit(
                num_epochs=2,
                callbacks=[Counts(), keeper, Raises(KeyboardInterrupt(), "on_batch_begin", step=step, order=2000)],
            )
        tl = make_loop(seed=1)
        tl.fit(num_epochs=2, callbacks=[Counts(), keeper], resume_from="last")
        assert rows_of_hooks(tl) == expected_rows(2)


def test_a_metric_of_steps_and_of_the_epochs_end_is_one() -> None:
    class Adds(AbstractCallback):
        def on_batch_end(self) -> None:
            self.log("total", 1.0, reduce="sum")
            self.log("mean", 1.0, batch_size=2)

        def on_epoch_end(self) -> None:
            self.log("total", 100.0, reduce="sum")
            self.log("mean", 3.0, batch_size=2 * STEPS_PER_EPOCH)
            self.log("step_only", 5.0, on_epoch=False)
            self.log("both", 7.0, on_step=True)

    tl = make_loop()
    tl.fit(num_epochs=2, callbacks=[Adds()])
    assert tl.history["total"] == [100.0 + STEPS_PER_EPOCH] * 2
    assert tl.history["mean"] == [2.0] * 2
    assert "step_only" not in tl.history
    for name in ("step_only", "both"):
        assert tl.history.step_indices(name) == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
    assert tl.history.steps("total") == [1.0] * (2 * STEPS_PER_EPOCH)


def test_a_batch_weighs_its_samples_from_its_first_hook_on() -> None:
    class Sizes(AbstractCallback):
        def on_batch_begin(self) -> None:
            loop = self.train_loop_obj
            self.log("begin", float((loop.total_iteration_idx + 1) % STEPS_PER_EPOCH == 0))

        def on_batch_end(self) -> None:
            loop = self.train_loop_obj
            self.log("end", float((loop.total_iteration_idx + 1) % STEPS_PER_EPOCH == 0))

    tl = make_loop()
    tl.fit(num_epochs=2, callbacks=[Sizes()])
    assert tl.history["begin"] == tl.history["end"] == [5 / 101] * 2  # the last of 7 batches has 5 samples


# -- who sees it -------------------------------------------------------------------------------------------------------


class LogsAtEnd(AbstractCallback):
    def __init__(self, values: list[float], name: str = "score", order: int = 0) -> None:
        super().__init__(f"logs {name}", execution_order=order)
        self.values = values
        self.name = name

    def on_epoch_end(self) -> None:
        self.log(self.name, self.values[self.train_loop_obj.epoch])


class Reads(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("reads")
        self.read: list[float] = []

    def on_epoch_end(self) -> None:
        self.read.append(self.train_loop_obj.history["score"][-1])


def test_callbacks_that_come_later_find_it_in_the_history(folder: Path) -> None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    values = [0.5, 0.9, 0.4, 0.3]
    keeper = ModelCheckpoint("kept", monitor="score", mode="max", keep=1)
    stopping, reads = EarlyStopping("score", patience=2, mode="max"), Reads()
    plateau = LRScheduler(ReduceLROnPlateau, monitor="score", mode="max", patience=0, factor=0.5)
    tl = make_loop()
    tl.fit(num_epochs=10, callbacks=[LogsAtEnd(values), reads, stopping, keeper, plateau])
    assert tl.history["score"] == reads.read == values
    assert (stopping.best, stopping.stopped_epoch) == (0.9, 3)
    assert keeper.best_value == 0.9
    assert tl.optimizer.param_groups[0]["lr"] == 0.1 / 4  # twice not better than 0.9
    assert keeper.load_best()["history"]["values"]["score"] == values[:2]


def test_trackers_write_it_at_its_own_epochs_step(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class LastWord(AbstractCallback):
        def on_train_end(self) -> None:
            self.log("last_word", 1.5)

    early, late = LogsAtEnd([1.0, 2.0, 3.0], "early"), LogsAtEnd([4.0, 5.0, 6.0], "late", order=5000)
    make_loop().fit(num_epochs=3, callbacks=[early, late, LastWord(), TensorBoard("board")])
    board = EventAccumulator("board", size_guidance={"scalars": 0})
    board.Reload()
    steps = [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH]
    for name, values in (("early", [1.0, 2.0, 3.0]), ("late", [4.0, 5.0, 6.0]), ("last_word", [1.5])):
        written = board.Scalars(name)
        assert [event.value for event in written] == values
        assert [event.step for event in written] == steps[-len(values) :]


def test_epoch_values_are_sent_once_and_at_their_step() -> None:
    """Values logged after the tracker's hook come at the next epoch's end, with the epoch they belong to."""
    tl, pending = make_loop(), EpochValues()
    sent: list[Any] = []

    class Tracker(AbstractCallback):
        def on_epoch_end(self) -> None:
            sent.extend(pending.take(self.train_loop_obj))

    tl.fit(num_epochs=2, callbacks=[LogsAtEnd([1.0, 2.0], order=5), Tracker()])
    sent.extend(pending.take(tl))
    assert [(epoch, step) for epoch, step, values in sent if "score" in values] == [
        (0, STEPS_PER_EPOCH),
        (1, 2 * STEPS_PER_EPOCH),
    ]
    assert [values["score"] for _, _, values in sent if "score" in values] == [1.0, 2.0]
    assert list(pending.take(tl)) == []


def written(name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [
        (one.step, one.value) for one in EventAccumulator("board", size_guidance={"scalars": 0}).Reload().Scalars(name)
    ]


@pytest.mark.parametrize("kind", ["one callback", "a callback for each piece", "resumed"])
def test_trackers_write_an_epoch_that_pieces_cut_once_for_each_end(folder: Path, kind: str) -> None:
    piece = STEPS_PER_EPOCH * 3 // 4
    ends = sorted({*range(piece, 4 * piece + 1, piece), *range(STEPS_PER_EPOCH, 4 * piece + 1, STEPS_PER_EPOCH)})
    tl, board = make_loop(), TensorBoard("board")
    for i in range(4):
        if kind == "resumed":
            tl = make_loop()
            callbacks = [TensorBoard("board"), ModelCheckpoint("checkpoints")]
            tl.fit(num_iterations=(i + 1) * piece, callbacks=callbacks, resume_from="last")
        else:
            tl.fit(num_iterations=piece, callbacks=[board if kind == "one callback" else TensorBoard("board")])
    points = written("val_loss")
    assert [step for step, _ in points] == ends
    whole = make_loop()
    whole.fit(num_epochs=ends[-1] // STEPS_PER_EPOCH)
    of_epochs = {STEPS_PER_EPOCH * (i + 1): value for i, value in enumerate(whole.history["val_loss"])}
    assert {step: value for step, value in points if step in of_epochs} == pytest.approx(of_epochs)


def test_a_tracker_that_joins_a_later_fit_does_not_write_earlier_epochs_at_its_steps(folder: Path) -> None:
    tl = make_loop()
    tl.fit(num_epochs=2)
    tl.fit(num_epochs=1, callbacks=[TensorBoard("board")])
    assert written("val_loss") == [(3 * STEPS_PER_EPOCH, pytest.approx(tl.history["val_loss"][-1]))]


# -- ends and errors ---------------------------------------------------------------------------------------------------


def test_what_on_exception_logs_is_kept() -> None:
    class Breaks(AbstractCallback):
        def on_batch_end(self) -> None:
            if self.train_loop_obj.global_step == STEPS_PER_EPOCH + 2:
                raise ZeroDivisionError

        def on_exception(self, exception: BaseException) -> None:
            self.log("broke_at", self.train_loop_obj.global_step)

    tl = make_loop()
    with pytest.raises(ZeroDivisionError):
        tl.fit(num_epochs=3, callbacks=[Breaks()])
    assert tl.history["broke_at"] == [STEPS_PER_EPOCH + 2]
    assert tl.history.epochs("broke_at") == [1]
    assert len(tl.history["loss"]) == 1


def test_logging_where_nothing_runs_is_an_error() -> None:
    class TooEarly(AbstractCallback):
        def on_train_loop_registration(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(ConfigurationError, match=r"log\('x', \.\.\.\): nothing is running, so there is no epoch"):
        make_loop().fit(num_epochs=1, callbacks=[TooEarly()])
    with pytest.raises(ConfigurationError, match=r"nothing is running"):
        make_loop().log("x", 1.0)
    with pytest.raises(ConfigurationError, match=r"AbstractCallback.log\('x', \.\.\.\): the callback has no loop yet"):
        AbstractCallback().log("x", 1.0)


def test_log_has_one_signature() -> None:
    signatures = {str(inspect.signature(kind.log)) for kind in (TTModel, TrainLoop, AbstractCallback)}
    assert len(signatures) == 1


def test_a_model_that_can_not_log_is_no_obstacle() -> None:
    """A model need not be a TTModel; callbacks log all the same."""

    class Duck(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(8, 3)

        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            return criterion(self.fc(batch_data[0]), batch_data[1])

        get_loss_eval = get_loss
        get_predictions = Net.get_predictions

    tl = make_loop(Duck())
    tl.fit(num_epochs=1, callbacks=[LogsAtEnd([2.5])])
    assert tl.history["score"] == [2.5]


def test_a_pass_of_a_type_of_ones_own_has_its_prefix() -> None:
    class Passes(AbstractCallback):
        def on_epoch_end(self) -> None:
            loop = self.train_loop_obj
            loop.predict_with_model(loop.validation_loader, dataset_info={"type": "holdout"})
            loop.predict_with_model(loop.validation_loader)

        def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
            if dataset_info["pass"] == "predictions":
                self.log("seen", 1.0)

    tl = make_loop()
    tl.fit(num_epochs=2, callbacks=[Passes()])
    assert tl.history["holdout_seen"] == [1.0, 1.0]
    assert "seen" not in tl.history


@pytest.mark.parametrize("hook", ["on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step"])
def test_a_step_that_fails_has_no_value_until_it_is_taken(hook: str) -> None:
    """Also if a callback has ``on_log``, for which the logs are read after the failure."""

    class Fails(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("fails", execution_order=-1)
            self.fails, self.rows = True, list[int]()
            setattr(self, hook, self.fail)

        def fail(self, *_: Any) -> None:
            self.log("before", 1.0)
            if self.fails and self.train_loop_obj.global_step == 2:
                self.fails = False
                raise ZeroDivisionError

        def on_log(self, rows: Any) -> None:
            self.rows += [step for step, _ in rows]

    tl, fails = make_loop(), Fails()
    with pytest.raises(ZeroDivisionError):
        tl.fit(num_epochs=1, callbacks=[fails])
    assert tl.history.step_indices("loss") == fails.rows == [1, 2]
    tl.fit(num_epochs=1, callbacks=[fails])
    assert tl.history.step_indices("loss") == fails.rows == list(range(1, STEPS_PER_EPOCH + 3))


def test_a_step_has_one_value_if_its_logs_are_exchanged_before_it_begins_or_by_a_checkpoint_in_it() -> None:
    class Logs(AbstractCallback):
        def on_epoch_begin(self) -> None:
            self.log("x", 1.0, on_step=True, reduce="sum")
            self.train_loop_obj.flush_logs()

        def on_batch_begin(self) -> None:
            self.log("x", 2.0, on_step=True, reduce="sum")

        def on_batch_end(self) -> None:
            self.train_loop_obj.checkpoint_state()
            self.log("x", 4.0, on_step=True, reduce="sum")

    tl = make_loop()
    tl.fit(num_epochs=1, callbacks=[Logs()])
    assert tl.history.step_indices("x") == list(range(1, STEPS_PER_EPOCH + 1))
    assert tl.history.steps("x") == [7.0] + [6.0] * (STEPS_PER_EPOCH - 1)
