"""Callbacks between ranks: the same decisions on all, one that writes, and state that comes back."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.event_files import event_files, read, steps, values_of
from kit.loops import cpu_loop
from kit.small_loop import Counts, Net, make_loop
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, distributed
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientStats,
    LearningRateMonitor,
    LRScheduler,
    ModelPerformanceEvaluation,
    TensorBoard,
    TerminateOnNaN,
    TimeLimit,
)
from trainloop.errors import WorkerFailedError
from trainloop.schedulers.warmup import LinearWithWarmupScheduler


class StopsOnOneRank(TimeLimit):
    """The time is up on rank 1 only, in its tenth step."""

    def on_batch_end(self) -> None:
        if self.train_loop_obj.rank == 1 and self.train_loop_obj.global_step == 10:
            self.limit_s = 1e-9
        super().on_batch_end()


class Best(AbstractCallback):
    """Keeps a record of a class that the ranks get by value, since it is local."""

    def __init__(self) -> None:
        super().__init__()

        @dataclasses.dataclass(slots=True)
        class Record:
            epoch: int
            loss: float

        self.kind, self.best = Record, Record(-1, math.inf)

    def on_epoch_end(self) -> None:
        self.best = self.kind(self.train_loop_obj.epoch, self.train_loop_obj.history["loss"][-1])


class Appends(AbstractCallback):
    def __init__(self, called: list[int]) -> None:
        super().__init__()
        self.called = called

    def on_epoch_end(self) -> None:
        self.called.append(self.train_loop_obj.rank)


@pytest.mark.long
def test_two_ranks(tmp_path: Path) -> None:
    """One run with nearly all of them, since starting ranks is what takes the time."""
    loop = make_loop(gpu_mode="ddp", devices=2)
    board = TensorBoard(tmp_path, log_every_n_steps=1)
    limit = StopsOnOneRank(hours=1)
    stopper = EarlyStopping("val_loss", patience=9)
    by_epoch = LRScheduler(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.5**n)  # a lambda, sent and brought back
    ema = ExponentialMovingAverage(0.9, evaluate=True)
    called: list[int] = []
    best = Best()
    loop.fit(
        num_epochs=5,
        callbacks=[
            board, limit, stopper, by_epoch, ema, GradientStats(2), LearningRateMonitor(),
            ModelPerformanceEvaluation(Counts(), on_iteration_frequency=4),
            Appends(called), best,
        ],
    )  # fmt: skip
    # Ranks that did not agree on the step would hang; the agreement may take a step or two itself.
    last = loop.global_step
    assert last in (10, 11, 12)
    assert limit.limit_s == 3600.0  # callbacks come back with what rank 0's copies reached
    assert stopper.best == loop.history["val_loss"][-1]
    assert (best.best.epoch, best.best.loss) == (loop.epoch - 1, loop.history["loss"][-1])
    assert called == [0] * loop.epoch  # a list that a callback's function closes over is the caller's own

    # Each sample once, over ranks.
    assert loop.history["val_rows"] == [33.0] * 3
    assert set(loop.history["iterfreq4_val_rows"]) == {33.0}

    # The schedule: its own optimizer, where it was.
    assert by_epoch.scheduler.optimizer is loop.optimizer
    assert by_epoch.scheduler.last_epoch == 3
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert loop.history["lr"] == pytest.approx([0.1, 0.05, 0.025])

    # The average is in the model, and was evaluated on all ranks.
    assert torch.equal(ema.average["fc.weight"], loop.model.fc.weight)
    assert len(loop.history["ema_val_loss"]) == 3
    assert loop.history.step_indices("grad_norm") == [1, *range(2, last + 1, 2)]

    # One file, by rank 0, with the values over all ranks.
    assert len(event_files(tmp_path)) == 1
    found = read(tmp_path)
    assert steps(found["loss"]) == list(range(1, last + 1))
    assert values_of(found["loss"]) == pytest.approx(loop.history.steps("loss"), rel=1e-6)
    assert steps(found["epoch/loss"]) == steps(found["val_rows"]) == [4, 8, last]
    lengths = board._epoch_values.state_dict()["lengths"]
    assert lengths == {name: len(loop.history[name]) for name in loop.history}


class Normed(Net):
    """A model with buffers of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@pytest.mark.long
