"""Metrics over all rows at once, as functions of ``(y_pred, y_true, metadata)``; most are scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from trainloop._support.distribution import pip_install
from trainloop.errors import ConfigurationError

__all__ = [
    "accuracy",
    "as_array",
    "as_scores",
    "f1",
    "mae",
    "mse",
    "no_scikit_learn",
    "pr_auc",
    "precision",
    "r2",
    "recall",
    "rmse",
    "roc_auc",
    "scikit_learn",
]

Array = np.ndarray[Any, Any]


def accuracy(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Share of rows whose class is right; NaN without rows."""
    return _of_classes("accuracy_score", y_pred, y_true)


def precision(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Share of the rows predicted as a class that belong to it; mean over classes, 0 for a class never predicted."""
    return _of_classes("precision_score", y_pred, y_true, average="macro", zero_division=0)


def recall(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Share of a class's rows that are predicted as it; mean over classes, 0 for a class without rows."""
    return _of_classes("recall_score", y_pred, y_true, average="macro", zero_division=0)


def f1(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Harmonic mean of a class's precision and recall; mean over classes."""
    return _of_classes("f1_score", y_pred, y_true, average="macro", zero_division=0)


def roc_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Chance that a positive row's score is above a negative one's, ties counted half; NaN with one class only."""
    scores, positive = as_scores(y_pred), as_scores(y_true) == 1
    if positive.all() or not positive.any() or not _are_finite(scores):
        return float("nan")
    return float(scikit_learn().roc_auc_score(positive, scores))


def pr_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Area under precision over recall, by trapezoids; NaN where there is no positive row."""
    scores, positive = as_scores(y_pred), as_scores(y_true) == 1
    if not positive.any() or not _are_finite(scores):
        return float("nan")
    precisions, recalls, _ = scikit_learn().precision_recall_curve(positive, scores)
    return float(scikit_learn().auc(recalls, precisions))


def mse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Mean squared error."""
    return float(np.mean(_errors(y_pred, y_true) ** 2))


def rmse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Square root of the mean squared error."""
    return mse(y_pred, y_true) ** 0.5


def mae(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(_errors(y_pred, y_true))))


def r2(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Share of the targets' variance that is explained; NaN where they have none."""
    targets = as_array(y_true).astype(np.float64).ravel()
    errors = _errors(y_pred, y_true).ravel()
    if not np.ptp(targets) or not _are_finite(errors):
        return float("nan")
    return float(scikit_learn().r2_score(targets, targets + errors))


def scikit_learn() -> Any:
    """``sklearn.metrics``.

    Raises
    ------
    ConfigurationError
        If it is not installed.
    """
    try:
        from sklearn import metrics
    except ImportError as error:
        raise no_scikit_learn() from error
    return metrics


def no_scikit_learn() -> ConfigurationError:
    return ConfigurationError(
        "Metrics of classes and scores, and r2, are scikit-learn's, which is not installed: "
        f"{pip_install('metrics')}, or score by a function of (y_pred, y_true, metadata)."
    )


def _are_finite(numbers: Array) -> bool:
    """Return True if no score is NaN: a diverged model scores NaN, for which scikit-learn would raise an error."""
    return bool(np.isfinite(numbers).all())


def _of_classes(function: str, y_pred: Any, y_true: Any, **options: Any) -> float:
    predicted, targets = _classes(y_pred, y_true)
    if not len(targets):
        return float("nan")
    # By number, as scikit-learn refuses some that are none of its labels: 0.5, say, or classes of several types.
    _, joint = np.unique(np.concatenate([predicted, targets]), return_inverse=True)
    given, there = joint[: len(predicted)], joint[len(predicted) :]
    return float(getattr(scikit_learn(), function)(there, given, **options))


def as_array(rows: Any) -> Any:
    """Rows as a numpy array; rows of unequal length as they are."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        return (rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows).numpy()
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Tensor) for row in rows):
        rows = [as_array(row) for row in rows]
    try:
        return np.asarray(rows)
    except ValueError:
        return rows


def _as_classes(rows: Any) -> Array:
    array = as_array(rows)
    if array.ndim > 1 and array.shape[-1] > 1:
        return np.argmax(array, axis=-1).ravel()
    return array.ravel()


def _classes(y_pred: Any, y_true: Any) -> tuple[Array, Array]:
    predicted, targets = as_array(y_pred), as_array(y_true)
    if not (hasattr(predicted, "shape") and hasattr(targets, "shape")):
        raise ConfigurationError(
            "predictions or targets are rows of unequal length, which have no classes by row: return rows of one "
            "length from get_predictions, or score by a function of (y_pred, y_true, metadata)."
        )
    if predicted.shape == targets.shape and predicted.ndim > 1 and not _is_one_hot(targets):
        # Every score would count as a class of its own, and each of them as wrong.
        if predicted.dtype.kind == "f" and (predicted != np.floor(predicted)).any():
            raise ConfigurationError(
                f"predictions are scores of shape {predicted.shape}, and targets of that shape are no one-hot rows. "
                "Several labels a row: score by torchmetrics' MultilabelF1Score or a function of (y_pred, y_true, "
                "metadata). A class for each element: return classes from get_predictions."
            )
        return predicted.ravel(), targets.ravel()  # a class for each element, as of tokens or pixels
    predicted, targets = _as_classes(predicted), _as_classes(targets)
    _check_lengths(predicted, targets)
    return predicted, targets


def _is_one_hot(rows: Array) -> bool:
    return bool(rows.shape[-1] > 1 and np.isin(rows, (0, 1)).all() and (rows.sum(axis=-1) == 1).all())


def as_scores(rows: Any) -> Array:
    array = as_array(rows)
    if array.ndim == 2 and array.shape[1] == 2:
        return array[:, 1]
    return array.ravel()


def _errors(y_pred: Any, y_true: Any) -> Array:
    predicted, targets = as_array(y_pred).astype(np.float64), as_array(y_true).astype(np.float64)
    if predicted.size == targets.size:  # (n, 1) against (n,): else numpy would make (n, n) of them
        predicted = predicted.reshape(targets.shape)
    _check_lengths(predicted, targets)
    return predicted - targets


def _check_lengths(predicted: Array, targets: Array) -> None:
    if predicted.shape != targets.shape:
        raise ConfigurationError(
            f"predictions have shape {predicted.shape} and targets {targets.shape}: give one for each."
        )
