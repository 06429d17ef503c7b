"""Folds that were not trained on all classes: their loss, and predictions whose columns are other classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, plan
from trainloop.tuning import BaggedPredictor, EstimatorLoop, Trial, TuneResult, fitting
from trainloop.tuning.folds import Fold
from trainloop.tuning.storage import write

linear_model = pytest.importorskip("sklearn.linear_model")
metrics = pytest.importorskip("sklearn.metrics")

LABELS = {"numbers": [0, 1, 2], "numbers of any size": [-3, 5, 70], "strings": ["a", "b", "c"]}


def data(labels: list[Any], seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """60 rows, of which the first 20 have the first class, and so on."""
    y = np.repeat(np.array(labels), 20)
    return np.random.default_rng(seed).normal(size=(60, 2)) + np.repeat(np.arange(3), 20)[:, None], y


def fit(x: Any, y: Any, fold: Fold | None, metric: str = "val_loss") -> fitting.Outcome:
    made: Any = linear_model.LogisticRegression()
    return fitting.fit(made, fold=fold, data=(x, y), fit_args=None, params={}, metric=metric)


def in_all(estimator: Any, x: Any, labels: list[Any], missing: float = 0.0) -> np.ndarray[Any, Any]:
    """The estimator's probabilities, in columns of all classes."""
    wide = np.full((len(x), len(labels)), missing)
    for number, label in enumerate(estimator.classes_):
        wide[:, labels.index(label)] = estimator.predict_proba(x)[:, number]
    return wide


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize("shape", ["row", "column"])
def test_the_loss_of_a_class_that_the_fold_was_not_trained_on(labels: list[Any], missing: int, shape: str) -> None:
    x, y = data(labels)
    train = np.flatnonzero((y != labels[missing]) & (np.arange(60) % 3 > 0))
    validation = np.setdiff1d(np.arange(60), train)
    estimator = linear_model.LogisticRegression().fit(x[train], y[train])
    held_out = y[validation] if shape == "row" else y[validation][:, None]
    outcome = fitting.fit(
        EstimatorLoop(linear_model.LogisticRegression(), (x[train], y[train]), (x[validation], held_out)),
        fold=None,
        data=None,
        fit_args=None,
        params={},
        metric="val_loss",
    )
    wide = in_all(estimator, x[validation], labels, missing=1e-15)
    assert outcome.score == pytest.approx(metrics.log_loss(y[validation], wide, labels=labels), rel=1e-6)


def test_the_loss_of_numbers_in_a_table_of_one_column() -> None:
    x, _ = data([0, 1, 2])
    y = x[:, :1] ** 2
    loop = EstimatorLoop(linear_model.Ridge(), (x[:40], y[:40, 0]), (x[40:], y[40:]))
    outcome = fitting.fit(loop, fold=None, data=None, fit_args=None, params={}, metric="val_loss")
    predictions = linear_model.Ridge().fit(x[:40], y[:40, 0]).predict(x[40:])
    assert outcome.score == pytest.approx(metrics.mean_squared_error(y[40:], predictions))


def test_classes_of_several_targets_have_no_loss_of_their_own() -> None:
    x, y = data([0, 1, 2])
    trees = pytest.importorskip("sklearn.tree")
    loop = EstimatorLoop(trees.DecisionTreeClassifier(), (x, np.stack([y, y], 1)), (x, np.stack([y, y], 1)))
    with pytest.raises(ConfigurationError, match=r"needs a single target for each row, but y has the shape \(60, 2\)"):
        fitting.fit(loop, fold=None, data=None, fit_args=None, params={}, metric="val_loss")


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("missing", [(), (2,), (0, 1), (0, 1, 2)])
def test_a_bag_whose_models_know_different_classes(labels: list[Any], missing: tuple[int, ...], tmp_path: Path) -> None:
    x, y = data(labels)
    folds, models = [], []
    for number in range(3):
        validation = np.arange(number, 60, 3)
        lost = y == labels[number] if number in missing else np.zeros(60, dtype=bool)
        train = np.setdiff1d(np.flatnonzero(~lost), validation)
        fold = Fold(number, 3, train, validation)
        outcome = fit(x, y, fold)
        folder = tmp_path / "trial-0000" / f"fold-{number}"
        folder.mkdir(parents=True)
        write(folder / "predictions.pkl", outcome.predictions)
        write(folder / "model.pkl", outcome.model)
        write(folder / "result.pkl", {"score": outcome.score, "classes": outcome.classes})
        folds.append(fold)
        models.append(linear_model.LogisticRegression().fit(x[train], y[train]))
    trial = Trial(0, {}, [1.0] * 3, 1.0, "done")
    division = plan(ResourceQuota(1, 0), num_trials=1, num_bag_folds=3)
    result = TuneResult([trial], metric="val_loss", mode="min", plan=division, folder=tmp_path, folds=folds)
    means = np.mean([in_all(model, x, labels) for model in models], axis=0)
    np.testing.assert_allclose(result.predict(x), means)
    np.testing.assert_allclose(BaggedPredictor(models).predict(x), means)
    for fold, model in zip(folds, models):
        found = result.out_of_fold_predictions[fold.validation]
        np.testing.assert_allclose(found, in_all(model, x[fold.validation], labels))
