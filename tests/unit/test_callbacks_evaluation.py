"""Callbacks that evaluate metrics over whole datasets, and report the history."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_loop import STEPS_PER_EPOCH, Counts, Scores, make_loop
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    MetricHistoryRename,
    ModelPerformanceEvaluation,
    ModelPerformancePrintReport,
    TrainHistoryPlot,
)
from trainloop.callbacks.performance_eval import TrainHistoryFormatter
from trainloop.errors import ConfigurationError
from trainloop.result_package import ClassificationResultPackage


def test_metrics_of_each_epoch_and_of_the_end() -> None:
    loop = make_loop()
    package = ClassificationResultPackage()
    # EarlyStopping finds the metric of the same epoch, in whatever order they are passed.
    callbacks = [
        EarlyStopping("val_accuracy_macro", patience=9),
        ModelPerformanceEvaluation({"macro": accuracy, "p": package}),
    ]
    callbacks[0] = EarlyStopping("val_macro", patience=9, mode="max")
    loop.fit(num_epochs=2, callbacks=callbacks)
    y_pred, y_true, _ = loop.predict_on_validation_set()
    now = (y_pred == y_true).double().mean().item()
    assert len(loop.history["val_macro"]) == 2
    assert loop.history["val_macro"][-1] == loop.history["train_end_val_macro"][-1] == pytest.approx(now)
    assert loop.history["val_p_accuracy"] == loop.history["val_macro"]


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


def mean_prediction(y_pred: Any, y_true: Any, metadata: Any) -> float:
    return float(y_pred.double().mean())


def test_between_epochs() -> None:
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation(Counts(), on_iteration_frequency=4)])
    assert loop.history["iterfreq4_val_rows"] == [33.0] * 3  # after batches 4, 8 and 12


def test_a_package_that_needs_the_loss() -> None:
    loop, package = make_loop(), Counts()
    package.requires_loss = True
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation(package, {"lr": 0.1})])
    assert loop.history["val_own_loss"] == loop.history["val_loss"]
    assert package.hyperparameters == {"lr": 0.1}


def test_a_package_with_files_of_its_own() -> None:
    class Writes(Counts):
        folder: Any = None

        def set_experiment_dir_path_for_additional_results(self, *where: str) -> None:
            self.folder = where

    def run(**arguments: Any) -> Any:
        loop, package = make_loop(), Writes()
        loop.project_name, loop.experiment_name = "project", "first"  # as a tracking loop has
        loop.experiment_timestamp, loop.local_model_result_folder_path = "now", "here"
        loop.fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(package, **arguments)])
        return package.folder

    assert run() == ("project", "first", "now", "here")
    assert run(if_available_output_to_project_dir=False) is None


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ModelPerformanceEvaluation(Counts(), on_val_data=False), "are both False: set at least one to True"),
        (
            lambda: ModelPerformanceEvaluation(Counts(), eval_frequency=0),
            "eval_frequency=0: must be an int of 1 or more",
        ),
        (
            lambda: ModelPerformanceEvaluation(Counts(), on_iteration_frequency=-1),
            "on_iteration_frequency=-1: must be",
        ),
        (
            lambda: make_loop(validation=False).fit(num_epochs=1, callbacks=[ModelPerformanceEvaluation(Counts())]),
            "ModelPerformanceEvaluation(on_val_data=True): the loop has no validation_loader. Pass one to TrainLoop.",
        ),
        (lambda: ModelPerformancePrintReport([]), "metrics=[]: must be a list of names"),
        (lambda: ModelPerformancePrintReport("loss"), "metrics='loss': must be a list of names"),
        (
            lambda: ModelPerformancePrintReport(["loss"], report_frequency=0),
            "report_frequency=0: must be an int of 1 or more",
        ),
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[ModelPerformancePrintReport(["f1"])]),
            "ModelPerformancePrintReport: 'f1' is not in the history. The history has: ",
        ),
        (lambda: MetricHistoryRename("a", "b", True, True), "epoch_end=True, train_end=True: exactly one must be True"),
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[MetricHistoryRename("f1", "score")]),
            "MetricHistoryRename: input_metric_getter returned a list of length 0 instead of 1",
        ),
        (lambda: TrainHistoryPlot(every_n_epochs=0), "every_n_epochs=0: must be an int of 1 or more"),
    ],
)
def test_what_cannot_work(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


def test_print_report(capsys: pytest.CaptureFixture[str]) -> None:
    loop = make_loop()
    report = ModelPerformancePrintReport(["val_rows", "f1"], strict_metric_reporting=False, list_tracked_metrics=True)
    loop.fit(num_epochs=2, callbacks=[report, ModelPerformanceEvaluation(Counts())])
    out = capsys.readouterr().out
    assert out.count("---- Performance after epoch") == 2
    assert out.count("\nval_rows: 33\n") == 2
    assert "---- Performance at the end of training ----" in out
    assert "\ntrain_end_val_rows: 33\n" in out
    assert "'f1' is not in the history. The history has: 'loss'" in out or "The history has: 'accuracy'" in out
    assert "metrics: " in out


def test_print_report_every_second_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    report = ModelPerformancePrintReport(["loss"], report_frequency=2)
    make_loop().fit(num_epochs=3, callbacks=[report])
    out = capsys.readouterr().out
    assert [line[-6] for line in out.splitlines() if "after epoch" in line] == ["1", "3"]


@pytest.mark.usefixtures("events_on_stdout")
def test_metrics_made_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    loop = make_loop(validation=False)
    loop.fit(
        num_epochs=3,
        callbacks=[
            Scores([1.0, 2.0, 3.0]),
            MetricHistoryRename("score", "renamed"),
            MetricHistoryRename(lambda history: [2 * value for value in history["score"]], "doubled"),
            TrainHistoryFormatter(lambda history: [sum(history["score"])], lambda v: ("sum", v[0]), False, True),
            MetricHistoryRename("f1", "never", strict_metric_extract=False),
        ],
    )
    assert loop.history["renamed"] == [1.0, 2.0, 3.0]
    assert loop.history["doubled"] == [2.0, 4.0, 6.0]
    assert loop.history["sum"] == [6.0]
    assert "never" not in loop.history
    assert capsys.readouterr().out.count("returned a list of length 0 instead of") == 3


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


def test_metrics_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    loop = make_loop()
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro")
    loop.fit(num_epochs=2, callbacks=[ModelPerformanceEvaluation({"ours": accuracy, "theirs": metric})])
    assert loop.history["val_theirs"] == pytest.approx(loop.history["val_ours"])
    assert loop.global_step == 2 * STEPS_PER_EPOCH
