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
    """Return the fraction of rows whose class is correct; NaN if there are no rows."""
    return _of_classes("accuracy_score", y_pred, y_true)


def precision(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the precision, averaged over classes; 0 for a class that is never predicted."""
    return _of_classes("precision_score", y_pred, y_true, average="macro", zero_division=0)


def recall(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the recall, averaged over classes; 0 for a class without rows."""
    return _of_classes("recall_score", y_pred, y_true, average="macro", zero_division=0)


def f1(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the harmonic mean of precision and recall, averaged over classes."""
    return _of_classes("f1_score", y_pred, y_true, average="macro", zero_division=0)


def roc_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the probability that a positive row's score exceeds a negative row's; NaN if there is only one class."""
    scores, positive = as_scores(y_pred), as_scores(y_true) == 1
    if positive.all() or not positive.any() or not _are_finite(scores):
        return float("nan")
    return float(scikit_learn().roc_auc_score(positive, scores))


def pr_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the area under the precision-recall curve, by the trapezoidal rule; NaN if there is no positive row."""
    scores, positive = as_scores(y_pred), as_scores(y_true) == 1
    if not positive.any() or not _are_finite(scores):
        return float("nan")
    precisions, recalls, _ = scikit_learn().precision_recall_curve(positive, scores)
    return float(scikit_learn().auc(recalls, precisions))


def mse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Mean squared error."""
    return float(np.mean(_errors(y_pred, y_true) ** 2))


def rmse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the square root of the mean squared error."""
    return mse(y_pred, y_true) ** 0.5


def mae(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Mean absolute error."""
    return float(np.mean(np.abs(_errors(y_pred, y_true))))


def r2(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the fraction of the targets' variance that is explained; NaN if they have no variance."""
    targets = as_array(y_true).astype(np.float64).ravel()
    errors = _errors(y_pred, y_true).ravel()
    if not np.ptp(targets) or not _are_finite(errors):
        return float("nan")
    return float(scikit_learn().r2_score(targets, targets + errors))


def scikit_learn() -> Any:
    """Return ``sklearn.metrics``.

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
        "Metrics of classes and scores, and r2, need scikit-learn, which is not installed: "
        f"{pip_install('metrics')}, or score with a function of (y_pred, y_true, metadata)."
    )


def _are_finite(numbers: Array) -> bool:
    """Return True if no score is NaN: a diverged model scores NaN, for which scikit-learn would raise an error."""
    return bool(np.isfinite(numbers).all())


def _of_classes(function: str, y_pred: Any, y_true: Any, **options: Any) -> float:
    predicted, targets = _classes(y_pred, y_true)
    if not len(targets):
        return float("nan")
    # By number, since scikit-learn refuses values that are not labels, such as 0.5, or classes of several types.
    _, joint = np.unique(np.concatenate([predicted, targets]), return_inverse=True)
    given, there = joint[: len(predicted)], joint[len(predicted) :]
    return float(getattr(scikit_learn(), function)(there, given, **options))


def as_array(rows: Any) -> Any:
    """Return rows as a numpy array; rows of unequal length unchanged."""
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
            "predictions or targets are rows of unequal length, so a row has no single class. Return rows of one "
            "length from get_predictions, or score with a function of (y_pred, y_true, metadata)."
        )
    if predicted.shape == targets.shape and predicted.ndim > 1 and not _is_one_hot(targets):
        # Every score would count as a class, and each of them as wrong.
        if predicted.dtype.kind == "f" and (predicted != np.floor(predicted)).any():
            raise ConfigurationError(
                f"predictions are scores of shape {predicted.shape}, but targets of that shape are not one-hot rows. "
                "For several labels per row, use torchmetrics' MultilabelF1Score or a function of (y_pred, y_true, "
                "metadata). For a class per element, return classes from get_predictions."
            )
        return predicted.ravel(), targets.ravel()  # a class per element, such as a token or pixel
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
    if predicted.size == targets.size:  # (n, 1) and (n,): numpy would broadcast them to (n, n)
        predicted = predicted.reshape(targets.shape)
    _check_lengths(predicted, targets)
    return predicted - targets


def _check_lengths(predicted: Array, targets: Array) -> None:
    if predicted.shape != targets.shape:
        raise ConfigurationError(
            f"predictions have shape {predicted.shape} and targets {targets.shape}: pass one prediction for each "
            "target."
        )
