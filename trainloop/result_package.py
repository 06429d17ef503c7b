"""Compute metrics over a whole dataset's predictions, by functions of ``(y_pred, y_true, metadata)``.

:func:`evaluate_result_package` scores the result of ``predict_on_test_set()`` with functions of this module (or their
names), your own functions, torchmetrics metrics or collections, or a list or dict of these, and returns numbers.

The functions here use scikit-learn's metrics (extra ``metrics``), computed over all rows at once.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainloop._support.distribution import import_extra
from trainloop._support.keywords import name_of
from trainloop.errors import ConfigurationError

__all__ = [
    "accuracy",
    "binary_classification",
    "classification",
    "evaluate_result_package",
    "f1",
    "mae",
    "mse",
    "pr_auc",
    "precision",
    "r2",
    "recall",
    "regression",
    "rmse",
    "roc_auc",
    "scikit_learn",
]

Array = np.ndarray[Any, Any]

_ROUNDING = 0.01  # by which the sum of a row of probabilities may differ from 1, as in bfloat16


def evaluate_result_package(
    package: Any, y_pred: Any, y_true: Any, metadata: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Score predictions, and return the metrics by name.

    Parameters
    ----------
    package : str, callable, torchmetrics metric, or list or dict of these
        A string is the name of a function of this module. A function is called as ``package(y_pred, y_true, metadata)``
        and returns a number or a dict of numbers. The metric's name is the function's name, or its key in a dict.
    y_pred, y_true : Tensor, array or list
        Rows of predictions and targets, as returned by ``predict_on_*``.
    metadata : mapping, optional
        Metadata, as returned by ``predict_on_*``.

    Returns
    -------
    dict from str to float

    Raises
    ------
    ConfigurationError
        If ``package`` has another type, the value of a metric is not a single number, or two metrics of one name have
        different values.

    Examples
    --------
    >>> evaluate_result_package(["accuracy", "mae"], [0, 1, 1], [0, 1, 0])
    {'accuracy': 0.6666666666666666, 'mae': 0.3333333333333333}
    """
    metadata = {} if metadata is None else metadata
    if isinstance(package, str):
        package = _metric_by_name(package, "evaluate_result_package")
    if isinstance(package, Mapping):
        found: dict[str, float] = {}
        for name, one in package.items():
            values = evaluate_result_package(one, y_pred, y_true, metadata)
            add_metrics(found, {name: next(iter(values.values()))} if len(values) == 1 else _prefixed(name, values))
        return found
    if isinstance(package, Sequence):
        found = {}
        for one in package:
            add_metrics(found, evaluate_result_package(one, y_pred, y_true, metadata))
        return found
    if all(callable(getattr(package, name, None)) for name in ("update", "compute", "reset")):
        return _evaluate_torchmetrics(package, y_pred, y_true)
    if callable(package) and not isinstance(package, type):
        return _metric_values(package(y_pred, y_true, metadata), name_of(package))
    hint = " It is a class: pass an instance." if isinstance(package, type) else ""
    raise ConfigurationError(
        f"{package!r} can't score predictions.{hint} Pass a function of (y_pred, y_true, metadata), the name of a "
        "function of trainloop.result_package, a torchmetrics metric, or a list or dict of these."
    )


def add_metrics(found: dict[str, float], more: Mapping[str, float]) -> None:
    """Add metrics to ``found``.

    Raises
    ------
    ConfigurationError
        If two metrics have one name, but different values.
    """
    for name, value in more.items():
        before = found.setdefault(name, value)
        if before != value and (before == before or value == value):  # NaN equals NaN here
            raise ConfigurationError(
                f"two metrics have the name {name!r}, with the values {before:.6g} and {value:.6g}. Pass them in a "
                "dict, under different names: {'first': metric, 'second': other_metric}."
            )


