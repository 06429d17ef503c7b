"""The column to predict: its type of problem, its classes as numbers, and what a prediction is worth."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api import types
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import get_scorer, make_scorer

from trainloop.errors import ConfigurationError
from trainloop.tabular.columns import Columns, Rows, read_table
from trainloop.tuning.folds import make_folds

__all__ = ["METRICS", "Metric", "Problem", "Target", "held_out_rows", "labelled_rows", "understand"]

Problem = Literal["binary", "multiclass", "regression"]

_OF_CLASSES = {name: name for name in ("accuracy", "balanced_accuracy", "f1_macro", "f1_weighted")}
_OF_CLASSES |= {"mcc": "matthews_corrcoef", "roc_auc": "roc_auc_ovo", "log_loss": "log_loss"}
_OF_NUMBERS = ("root_mean_squared_error", "mean_squared_error", "mean_absolute_error", "median_absolute_error")
METRICS: dict[str, dict[str, str]] = {
    "binary": {**_OF_CLASSES, "f1": "f1", "precision": "precision", "recall": "recall"},
    "multiclass": _OF_CLASSES,
    "regression": {**{name: f"neg_{name}" for name in _OF_NUMBERS}, "r2": "r2"},
}
"""Of each problem scikit-learn's scorers by our name, the default ``eval_metric`` first."""
_ALSO = {"rmse": "root_mean_squared_error", "mse": "mean_squared_error", "mae": "mean_absolute_error"}
_ALSO |= {"acc": "accuracy", "nll": "log_loss", "roc_auc_ovo": "roc_auc"}
_MANY_ROWS = 1000  # above, numbers are classes only where each comes up often


@dataclass(frozen=True)
class Target:
    """What is predicted."""

    label: str
    problem: Problem
    classes: tuple[Any, ...]
    """Sorted; empty for a regression."""

    @property
    def num_outputs(self) -> int:
        """Columns of a prediction: chances of the classes, or one number."""
        return len(self.classes) or 1

    @classmethod
    def learn(cls, label: str, values: pd.Series, problem: Problem | None) -> Target:
        """The problem that these values, of which none is missing, pose; an error if they do not suit ``problem``."""
        classes = list(values.unique())
        if len(classes) < 2:
            raise ConfigurationError(
                f"label {label!r} has only one value, {classes[0]!r}: there is nothing to learn. Give data with at "
                "least two classes, or numbers that differ."
            )
        problem = problem or _infer(values, len(classes))
        if problem == "regression":
            if not np.isfinite(pd.to_numeric(values.astype(object), errors="coerce").astype(float)).all():
                raise ConfigurationError(
                    f"label {label!r} holds values that are no finite numbers, so it is no regression. Drop these "
                    "rows, or use problem_type='multiclass'."
                )
            return cls(label, problem, ())
        if problem == "binary" and len(classes) > 2:
            raise ConfigurationError(
                f"label {label!r} has {len(classes)} classes, and problem_type='binary' has two. "
                "Use problem_type='multiclass', or leave it out."
            )
        try:
            return cls(label, problem, tuple(sorted(classes)))
        except TypeError:  # of several types
            return cls(label, problem, tuple(sorted(classes, key=str)))

    def encode(self, values: pd.Series) -> Rows:
        """Classes as their positions, numbers as floats; an error if there are classes that training had not."""
        if self.problem == "regression":
            return np.asarray(values, dtype=float)
        places = {value: place for place, value in enumerate(self.classes)}
        if unknown := [value for value in values.unique() if value not in places]:
            raise ConfigurationError(
                f"label {self.label!r} holds {unknown[0]!r}, which was no class in training ({self.classes!r:.200}). "
                "Leave these rows out."
            )
        return np.array([places[value] for value in values], dtype=np.int64)

    def decode(self, predictions: Rows) -> Rows:
        """What a prediction says: the class with the best chance, or the number."""
        if self.problem == "regression":
            return predictions
        return np.asarray(pd.Series(list(self.classes)).to_numpy()[predictions.argmax(axis=1)])


def held_out_rows(y: Rows, target: Target) -> tuple[Rows, Rows]:
    """Rows to train on and to validate on: AutoGluon's share of them, of each class its part."""
    rows = len(y)
    share = max(0.1, min(0.2, 500 / rows)) if rows < 5000 else max(0.01, min(0.1, 2500 / rows))
    if rows < 2:
        raise ConfigurationError(f"train_data has {rows} row with a label: one is to train on, and one to validate on.")
    fold = make_folds(rows, min(rows, round(1 / share)), seed=0, classes=y if target.classes else None)[0]
    train, validation = fold.train, fold.validation
    if target.classes:  # a class with a single row can only be learnt
        alone = validation[~np.isin(y[validation], y[train])]
        if len(alone) < len(validation):
            train, validation = np.sort(np.append(train, alone)), np.setdiff1d(validation, alone)
    return train, validation