def test_metrics_of_the_last_epoch_hold_at_the_end_of_training_on_all_ranks() -> None:
    """An evaluation lends other ranks the buffers of rank 0, and gives them their own back: that is no training."""
    torch.manual_seed(0)
    loop = make_loop(model=Normed(), gpu_mode="ddp", devices=2, timeout=20)
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation(Counts()), ModelPerformanceEvaluation(Counts())])
    assert loop.history["val_rows"] == [33.0] * 2  # of two callbacks, one value in each epoch
    assert loop.history["train_end_val_rows"] == [33.0]


class Leaves(AbstractCallback):
    """Takes itself out of the list, after counting its epochs."""

    epochs = 0

    def on_epoch_end(self) -> None:
        self.epochs += 1

    def on_train_end(self) -> None:
        self.train_loop_obj.callbacks.remove(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Brings(AbstractCallback):
    """Brings others along: one before itself, one of a class that only the rank knows, one that knows this one."""

    def on_train_begin(self) -> None:
        class MadeHere(AbstractCallback):
            level = 3

        others = [AbstractCallback("plain"), MadeHere("made here"), AbstractCallback("knows")]
        others[2].friends = [self, self.train_loop_obj, self.train_loop_obj.model]
        self.kept = others[1]
        self.train_loop_obj.callbacks.insert(0, others[0])
        self.train_loop_obj.callbacks += others[1:]


class DiesOnce(AbstractCallback):
    """Where a run survives that, in the middle of its second epoch; not where the mark is there already."""

    def __init__(self, mark: Path) -> None:
        super().__init__("dies once")
        self.mark = mark

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == 10 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)


class BringsWhatCanNotBeSent(AbstractCallback):
    def on_epoch_end(self) -> None:
        other = AbstractCallback("lock")
        other.lock = threading.Lock()
        self.train_loop_obj.callbacks.append(other)


@pytest.mark.long
def test_hooks_that_change_the_list_of_callbacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The caller's list ends as in one process, in each kind of run that sends it; its own callbacks stay its own."""
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "single": ({}, {}),
        "ddp": ({"gpu_mode": "ddp", "devices": 2}, {}),
        "restartable": ({}, {"max_restarts": 1, "restart_every_steps": 3}),
    }
    found: dict[str, Any] = {}
    for kind, (made, fitted) in kinds.items():
        if kind == "restartable":
            (tmp_path / "mark").unlink()
        else:
            (tmp_path / "mark").touch()
        loop, dies = make_loop(**made), DiesOnce(tmp_path / "mark")
        given = [Leaves("leaves"), Brings("brings"), dies, Leaves("leaves too")]
        loop.fit(num_epochs=2, callbacks=given, **fitted)
        assert len(loop.restarts) == (kind == "restartable")
        _, brings, same, made_here, knows = loop.callbacks
        assert same is dies
        found[kind] = [
            [callback.callback_name for callback in loop.callbacks],
            [callback.epochs for callback in given if isinstance(callback, Leaves)],
            type(made_here).__name__, made_here.level,
            brings is given[1], type(brings.kept).__name__, brings.kept.level,
            brings.kept is made_here or kind == "restartable",  # there on_train_begin has made the other anew
            all(map(operator.is_, knows.friends, [brings, loop, loop.model])),
        ]  # fmt: skip
        if kind == "ddp":
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # ranks have the caller's filters: here an error
                loop.fit(num_epochs=1, callbacks=[*given, stays := BringsWhatCanNotBeSent()])
            assert "callback 'lock', added in training, can't be pickled" in capfd.readouterr().err
            assert loop.callbacks[3] is stays
            assert "lock" not in [callback.callback_name for callback in loop.callbacks]
            assert loop.epoch == 3
    assert found["single"][0] == ["plain", "brings", "dies once", "made here", "knows"]
    assert found["ddp"] == found["restartable"] == found["single"]


