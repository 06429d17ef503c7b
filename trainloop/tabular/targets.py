"""Read the label column: infer the problem type, encode classes, find metrics, and hold out rows for validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api import types

from trainloop.errors import ConfigurationError
from trainloop.tabular.columns import Columns, Rows, floats, read_table, scalars
from trainloop.tuning.folds import make_folds
from trainloop.tuning.scoring import Scorer, scorer

Problem = Literal["binary", "multiclass", "regression"]

_OF_CLASSES = {name: name for name in ("accuracy", "balanced_accuracy", "f1_macro", "f1_weighted")}
_OF_CLASSES |= {"mcc": "matthews_corrcoef", "roc_auc": "roc_auc_ovo", "log_loss": "neg_log_loss"}
_OF_NUMBERS = ("root_mean_squared_error", "mean_squared_error", "mean_absolute_error", "median_absolute_error")
METRICS: dict[str, dict[str, str]] = {
    "binary": {**_OF_CLASSES, "f1": "f1", "precision": "precision", "recall": "recall"},
    "multiclass": _OF_CLASSES,
    "regression": {**{name: f"neg_{name}" for name in _OF_NUMBERS}, "r2": "r2"},
}
"""AutoGluon's metric names and scikit-learn's scorers, by problem type. The first metric is the default."""
_ALSO = {"rmse": "root_mean_squared_error", "mse": "mean_squared_error", "mae": "mean_absolute_error"}
_ALSO |= {"acc": "accuracy", "nll": "log_loss", "roc_auc_ovo": "roc_auc"}
_MANY_ROWS = 1000  # with more rows, numbers are classes only if each number occurs often


@dataclass(frozen=True)
class Target:
    """The label column and its problem type."""

    label: str
    problem: Problem
    classes: tuple[Any, ...]
    """Sorted classes; empty for a regression."""
    dtype: Any = None
    """Type of the label column; None if pandas infers it from the classes."""

    @property
    def num_outputs(self) -> int:
        """Number of columns of a prediction: the number of classes, or 1 for a regression."""
        return len(self.classes) or 1

    @classmethod
    def learn(cls, label: str, values: pd.Series, problem: Problem | None) -> Target:
        """Infer the problem type, or check that the values fit the given type. No value may be missing."""
        with scalars(label, "train_data"):
            classes, wrong = _distinct(values), None
        if len(classes) < 2:
            wrong = f"has only one value, {classes[0]!r}: there is nothing to learn. Pass data with at least two values"
        problem = problem or _infer(values, len(classes))
        if problem == "regression":
            if not np.isfinite(floats(values)).all():
                wrong = "has values that are not finite numbers. Drop these rows, or use problem_type='multiclass'"
            classes = classes if wrong else []
        elif problem == "binary" and len(classes) > 2:
            wrong = f"has {len(classes)} classes, but problem_type='binary' needs 2. Use 'multiclass' or None"
        elif 1 < len(classes) == len(values):
            wrong = (
                f"is different in each of the {len(values)} rows ({classes[0]!r}, {classes[1]!r} ...), so no class can "
                "be learnt. Use classes that repeat, or numbers (seconds for dates and durations) for a regression"
            )
        if wrong:
            raise ConfigurationError(f"label {label!r} {wrong}.")
        dtype = None if values.dtype == object else values.dtype
        try:
            return cls(label, problem, tuple(sorted(classes)), dtype)
        except TypeError:  # values of several types
            return cls(label, problem, tuple(sorted(classes, key=str)), dtype)

    def encode(self, values: pd.Series) -> Rows:
        """Return each value's index in ``classes``; for a regression, return the values as floats.

        Raise ConfigurationError for an unknown class, or for a value that is not a finite number.
        """
        if self.problem == "regression":
            numbers = floats(values)
            if not (finite := np.isfinite(numbers)).all():
                raise ConfigurationError(
                    f"label {self.label!r} has the value {values[~finite].iloc[0]!r}, which is not a finite number. "
                    "Leave such rows out."
                )
            return numbers
        indices = {value: index for index, value in enumerate(self.classes)}
        with scalars(self.label, "data"):
            found = _distinct(values)
        if unknown := [value for value in found if value not in indices]:
            raise ConfigurationError(
                f"label {self.label!r} has the value {unknown[0]!r}, which was not a class in training "
                f"({self.classes!r:.200}). Leave such rows out."
            )
        return np.array([indices[value] for value in values], dtype=np.int64)

    def decode(self, predictions: Rows) -> Any:
        """Return an array with the most probable class of each row, or the predicted number."""
        if self.problem == "regression":
            return predictions
        return pd.Series(list(self.classes), dtype=self.dtype).array[predictions.argmax(axis=1)]


def _distinct(values: pd.Series) -> list[Any]:
    """Return the distinct values as Python objects."""
    # Not the column's own dtype: pandas 2 would convert integers that no float can represent.
    return pd.Index(values.unique(), dtype=object).tolist()


def _infer(values: pd.Series, num_classes: int) -> Problem:
    if num_classes == 2:
        return "binary"
    if types.infer_dtype(values) not in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "multiclass"
    often = 0.05 if len(values) > _MANY_ROWS else 0.1
    numbers = floats(values)
    whole = (np.trunc(numbers) == numbers).all()
    return "multiclass" if whole and num_classes <= often * len(values) else "regression"


def find_metric(metric: str | Callable[[Any, Any], float] | None, problem: Problem) -> Scorer:
    """Return the scorer for a metric's name, for None (the default), or for a function ``metric(y_true, y_pred)``."""
    if callable(metric):
        return scorer(metric)
    known = METRICS[problem]
    name = next(iter(known)) if metric is None else _ALSO.get(str(metric), str(metric))
    if name not in known:
        raise ConfigurationError(
            f"eval_metric={metric!r}: the metrics of a {problem} problem are {', '.join(known)}. Pass one, or "
            "a function metric(y_true, y_pred) for which greater is better."
        )
    return scorer(known[name], name)