def check_metric_functions(package: Any, owner: str) -> None:
    """Raise an error if a function in a package is unknown or can't be called with ``(y_pred, y_true, metadata)``.

    Raises
    ------
    ConfigurationError
        The message names the function; also if scikit-learn is missing, which functions of this module need.
    """
    if isinstance(package, str):
        package = _metric_by_name(package, owner)
    if package in _BY_SCIKIT_LEARN and find_spec("sklearn") is None:
        scikit_learn()  # raises; importing it would take a second
    if isinstance(package, Mapping):
        package = list(package.values())
    if isinstance(package, Sequence):
        for one in package:
            check_metric_functions(one, owner)
    elif isinstance(package, types.FunctionType):
        signature = inspect.signature(package, follow_wrapped=False)
        try:
            signature.bind("y_pred", "y_true", "metadata")
        except TypeError as error:
            name = package.__name__
            raise ConfigurationError(
                f"{owner}: {name} takes {signature}, but is called with (y_pred, y_true, metadata): {error}. Define it "
                f"as {name}(y_pred, y_true, metadata)."
            ) from None


def _metric_by_name(name: str, owner: str) -> Callable[..., Any]:
    try:
        return _NAMED[name]
    except KeyError:
        raise ConfigurationError(
            f"{owner}: no metric has the name {name!r}. Names are {', '.join(_NAMED)}; or pass a function of (y_pred, "
            "y_true, metadata)."
        ) from None


def _evaluate_torchmetrics(metric: Any, y_pred: Any, y_true: Any) -> dict[str, float]:
    """Compute a torchmetrics metric or collection over all rows. Each rank has all rows, so no values are exchanged."""
    parts = list(metric.values()) if hasattr(metric, "values") else [metric]
    before = [getattr(part, "sync_on_compute", True) for part in parts]
    try:
        for part in parts:
            part.sync_on_compute = False
        metric.reset()
        metric.update(_as_tensor_for(y_pred, metric), _as_tensor_for(y_true, metric))
        values = metric.compute()
    finally:
        for part, sync in zip(parts, before, strict=True):
            part.sync_on_compute = sync
        metric.reset()
    return _metric_values(values, type(metric).__name__)


def _as_tensor_for(rows: Any, metric: Any) -> Any:
    """Convert lists and arrays of numbers to a tensor on the metric's device; return other values unchanged."""
    if not isinstance(rows, Tensor):
        try:
            rows = torch.as_tensor(np.asarray(rows), device="cpu")
        except (TypeError, ValueError):
            return rows
    return rows.to(getattr(metric, "device", rows.device))


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _metric_values(values: Any, name: str) -> dict[str, float]:
    """Return the values as floats by name. A single value has the name ``name``."""
    if not isinstance(values, Mapping):
        values = {name: values}
    return {str(key): _metric_value(value, str(key)) for key, value in values.items()}


def _metric_value(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"metric {name!r} returned a {type(value).__name__}{shape}, but must return one number, or a dict of "
            "numbers. Average the values, or give each of them a name."
        ) from error


# -- metrics of all rows -----------------------------------------------------------------------------------------------


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
    """Return the probability that a positive row scores higher than a negative row; NaN if there is only one class.

    Scores and targets are those of :func:`binary_classification`; two columns may be logits, too.
    """
    scores, positive = _scores_of_two_classes(y_pred, y_true)
    if positive.all() or not positive.any() or not _are_finite(scores):
        return float("nan")
    return float(scikit_learn().roc_auc_score(positive, scores))


def pr_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the area under the precision-recall curve, by the trapezoidal rule; NaN if there is no positive row.

    Scores and targets are those of :func:`roc_auc`.
    """
    scores, positive = _scores_of_two_classes(y_pred, y_true)
    if not positive.any() or not _are_finite(scores):
        return float("nan")
    precisions, recalls, _ = scikit_learn().precision_recall_curve(positive, scores)
    return float(scikit_learn().auc(recalls, precisions))


def mse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the mean squared error."""
    return float(np.mean(_errors(y_pred, y_true) ** 2))