@pytest.mark.long
def test_bad_data_on_one_rank(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    """It spoils the gradients of all: all stop, and rank 0 names the parameters."""
    dataset = make_data()
    dataset.tensors[0][48:64] = math.nan  # the fourth batch: rank 1's second
    torch.manual_seed(0)
    model = Net()
    loop = cpu_loop(model, DataLoader(TensorDataset(*dataset.tensors), 16), gpu_mode="ddp", devices=2)
    guard = TerminateOnNaN()
    warmup = LinearWithWarmupScheduler(4, 8)
    loop.fit(num_epochs=2, callbacks=[guard, warmup])
    assert guard.found is not None
    assert guard.found.parameters == ("fc.weight", "fc.bias")
    assert guard.found.step == 2
    assert 2 <= loop.global_step == warmup.scheduler.last_epoch <= 4
    printed = capfd.readouterr()
    assert printed.err.count("Training ends: ") == 1
    assert "lr_scheduler" not in printed.err  # no warning about a wrong order of calls


@pytest.mark.long
def test_a_script_may_step_its_own_scheduler_between_two_fits() -> None:
    """Torch's warning about a scheduler that steps before its optimizer would be an error here."""
    loop = make_loop(gpu_mode="ddp", devices=2)
    schedule = lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)  # type: ignore[arg-type]
    rates = []
    for _ in range(2):
        loop.fit(num_epochs=1)
        rates.append(loop.optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates[1] == rates[0] / 2


@pytest.mark.long
def test_two_callbacks_of_one_name_keep_what_each_shares(tmp_path: Path) -> None:
    boards = [TensorBoard(tmp_path / name) for name in ("a", "b")]
    make_loop(gpu_mode="ddp", devices=2).fit(num_epochs=1, callbacks=boards)
    assert [Path(board.log_dir).name for board in boards] == ["a", "b"]
    assert all(list((tmp_path / name).iterdir()) for name in ("a", "b"))


def test_needs_no_more_than_the_loop(tmp_path: Path) -> None:
    """All of them at once in one process too, so that a failure above can be told from one of the ranks."""
    loop = make_loop()
    callbacks: list[Any] = [
        TensorBoard(tmp_path), TerminateOnNaN(), EarlyStopping(), ExponentialMovingAverage(evaluate=True),
        GradientStats(2), LearningRateMonitor(), ModelPerformanceEvaluation(Counts()),
        TimeLimit(hours=1), LRScheduler(lr_scheduler.StepLR, step_size=1),
    ]  # fmt: skip
    loop.fit(num_epochs=1, callbacks=callbacks)
    assert loop.history["val_rows"] == [33.0]


class OnRankZero(AbstractCallback):
    def __init__(self, call: str) -> None:
        super().__init__("mine", device_idx_execution=0)
        self.call = call

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if self.call == "evaluate":
            loop.evaluate_loss_on_validation_set()
        elif self.call == "reduce":
            distributed.all_reduce(1.0)
        else:
            loop.model(torch.zeros(1, 4))


@pytest.mark.long
@pytest.mark.parametrize(("mode", "call"), [("ddp", "evaluate"), ("ddp", "reduce"), ("fsdp", "model")])
def test_what_needs_all_ranks_is_an_error_in_a_callback_of_one_rank(mode: str, call: str) -> None:
    loop = make_loop(gpu_mode=mode, devices=2, timeout=60)
    with pytest.raises(WorkerFailedError, match="mine was made with device_idx_execution"):
        loop.fit(num_epochs=1, callbacks=[OnRankZero(call)], fsdp_model_args={"shard": [nn.Linear]})


class OnlyIfMain(AbstractCallback):
    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.is_main_process():
            loop.evaluate_loss_on_validation_set()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_evaluation_by_one_rank_is_an_error_that_names_what_the_others_did(mode: str) -> None:
    loop = make_loop(gpu_mode=mode, devices=2, timeout=60)
    with pytest.raises(WorkerFailedError, match="ranks called different exchanges") as error:
        loop.fit(num_epochs=1, callbacks=[OnlyIfMain("only if main")], fsdp_model_args={"shard": [nn.Linear]})
    assert "was the beginning of an evaluation" in str(error.value)
    assert "was the end of a hook" in str(error.value)
    assert "code under `if rank == 0:`" in str(error.value)


class Replaces(AbstractCallback):
    """Gives the loop another optimizer after the first epoch."""

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.epoch == 0:
            loop.optimizer = optim.Adam(loop.model.parameters(), lr=0.4)


@pytest.mark.long
@pytest.mark.parametrize("gpu_mode", ["ddp", "fsdp"])
def test_a_schedule_follows_another_optimizer_in_all_ranks(gpu_mode: str) -> None:
    model = Net()
    loop = make_loop(model, gpu_mode=gpu_mode, devices=2, seed=0)
    schedule = LRScheduler(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    loop.fit(3, callbacks=[schedule, Replaces(), LearningRateMonitor()])
    assert loop.history["lr"] == [0.1, 0.4, 0.2]
    assert schedule.scheduler.optimizer is loop.optimizer
    loop.fit(1, callbacks=[schedule, LearningRateMonitor()])
    assert loop.history["lr"][3:] == [0.1]
