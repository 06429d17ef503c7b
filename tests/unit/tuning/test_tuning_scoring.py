"""Scores of known predictions beside scikit-learn's own, weights of an ensemble, and a model's part of the time."""

from __future__ import annotations

import functools
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.tuning_kinds import make_scaled, rows
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, get_scorer, mean_squared_error, r2_score, roc_auc_score

from trainloop.callbacks import TimeLimit
from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota
from trainloop.tuning import BaggedPredictor, EstimatorLoop, fitting, seconds_left, tune
from trainloop.tuning.running import worker
from trainloop.tuning.scoring import ensemble_weights, scorer


@pytest.mark.parametrize(
    "name, classes",
    [
        *((name, 2) for name in ("accuracy", "roc_auc", "average_precision", "f1", "neg_log_loss", "neg_brier_score")),
        *((name, 3) for name in ("accuracy", "roc_auc_ovo", "roc_auc_ovr_weighted", "neg_log_loss", "f1_macro")),
        *((name, 0) for name in ("r2", "neg_root_mean_squared_error", "explained_variance")),
    ],
)
def test_a_score_of_predictions_is_scikit_learn_s_of_the_model(name: str, classes: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4))
    signal = x[:, 0] + rng.normal(size=120)
    if classes:
        y = np.digitize(signal, np.quantile(signal, np.linspace(0, 1, classes + 1)[1:-1]))
        model = LogisticRegression().fit(x[:60], y[:60])
        predictions = model.predict_proba(x[60:])
    else:
        y, model = signal, LinearRegression().fit(x[:60], signal[:60])
        predictions = model.predict(x[60:])
    metric = scorer(name)
    assert metric.__name__ == name
    expected = get_scorer(name)(model, x[60:], y[60:])
    assert pickle.loads(pickle.dumps(metric))(y[60:], predictions) == pytest.approx(expected)
    if not classes:
        assert metric(y[60:], predictions[:, None]) == pytest.approx(expected)  # as a network gives them


def test_classes_may_have_names_and_metrics_be_functions() -> None:
    assert scorer("accuracy")(["a", "b", "b"], ["a", "b", "a"]) == 2 / 3

    def right(y_true: Any, y_pred: Any) -> float:
        return float((y_true == y_pred).sum())

    assert scorer(right).__name__ == "right"
    assert scorer(right)([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]) == 2
    assert np.isnan(scorer("roc_auc")([1, 1], [[0.9, 0.1], [0.2, 0.8]]))
    with pytest.warns(
        UserWarning, match="the score 'f1' is undefined for these 2 rows, and counts as NaN: pos_label=1"
    ):
        assert np.isnan(scorer("f1")(["no", "yes"], [[0.9, 0.1], [0.2, 0.8]], classes=["no", "yes"]))
    with pytest.raises(ConfigurationError, match="metric='auc': scikit-learn has no such scorer"):
        scorer("auc")
    for metric in (mean_squared_error, functools.partial(mean_squared_error, multioutput="raw_values")):
        with pytest.raises(ConfigurationError, match="metric=mean_squared_error: lower is better, but the greatest"):
            scorer(metric)

    def my_error(y_true: Any, y_pred: Any) -> float:
        return -float(np.abs(y_true - y_pred).mean())

    with pytest.warns(UserWarning, match="metric=my_error: by its name, lower is better"):
        assert scorer(my_error)([0.0, 1.0], [1.0, 1.0]) == -0.5