def rmse(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the square root of the mean squared error."""
    return mse(y_pred, y_true) ** 0.5


def mae(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the mean absolute error."""
    return float(np.mean(np.abs(_errors(y_pred, y_true))))


def r2(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Return the fraction of the targets' variance that is explained; NaN if the variance is 0."""
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
        If scikit-learn is not installed.
    """
    return import_extra("sklearn.metrics", "A metric of classes, or r2,", "metrics")


def _are_finite(numbers: Array) -> bool:
    """Return True if no score is NaN. A diverged model scores NaN, for which scikit-learn would raise an error."""
    return bool(np.isfinite(numbers).all())


def _of_classes(function: str, y_pred: Any, y_true: Any, **options: Any) -> float:
    predicted, targets = classes_of(y_pred, y_true)
    if not len(targets):
        return float("nan")
    # Classes are numbered, because scikit-learn rejects values such as 0.5 and classes of several types.
    _, joint = np.unique(np.concatenate([predicted, targets]), return_inverse=True)
    predicted_codes, target_codes = joint[: len(predicted)], joint[len(predicted) :]
    return float(getattr(scikit_learn(), function)(target_codes, predicted_codes, **options))


def as_array(rows: Any) -> Any:
    """Return rows as a numpy array; return rows of unequal length unchanged."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        return (rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows).numpy()
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Tensor) for row in rows):
        rows = [as_array(row) for row in rows]
    try:
        return np.asarray(rows)
    except ValueError:
        return rows


def _has_columns(rows: Array) -> bool:
    return rows.ndim > 1 and rows.shape[-1] > 1


def _as_classes(rows: Array) -> Array:
    return np.argmax(rows, axis=-1) if _has_columns(rows) else rows


def classes_of(y_pred: Any, y_true: Any) -> tuple[Array, Array]:
    """Return predicted and true classes: one per row, or one per element if a row has several classes."""
    predicted, targets = as_array(y_pred), as_array(y_true)
    if not (hasattr(predicted, "shape") and hasattr(targets, "shape")):
        raise ConfigurationError(
            "predictions or targets are rows of unequal length, so a row has no single class. Return rows of equal "
            "length from get_predictions, or score with a function of (y_pred, y_true, metadata)."
        )
    _refuse_other_labels(predicted, targets)
    if predicted.shape == targets.shape and predicted.size > len(predicted) and not _is_one_hot(targets):
        _refuse_scores(
            predicted,
            f"are scores of shape {predicted.shape}, but targets, of the same shape, are not one-hot rows. For several "
            "labels per row, use torchmetrics' MultilabelF1Score or a function of (y_pred, y_true, metadata). If each "
            "element of a row (such as a token or pixel) has one class, return classes instead of scores from "
            "get_predictions.",
        )
        return predicted.ravel(), targets.ravel()  # a class per element, such as a token or pixel
    if _has_columns(targets) and not _has_columns(predicted) and not _is_one_hot(targets):
        raise ConfigurationError(
            f"targets have shape {targets.shape}, but are not one-hot rows, and predictions have shape "
            f"{predicted.shape}. Return one class for each row, or one-hot rows, as targets from get_predictions."
        )
    predicted, targets = _as_classes(predicted), _as_classes(targets)
    _check_shapes(predicted, targets)
    predicted, targets = predicted.ravel(), targets.ravel()
    if not _has_fractions(targets):  # classes may be numbers such as 0.5
        _refuse_scores(
            predicted,
            "are numbers, of which each would count as a class, but targets are whole numbers. For scores of two "
            "classes, use binary_classification or roc_auc; otherwise return classes, or a score for each class, from "
            "get_predictions.",
        )
    return predicted, targets


