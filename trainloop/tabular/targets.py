"""The column to predict: its type of problem, its classes as numbers, and what a prediction is worth."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainloop.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Metric", "Problem", "Target", "find_metric"]

Problem = Literal["binary", "multiclass", "regression"]
PROBLEMS = ("binary", "multiclass", "regression")

_MANY_ROWS = 1000  # above, numbers are classes only where each comes up often
Rows = np.ndarray[Any, Any]


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
    def learn(cls, label: str, values: pd.Series, problem: str | None) -> Target:
        """The problem that these values, of which none is missing, pose.

        Raises
        ------
        ConfigurationError
            If they are all the same, or do not suit the ``problem`` that was asked for.
        """
        classes = list(values.unique())
        if len(classes) < 2:
            raise ConfigurationError(
                f"label {label!r} has only one value, {classes[0]!r}: there is nothing to learn. Give data with at "
                "least two classes, or numbers that differ."
            )
        found: Problem = _infer(values, len(classes)) if problem is None else problem  # type: ignore[assignment]
        if found == "regression":
            try:
                finite = bool(np.isfinite(np.asarray(values, dtype=float)).all())
            except (TypeError, ValueError):
                finite = False
            if not finite:
                raise ConfigurationError(
                    f"label {label!r} holds values that are no finite numbers, so it is no regression. Drop these "
                    "rows, or use problem_type='multiclass'."
                )
            return cls(label, found, ())
        if found == "binary" and len(classes) > 2:
            raise ConfigurationError(
                f"label {label!r} has {len(classes)} classes, and problem_type='binary' has two. "
                "Use problem_type='multiclass', or leave it out."
            )
        try:
            return cls(label, found, tuple(sorted(classes)))
        except TypeError:  # of several types
            return cls(label, found, tuple(sorted(classes, key=str)))

    def encode(self, values: pd.Series) -> Rows:
        """Classes as their positions, numbers as floats.

        Raises
        ------
        ConfigurationError
            If there are classes that training had not.
        """
        if self.problem == "regression":
            return np.asarray(values, dtype=float)
        places = {value: place for place, value in enumerate(self.classes)}
        unknown = [value for value in values.unique() if value not in places]
        if unknown:
            raise ConfigurationError(
                f"label {self.label!r} holds {unknown[0]!r}, which was no class in training ({self.classes!r:.200}). "
                "Leave these rows out."
            )
        return np.array([places[value] for value in values], dtype=np.int64)

    def decode(self, predictions: Rows) -> Rows:
        """What a prediction says: the class with the best chance, or the number."""
        if self.problem == "regression":
            return predictions
        import pandas

        return np.asarray(pandas.Series(list(self.classes)).to_numpy()[predictions.argmax(axis=1)])


def _infer(values: pd.Series, num_classes: int) -> Problem:
    if num_classes == 2:
        return "binary"
    from pandas.api import types

    if not types.is_numeric_dtype(values.dtype):
        numeric = types.infer_dtype(values) in ("integer", "floating", "mixed-integer-float", "decimal")
        if not numeric or str(values.dtype) == "category":
            return "multiclass"
    numbers = np.asarray(values, dtype=float)
    often = 0.05 if len(values) > _MANY_ROWS else 0.1
    return "multiclass" if (numbers % 1 == 0).all() and num_classes <= often * len(values) else "regression"


@dataclass(frozen=True)
class Metric:
    """What a prediction is worth; greater is better."""

    name: str
    function: Callable[[Any, Any], float]
    """Of the truth and of chances, classes or numbers."""
    takes: Literal["chances", "classes", "numbers"]
    sign: int = 1
    """-1 where a smaller value of ``function`` is better."""

    def __call__(self, truth: Any, predictions: Any) -> float:
        """Of encoded targets, and of chances or numbers."""
        given = np.asarray(predictions, dtype=float)
        if self.takes == "classes":
            given = given.argmax(axis=1)
        with warnings.catch_warnings():  # few rows may lack classes
            warnings.simplefilter("ignore")
            return self.sign * float(self.function(np.asarray(truth), given))


def _log_loss(truth: Rows, chances: Rows) -> float:
    rows = chances / np.maximum(chances.sum(axis=1, keepdims=True), 1e-15)
    return float(-np.log(np.clip(rows[np.arange(len(truth)), truth], 1e-15, 1)).mean())


def _roc_auc(truth: Rows, chances: Rows) -> float:
    from sklearn.metrics import roc_auc_score

    if len(np.unique(truth)) < chances.shape[1]:
        return float("nan")  # a class that is not there can't be ranked
    if chances.shape[1] == 2:
        return float(roc_auc_score(truth, chances[:, 1]))
    chances = chances / np.maximum(chances.sum(axis=1, keepdims=True), 1e-15)
    return float(roc_auc_score(truth, chances, multi_class="ovo", labels=np.arange(chances.shape[1])))


def metrics_of(problem: Problem) -> dict[str, Metric]:
    """The metrics by name, the default one first."""
    from sklearn import metrics as m

    if problem == "regression":
        return {
            name: Metric(name, function, "numbers", sign)
            for name, function, sign in (
                ("root_mean_squared_error", m.root_mean_squared_error, -1),
                ("mean_squared_error", m.mean_squared_error, -1),
                ("mean_absolute_error", m.mean_absolute_error, -1),
                ("median_absolute_error", m.median_absolute_error, -1),
                ("r2", m.r2_score, 1),
            )
        }
    found = [
        Metric("accuracy", m.accuracy_score, "classes"),
        Metric("balanced_accuracy", m.balanced_accuracy_score, "classes"),
        Metric("mcc", m.matthews_corrcoef, "classes"),
        Metric("log_loss", _log_loss, "chances", -1),
        Metric("roc_auc", _roc_auc, "chances"),
    ]
    if problem == "binary":
        for name, function in (("f1", m.f1_score), ("precision", m.precision_score), ("recall", m.recall_score)):
            found.append(Metric(name, _Averaged(function, "binary"), "classes"))
    for average in ("macro", "weighted"):
        found.append(Metric(f"f1_{average}", _Averaged(m.f1_score, average), "classes"))
    return {metric.name: metric for metric in found}


@dataclass(frozen=True)
class _Averaged:
    function: Callable[..., Any]
    average: str

    def __call__(self, truth: Rows, classes: Rows) -> float:
        return float(self.function(truth, classes, average=self.average, zero_division=0))


_ALSO = {
    "rmse": "root_mean_squared_error",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "acc": "accuracy",
    "nll": "log_loss",
    "roc_auc_ovo": "roc_auc",
}


def find_metric(name: str | Callable[[Any, Any], float] | None, problem: Problem) -> Metric:
    """The metric of that name, or of a function ``metric(y_true, y_pred)`` of which greater is better.

    Raises
    ------
    ConfigurationError
        If the problem has no such metric.
    """
    known = metrics_of(problem)
    if name is None:
        return next(iter(known.values()))
    if callable(name):
        return Metric(getattr(name, "__name__", "metric"), name, "numbers" if problem == "regression" else "classes")
    if (full := _ALSO.get(name, name)) not in known:
        raise ConfigurationError(
            f"eval_metric={name!r}: a {problem} problem has {', '.join(known)}; or give a function "
            "metric(y_true, y_pred) of which greater is better."
        )
    return known[full]
