"""Callbacks that evaluate metrics over whole datasets, and report the history."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.small_loop import STEPS_PER_EPOCH, Counts, Net, Scores, make_loop
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    ModelPerformanceEvaluation,
    TrainHistoryPlot,
)
from trainloop.errors import ConfigurationError
from trainloop.result_package import classification


def test_metrics_of_each_epoch_and_of_the_end() -> None:
    loop = make_loop()
    # EarlyStopping finds the metric of the same epoch, in whatever order they are passed.
    callbacks = [
        EarlyStopping("val_accuracy_macro", patience=9),
        ModelPerformanceEvaluation({"macro": accuracy, "p": classification, "named": "f1"}),
    ]
    callbacks[0] = EarlyStopping("val_macro", patience=9, mode="max")
    loop.fit(num_epochs=2, callbacks=callbacks)
    y_pred, y_true, _ = loop.predict_on_validation_set()
    now = (y_pred == y_true).double().mean().item()
    assert len(loop.history["val_macro"]) == 2
    assert loop.history["val_macro"][-1] == loop.history["train_end_val_macro"][-1] == pytest.approx(now)
    assert loop.history["val_p_accuracy"] == loop.history["val_macro"]
    assert loop.history["val_named"] == loop.history["val_p_f1"]


def test_a_metric_of_several_evaluations_has_one_value() -> None:
    loop = make_loop()
    seldom = ModelPerformanceEvaluation({"top1": "accuracy", "f1": "f1"}, eval_frequency=2)
    loop.fit(num_epochs=3, callbacks=[ModelPerformanceEvaluation({"top1": accuracy}), seldom])
    numbers = {name: len(loop.history[name]) for name in loop.history if name.endswith(("top1", "f1"))}
    assert numbers == {"val_top1": 3, "val_f1": 2, "train_end_val_top1": 1, "train_end_val_f1": 1}


def accuracy(y_pred: Any, y_true: Any, metadata: Any) -> float:
    return float((y_pred == y_true).double().mean())


@pytest.mark.parametrize(
    "arguments, names",
    [
        ({}, {"val_rows"}),
        ({"on_train_data": True}, {"val_rows", "train_rows"}),
        ({"on_train_data": True, "on_val_data": False}, {"train_rows"}),
    ],
)
def test_on_which_data(arguments: dict[str, Any], names: set[str]) -> None:
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(Counts(), **arguments)])
    found = {name: loop.history[name] for name in loop.history if name.endswith("rows")}
    rows = {"val_rows": [33.0], "train_rows": [101.0]}
    assert found == {**{n: rows[n] for n in names}, **{f"train_end_{n}": rows[n] for n in names}}


@pytest.mark.parametrize(
    "arguments, in_history, asked",
    [
        pytest.param({}, 5, 5, id="each epoch; the last is the end"),
        pytest.param({"eval_frequency": 2}, 3, 3, id="every second from the first on; the last is the end"),
        pytest.param({"eval_frequency": 3}, 2, 3, id="every third, and the end"),
        pytest.param({"on_each_epoch": False}, 0, 1, id="the end only"),
    ],
)
def test_how_often(arguments: dict[str, Any], in_history: int, asked: int) -> None:
    loop, package = make_loop(), Counts()
    loop.fit(num_epochs=5, callbacks=[ModelPerformanceEvaluation(package, **arguments)])
    assert len(loop.history.get("val_rows", [])) == in_history
    assert len(loop.history["train_end_val_rows"]) == 1
    assert package.asked == asked


def test_weights_that_changed_at_the_end_are_evaluated_anew() -> None:
    loop, ema = make_loop(), ExponentialMovingAverage(0.99)
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation({"mean": mean_prediction}), ema])
    assert loop.history["train_end_val_mean"] == [mean_prediction(*loop.predict_on_validation_set())]
    assert loop.history["train_end_val_mean"] != loop.history["val_mean"][-1:]


class Changes(AbstractCallback):
    """Changes what the metrics of the last epoch were computed from."""

    def __init__(self, what: str) -> None:
        super().__init__("changes", execution_order=9)
        self.what = what

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        if self.what == "labels":
            loop.validation_loader.dataset.tensors[1].add_(1)
        elif self.what == "loader":
            loop.validation_loader = DataLoader(make_data(20, seed=7), 5)
        else:
            loop.model.sign = -1


class Signed(Net):
    sign = 1

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        classes, y, metadata = super().get_predictions(batch_data, device)
        return self.sign * classes, y, metadata


@pytest.mark.parametrize("what", ["labels", "loader", "attribute"])
def test_metrics_of_the_end_are_of_what_callbacks_have_changed_after_the_last_epoch(what: str) -> None:
    def sums(y_pred: Any, y_true: Any, metadata: Any) -> float:
        return float(y_pred.double().sum() + y_true.sum())

    loop = make_loop(Signed())
    loop.fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation({"sums": sums}), Changes(what)])
    assert loop.history["train_end_val_sums"] == [sums(*loop.predict_on_validation_set())]
    assert loop.history["train_end_val_sums"] != loop.history["val_sums"]


def mean_prediction(y_pred: Any, y_true: Any, metadata: Any) -> float:
    return float(y_pred.double().mean())


def test_between_epochs() -> None:
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation(Counts(), on_iteration_frequency=4)])
    assert loop.history["iterfreq4_val_rows"] == [33.0] * 3  # after batches 4, 8 and 12


def test_an_evaluation_that_was_never_due_within_an_epoch_is_reported() -> None:
    with pytest.warns(match=r"on_iteration_frequency=8\): training ended after 7 batches"):
        make_loop().fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(Counts(), on_iteration_frequency=8)])


def test_arguments_are_in_the_metadata_of_functions() -> None:
    def seen(y_pred: Any, y_true: Any, metadata: Any) -> float:
        return metadata["lr"]

    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(seen, {"lr": 0.1})])
    assert loop.history["val_seen"] == [0.1]


def _one(y_pred: Any, y_true: Any, metadata: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: make_loop(validation=False).fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(Counts())]),
            "ModelPerformanceEvaluation(on_val_data=True): the loop has no validation_loader. Pass one to TrainLoop.",
        ),
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation("acuracy")]),
            "ModelPerformanceEvaluation: no metric has the name 'acuracy'. Names are accuracy, ",
        ),
        (
            lambda: make_loop().fit(
                num_epochs=1, callbacks=[ModelPerformanceEvaluation("f1"), ModelPerformanceEvaluation({"f1": _one})]
            ),
            "two metrics have the name 'val_f1', with the values",
        ),
    ],
)
def test_what_cannot_work(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


def test_history_plot(tmp_path: Path, may_leave: Callable[..., None]) -> None:
    pytest.importorskip("matplotlib")
    may_leave(".ttf")  # matplotlib keeps its fonts open
    path = tmp_path / "plots" / "history.svg"
    sizes = []

    class Looks(Scores):
        execution_order = 1000

        def on_epoch_end(self) -> None:
            sizes.append(path.stat().st_size if path.exists() else 0)

    looks = Looks([])
    looks.execution_order = 1000
    make_loop().fit(num_epochs=3, callbacks=[TrainHistoryPlot(path, every_n_epochs=2), looks])
    assert sizes[0] == 0
    assert sizes[1] > 0
    assert "val_loss" in path.read_text() or path.stat().st_size != sizes[1]


def test_matplotlib_is_missed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"needs matplotlib: pip install '\.\[plot\]'"):
        loop.fit(num_epochs=1, callbacks=[TrainHistoryPlot()])
    assert loop.global_step == 0


@pytest.mark.long
def test_metrics_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    loop = make_loop()
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation({"ours": accuracy, "theirs": metric})])
    assert loop.history["val_theirs"] == pytest.approx(loop.history["val_ours"])
    assert loop.global_step == 2 * STEPS_PER_EPOCH