def _refuse_other_labels(predicted: Array, targets: Array) -> None:
    """Raise an error about targets that no prediction could be equal to: each would count as a wrong prediction."""
    numbers, other = targets.dtype.kind in "biuf", np.empty(0)
    if numbers and (targets == -100).any():
        raise ConfigurationError(
            "targets contain -100, which nn.CrossEntropyLoss ignores, but which would count as a class. Leave these "
            "elements out in get_predictions: return y_pred[keep] and y_true[keep], where keep = y_true != -100."
        )
    if _has_columns(predicted) and not _has_columns(targets):
        number = predicted.shape[-1]
        other = targets[~np.isin(targets, np.arange(number))]
        known = f"predictions have a score for each of the classes 0 to {number - 1}"
    elif predicted.dtype.kind == "b" or targets.dtype.kind == "b":
        both = np.concatenate([predicted.ravel(), targets.ravel()])
        other = both[~np.isin(both, (0, 1))]
        known = f"{'predictions' if predicted.dtype.kind == 'b' else 'targets'} are True or False"
    if other.size:
        raise ConfigurationError(
            f"{known}, which are never equal to {other.tolist()[0]!r}. Return the same numbers for predictions and "
            "targets from get_predictions."
        )


def _has_fractions(rows: Array) -> bool:
    return rows.dtype.kind == "f" and bool((np.isfinite(rows) & (rows != np.floor(rows))).any())


def _refuse_scores(predicted: Array, why: str) -> None:
    """Raise an error about scores where classes are expected: every score would count as a class that is wrong."""
    if _has_fractions(predicted):
        raise ConfigurationError(f"predictions {why}")


def _is_one_hot(rows: Array) -> bool:
    return bool(rows.shape[-1] > 1 and np.isin(rows, (0, 1)).all() and (rows.sum(axis=-1) == 1).all())


def _scores_of_two_classes(y_pred: Any, y_true: Any, *, probabilities: bool = False) -> tuple[Array, Array]:
    """Return each row's score of the positive class, and which rows are positive.

    Parameters
    ----------
    y_pred, y_true : Tensor, array or list
        As in :func:`binary_classification`.
    probabilities : bool
        Raise an error about two columns of other scores, for which a threshold has no meaning.
    """
    scores, targets = as_array(y_pred), as_array(y_true)
    if targets.ndim == 2 and targets.shape[1] == 2:  # one-hot
        targets = targets[:, 1]
    targets = targets.ravel()
    classes = np.unique(targets).tolist()
    if not {*classes} <= {0, 1} and not {*classes} <= {-1, 1}:
        raise ConfigurationError(
            f"targets must be 0 or 1 (or -1 and 1), where 1 is the positive class, but are {classes[:5]}. Return such "
            "targets from get_predictions; for more than two classes, use 'classification'."
        )
    if scores.ndim == 2 and scores.shape[1] == 2:
        if not ((scores < 0).any(axis=1) | (np.abs(scores.sum(axis=1) - 1) > _ROUNDING)).any():
            scores = scores[:, 1]
        elif probabilities:
            raise ConfigurationError(
                "predictions have two columns that are not probabilities, so a threshold has no meaning. Return "
                "torch.softmax(logits, 1), or the classes, from get_predictions."
            )
        else:  # in logits, a row may have a high score of both classes
            scores = scores[:, 1] - scores[:, 0]
    elif scores.size != len(scores):
        raise ConfigurationError(
            f"predictions have shape {scores.shape}, but scores of two classes have shape (n,), (n, 1) or (n, 2). For "
            "more than two classes, use 'classification'."
        )
    scores = scores.ravel()
    _check_shapes(scores, targets)
    return scores, targets == 1


def _errors(y_pred: Any, y_true: Any) -> Array:
    predicted, targets = as_array(y_pred).astype(np.float64), as_array(y_true).astype(np.float64)
    _check_shapes(predicted, targets)
    return predicted.reshape(targets.shape) - targets  # (n, 1) and (n,): numpy would broadcast them to (n, n)


def _check_shapes(predicted: Array, targets: Array) -> None:
    """Raise an error unless the elements are in the same order: in rows that are alike, or flattened."""
    rows = [[size for size in array.shape[1:] if size != 1] for array in (predicted, targets)]
    other = rows[0] != rows[1] and min(map(len, rows)) > 1  # such as channels first and channels last
    if predicted.shape[:1] != targets.shape[:1] or predicted.size != targets.size or other:
        raise ConfigurationError(
            f"predictions have shape {predicted.shape}, but targets have shape {targets.shape}. Pass one prediction "
            "for each target."
        )