def labelled_rows(data: object, label: str, what: str = "data") -> pd.DataFrame:
    """The rows of a table whose label is known; an error if there is none."""
    frame = read_table(data, what)
    if label not in frame.columns:
        raise ConfigurationError(
            f"{what} has no column {label!r}, the label; it has {', '.join(map(repr, frame.columns))}. "
            f"Give a table with it, or TabularPredictor(label=...) its name."
        )
    known = frame[label].notna()
    if not known.any():
        raise ConfigurationError(f"the label {label!r} is missing in all {len(frame)} rows of {what}.")
    return frame[known]


def understand(
    train_data: object, tuning_data: object, label: str, problem: Problem | None, folds: int
) -> tuple[pd.DataFrame, Target, Columns, tuple[Rows, Rows] | None]:
    """The rows with a label, what is predicted, the columns, and which rows train and which validate."""
    frame = labelled_rows(train_data, label, "train_data")
    target = Target.learn(label, frame[label], problem)
    columns = Columns.learn(frame.drop(columns=label))
    if tuning_data is None:
        return frame, target, columns, None if folds > 1 else held_out_rows(target.encode(frame[label]), target)
    if folds > 1:
        raise ConfigurationError(
            "tuning_data with num_bag_folds: a bag validates on its own folds. Leave one of the two out."
        )
    more = labelled_rows(tuning_data, label, "tuning_data")
    columns.clean(more, "tuning_data")
    own, both = len(frame), len(frame) + len(more)
    frame = pd.concat([frame, more[[*columns.kinds, label]]], ignore_index=True)
    return frame, target, columns, (np.arange(own), np.arange(own, both))


def _infer(values: pd.Series, num_classes: int) -> Problem:
    if num_classes == 2:
        return "binary"
    found = types.infer_dtype(values)
    if found not in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "multiclass"
    often = 0.05 if len(values) > _MANY_ROWS else 0.1
    whole = (np.asarray(values, dtype=float) % 1 == 0).all()
    return "multiclass" if whole and num_classes <= often * len(values) else "regression"


class _Known(BaseEstimator):
    """Stands for a model whose predictions are known: scikit-learn's scorers ask models."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def fit(self) -> None:
        """Nothing is left to learn."""

    def predict(self, x: object) -> Rows:
        return self.rows


class _KnownNumbers(RegressorMixin, _Known):
    pass


class _KnownClasses(ClassifierMixin, _Known):
    @property
    def classes_(self) -> Rows:
        return np.arange(self.rows.shape[1])

    def predict(self, x: object) -> Rows:
        return self.rows.argmax(axis=1)

    def predict_proba(self, x: object) -> Rows:
        return self.rows / np.maximum(self.rows.sum(axis=1, keepdims=True), 1e-15)


def _log_loss(model: _KnownClasses, x: object, truth: Rows) -> float:
    """Also of few rows that lack classes, which scikit-learn's refuses."""
    chances = model.predict_proba(x)[np.arange(len(truth)), truth]
    return float(np.log(np.clip(chances, 1e-15, 1)).mean())


@dataclass(frozen=True)
class Metric:
    """What predictions are worth; greater is better."""

    name: str
    scorer: Callable[[Any, Any, Rows], float]

    @classmethod
    def find(cls, metric: str | Callable[[Any, Any], float] | None, problem: Problem) -> Metric:
        """The metric of that name, or of a function ``metric(y_true, y_pred)`` of which greater is better."""
        known = METRICS[problem]
        if callable(metric):
            return cls(getattr(metric, "__name__", "metric"), make_scorer(metric))
        name = next(iter(known)) if metric is None else _ALSO.get(metric, metric)
        if name not in known:
            raise ConfigurationError(
                f"eval_metric={metric!r}: a {problem} problem has {', '.join(known)}; or give a function "
                "metric(y_true, y_pred) of which greater is better."
            )
        return cls(name, _log_loss if name == "log_loss" else get_scorer(known[name]))

    def __call__(self, truth: Rows, predictions: Rows) -> float:
        """Of encoded targets, and of chances or numbers; NaN where these rows have no such score."""
        rows = np.asarray(predictions, dtype=float)
        model = _KnownClasses(rows) if rows.ndim == 2 else _KnownNumbers(rows)
        with warnings.catch_warnings():  # few rows may lack classes
            warnings.simplefilter("ignore")
            try:
                return float(self.scorer(model, None, np.asarray(truth)))
            except ValueError:
                return float("nan")