def labelled_rows(data: object, label: str, what: str = "data") -> pd.DataFrame:
    """Return the rows that have a label. Raise ConfigurationError if no row has one."""
    frame = read_table(data, what)
    if label not in frame.columns:
        raise ConfigurationError(
            f"{what} has no column {label!r}, which is the label. It has: {', '.join(map(repr, frame.columns))}. Pass "
            "a table with this column, or another name to TabularPredictor(label=...)."
        )
    known = frame[label].notna()
    if not known.any():
        raise ConfigurationError(
            f"the label {label!r} is missing in all {len(frame)} rows of {what}. Pass labelled rows."
        )
    return frame[known]


def held_out_rows(y: Rows, target: Target) -> tuple[Rows, Rows]:
    """Return training and validation rows of a stratified split, with AutoGluon's fraction of validation rows."""
    rows = len(y)
    share = max(0.1, min(0.2, 500 / rows)) if rows < 5000 else max(0.01, min(0.1, 2500 / rows))
    fold = make_folds(rows, min(rows, round(1 / share)), seed=0, classes=y if target.classes else None)[0]
    if not target.classes:
        return fold.train, fold.validation
    # Every class must be in the training rows.
    alone = fold.validation[~np.isin(y[fold.validation], y[fold.train])]
    kept = alone if len(alone) < len(fold.validation) else alone[:0]
    return np.sort(np.append(fold.train, kept)), np.setdiff1d(fold.validation, kept)


@dataclass(frozen=True)
class Task:
    """An encoded table with labels, and the metric by which models are compared."""

    target: Target
    metric: Scorer
    columns: Columns
    table: pd.DataFrame
    """The cleaned table."""
    y: Rows
    held_out: tuple[Rows, Rows] | None
    """Numbers of the training and the validation rows; None with bagging."""

    @property
    def truth(self) -> Rows:
        """Targets of the rows that models predict without training on them: with bagging, all rows."""
        return self.y if self.held_out is None else self.y[self.held_out[1]]

    @classmethod
    def read(
        cls, train_data: object, tuning_data: object, label: str, problem: Problem | None, metric: Any, folds: int
    ) -> Task:
        """Read the data, infer the kinds of columns and the problem type, and choose the validation rows."""
        frame = labelled_rows(train_data, label, "train_data")
        target = Target.learn(label, frame[label], problem)
        columns = Columns.learn(frame.drop(columns=label))
        found = target, find_metric(metric, target.problem), columns
        table, y = columns.clean(frame, "train_data"), target.encode(frame[label])
        if tuning_data is None:
            return cls(*found, table, y, None if folds > 1 else held_out_rows(y, target))
        if folds > 1:
            raise ConfigurationError(
                "tuning_data can't be used with num_bag_folds, because a bag validates on its own folds. Pass only "
                "one of them."
            )
        more = labelled_rows(tuning_data, label, "tuning_data")
        both = pd.concat([table, columns.clean(more, "tuning_data")], ignore_index=True)
        held_out = np.arange(len(y)), np.arange(len(y), len(both))
        return cls(*found, both, np.append(y, target.encode(more[label])), held_out)