@pytest.mark.parametrize("labels", [[-1, 1], [1, 2], ["no", "yes"], [3, 5, 9]], ids=str)
@pytest.mark.parametrize(
    "name", ["accuracy", "f1_macro", "roc_auc", "roc_auc_ovo", "neg_log_loss", "balanced_accuracy"]
)
def test_an_estimator_s_score_is_of_its_own_classes(name: str, labels: list[Any]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    y = np.array(labels)[np.digitize(x[:, 0], np.linspace(-0.5, 0.5, len(labels) + 1)[1:-1])]
    train, held_out = (x[:60], y[:60]), (x[60:], y[60:])
    name = name if len(labels) == 2 or name != "roc_auc" else "roc_auc_ovr"
    made = EstimatorLoop(LogisticRegression(), train, held_out)
    outcome = fitting.fit(made, fold=None, data=None, fit_args=None, params={}, metric=scorer(name))
    assert outcome.score == pytest.approx(get_scorer(name)(LogisticRegression().fit(*train), *held_out))


def test_outputs_in_several_columns_are_scored_as_they_are() -> None:
    rng = np.random.default_rng(0)
    truth, predictions = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    assert scorer("r2")(truth, predictions) == pytest.approx(r2_score(truth, predictions))
    labels, chances = (truth > 0).astype(int), 1 / (1 + np.exp(-predictions))
    assert scorer("roc_auc")(labels, chances) == pytest.approx(roc_auc_score(labels, chances))
    assert scorer("f1_macro")(labels, chances) == pytest.approx(f1_score(labels, chances > 0.5, average="macro"))
    assert scorer("accuracy")(labels, chances) == pytest.approx(accuracy_score(labels, chances > 0.5))
    assert scorer("accuracy")(np.eye(3, dtype=int)[[0, 1]], [[0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]) == 0.5  # one-hot


@pytest.mark.parametrize(
    ("name", "labels", "predictions", "what"),
    [
        (
            "accuracy",
            [-1, 1],
            [[0.9, 0.1], [0.2, 0.8]],
            r"y_true contains -1, but the 2 columns .* classes 0 to 1\. Num",
        ),
        ("accuracy", ["no", "yes"], [[0.9, 0.1], [0.2, 0.8]], "accuracy: y_true contains 'no'"),
        ("neg_log_loss", [0, 1], [[3.0, -1.0], [0.2, 0.8]], r"needs probabilities, .* numbers from -1 to 3, .*softmax"),
        ("roc_auc", [0, 1], [[3.0, 1.0], [0.2, 0.8]], "the sums of rows go from 1 to 4"),
        ("accuracy", [[1, 1], [0, 1]], [[0.3, 0.2], [-0.1, 0.4]], r"numbers from -0.1 to 0.4\..*torch.sigmoid"),
        ("neg_log_loss", [0, 1], [0.1, 0.8], r"needs probabilities with a column .* have shape \(2,\)"),
        ("roc_auc", [0, 1], [[0.1], [0.8]], r"needs probabilities with a column .* have shape \(2, 1\)"),
    ],
)
def test_columns_that_are_no_probabilities_of_the_classes(name: str, labels: Any, predictions: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        scorer(name)(labels, predictions)


def test_weights_are_better_than_the_best_model_and_the_second_metric_decides_between_equals() -> None:
    truth = np.array([0, 0, 1, 1])
    sure, unsure = (np.array([[p, 1 - p], [p, 1 - p], [1 - p, p], [1 - p, p]]) for p in (0.9, 0.6))
    accuracy, log_loss = scorer("accuracy"), scorer("neg_log_loss")
    assert ensemble_weights([unsure, sure], truth, accuracy, log_loss) == [0.0, 1.0]
    assert ensemble_weights([unsure, sure], truth, accuracy) == [1.0, 0.0]  # equal: the first

    def no_score(y_true: Any, predictions: Any) -> float:
        return float("nan")

    assert ensemble_weights([unsure, sure], truth, no_score, log_loss) == [0.0, 1.0]
    rng = np.random.default_rng(0)
    y = rng.normal(size=200)
    models = [y + rng.normal(size=200) * scale for scale in (0.5, 0.6, 3.0)]
    r2 = scorer("r2")
    weights = ensemble_weights(models, y, r2)
    assert sum(weights) == pytest.approx(1)
    assert r2(y, np.tensordot(weights, models, axes=1)) > max(r2(y, each) for each in models)
    assert weights == ensemble_weights(models, y, r2)


def test_what_gives_no_weights_is_an_error() -> None:
    truth, right = np.array([0, 1]), np.array([0.0, 1.0])
    for predictions, metrics, kind in (
        ([], [scorer("r2")], {}),
        ([right, np.zeros(3)], [scorer("r2")], {}),
        ([right, right[:, None]], [scorer("r2")], {}),
        ([right], [], {}),
        ([right], [scorer("r2")], {"rounds": 0}),
    ):
        with pytest.raises(ConfigurationError, match=r"ensemble_weights: .*(1 or more|\] rows|have the shapes)"):
            ensemble_weights(predictions, truth, *metrics, **kind)
    with pytest.raises(ConfigurationError, match=r"\[0, 1\] rows of the predictions are NaN"):
        ensemble_weights([right, np.array([0.0, np.nan])], truth, scorer("accuracy"))


def test_weights_chosen_on_few_rows_are_better_on_others_than_those_of_one_selection() -> None:
    def error(y_true: Any, predictions: Any) -> float:
        return -float(np.sqrt(np.square(y_true - predictions).mean()))

    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        y = rng.normal(size=1060)
        common = y + rng.normal(size=1060)  # models of the same rows err alike
        models = [common + 0.3 * rng.normal(size=1060) for _ in range(6)]
        few, others = [each[:60] for each in models], [each[60:] for each in models]
        weights = [ensemble_weights(few, y[:60], error, **kind) for kind in ({}, {"rounds": 25, "bags": 0})]
        errors.append([error(y[60:], np.tensordot(each, others, axes=1)) for each in weights])
    bagged, once = np.transpose(errors)
    assert (bagged > once).sum() >= 16  # of 20: by chance one time in 170


class Noted:
    """A backend that starts nothing, and remembers how long each fold was given."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.given: list[float] = []

    def start(self, job: Any, bag: int) -> None:
        self.jobs.append(job)
        self.given.append(job.until - time.time())

    def wait(self, timeout_s: float) -> list[Any]:
        from trainloop.tuning.running.local import note_end

        job = self.jobs.pop(0)
        note_end(job, 1)
        return [job]

    def close(self) -> list[Any]:
        return []


def test_samples_for_weights_have_rows_of_each_class() -> None:
    truth = np.array([0] * 146 + [1] * 4)

    def recall(truth: Any, predictions: Any) -> float:
        return sum((predictions > 0.5) & (truth == 1)) / sum(truth == 1)  # a sample without positives divides by zero

    with np.errstate(all="raise"):
        weights = ensemble_weights([np.zeros(150), truth * 0.9, np.ones(150) * 0.4], truth, recall, bags=60)
    assert weights[1] > 0.9


def test_folds_get_equal_parts_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Noted()
    search = "trainloop.tuning.running.search"
    monkeypatch.setattr(f"{search}.LocalBackend", lambda *_: backend)
    monkeypatch.setattr(f"{search}.lease_total", lambda total, *_: (list(range(total.num_cpus)), []))
    monkeypatch.setattr(f"{search}.machine_total", lambda total: total)
    options: dict[str, Any] = {"num_trials": 2, "num_bag_folds": 3, "total": ResourceQuota(2, 0), "progress": False}
    tune(make_scaled, {"scale": [0.0, 1.0]}, data=rows(), time_limit_s=1e6, **options)
    # Two at once: three waves of 300,000 s; what ends sooner leaves its time to those after it. A tenth is kept back.
    assert backend.given == pytest.approx([3e5, 3e5, 3e5, 4.5e5, 4.5e5, 9e5], rel=0.02)
    assert seconds_left() is None  # this process trains none
    monkeypatch.setattr(worker, "_until", time.time() + 50)
    assert seconds_left() == pytest.approx(50, abs=5)
    monkeypatch.setattr(worker, "_until", time.time() - 50)
    assert TimeLimit(seconds_left() or 3600).limit_s < 1  # over, and not without a limit


def test_a_quota_is_filled_from_another() -> None:
    assert ResourceQuota(2, memory="1GB").filled(ResourceQuota(4, 0.5, "2GB")) == ResourceQuota(2, 0.5, "1GB")
    assert ResourceQuota(num_gpus=0).filled(ResourceQuota()) == ResourceQuota(num_gpus=0)


def test_a_lazy_predictor_reads_its_models_once_and_takes_them_along(tmp_path: Path) -> None:
    read: list[int] = []

    def models() -> list[Any]:
        read.append(1)
        return [make_scaled({"scale": 2.0}, None)]

    bag = BaggedPredictor(models)
    assert not read
    assert pickle.loads(pickle.dumps(bag)).predict(rows()[0]).tolist() == bag.predict(rows()[0]).tolist()
    assert len(bag) == len(read) == 1


def test_saved_predictors_find_the_function_of_their_metric() -> None:
    """A pickle of a predictor names it: with another name, predictors that earlier versions saved can't be loaded."""
    saved = b"ctrainloop.tuning.scoring\n_log_loss\n."
    assert pickle.loads(saved) is scorer("neg_log_loss").score_model