# -- several metrics at once -------------------------------------------------------------------------------------------


def classification(y_pred: Any, y_true: Any, metadata: Any = None) -> dict[str, float]:
    """Return the metrics of predicted classes: ``accuracy``, and ``precision``, ``recall`` and ``f1`` over classes.

    Predictions are classes, or rows of scores whose maximum is the class. Targets are classes or one-hot rows. Both may
    have a class for each element of a row, such as a token or pixel; all elements are then counted together. Several
    labels per row (multi-label) are not supported; use, for example, torchmetrics' ``MultilabelF1Score``.
    """
    rows = as_array(y_pred), as_array(y_true)
    return {"accuracy": accuracy(*rows), "precision": precision(*rows), "recall": recall(*rows), "f1": f1(*rows)}


def binary_classification(
    y_pred: Any, y_true: Any, metadata: Any = None, *, threshold: float | None = None
) -> dict[str, float]:
    """Return the metrics of scores of two classes: ``accuracy precision recall f1 roc_auc pr_auc``.

    Parameters
    ----------
    y_pred, y_true : Tensor, array or list
        Scores with shape (n,) or (n, 1), or probabilities of both classes, with shape (n, 2). Targets are 0 or 1, or
        -1 and 1, or one-hot rows.
    metadata : object
        Not used.
    threshold : float, optional
        Minimum score of the positive class: 0.5 by default, which needs probabilities or classes; 0.0 for logits. To
        pass another one to a callback, use ``functools.partial(binary_classification, threshold=0.0)``.
    """
    scores, positive = _scores_of_two_classes(y_pred, y_true, probabilities=True)
    if threshold is None:
        threshold = 0.5
        if ((scores < -_ROUNDING) | (scores > 1 + _ROUNDING)).any() and not np.isin(scores, (-1, 1)).all():
            raise ConfigurationError(
                f"predictions are scores from {np.nanmin(scores):.4g} to {np.nanmax(scores):.4g}, but the threshold "
                "0.5 is for probabilities. For logits, pass functools.partial(binary_classification, threshold=0.0), "
                "or return torch.sigmoid(logits) from get_predictions."
            )
    targets, chosen = positive.astype(int), (scores >= threshold).astype(int)
    metrics, rows = scikit_learn(), (targets, chosen)
    return {
        "accuracy": accuracy(chosen, targets),
        "precision": float(metrics.precision_score(*rows, zero_division=0)),
        "recall": float(metrics.recall_score(*rows, zero_division=0)),
        "f1": float(metrics.f1_score(*rows, zero_division=0)),
        "roc_auc": roc_auc(scores, targets),
        "pr_auc": pr_auc(scores, targets),
    }


def regression(y_pred: Any, y_true: Any, metadata: Any = None) -> dict[str, float]:
    """Return the metrics of predicted numbers, over all elements: ``mse``, ``rmse``, ``mae`` and ``r2``."""
    rows = as_array(y_pred), as_array(y_true)
    return {"mse": mse(*rows), "rmse": rmse(*rows), "mae": mae(*rows), "r2": r2(*rows)}


_NAMED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(accuracy, precision, recall, f1, roc_auc, pr_auc, mse, rmse, mae, r2),
        *(classification, binary_classification, regression),
    )
}

_BY_SCIKIT_LEARN = [function for function in _NAMED.values() if function not in (mse, rmse, mae)]

_REMOVED = {
    "AbstractResultPackage": "a function of (y_pred, y_true, metadata) that returns a dict",
    "BinaryClassificationResultPackage": "the function binary_classification",
    "ClassificationResultPackage": "the function classification",
    "GeneralResultPackage": "a list or a dict of metrics",
    "PreCalculatedResultPackage": "a function that returns the dict",
    "RegressionResultPackage": "the function regression",
    "TorchMetricsPackage": "the torchmetrics object itself",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _REMOVED:
            raise ImportError(f"trainloop.result_package has no {name}: use {_REMOVED[name]} instead.")
        raise AttributeError(f"module 'trainloop.result_package' has no attribute {name!r}")
