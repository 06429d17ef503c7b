"""Metrics over a whole dataset's predictions: functions of ``(y_pred, y_true, metadata)``, and packages of them.

What ``predict_on_test_set()`` returns goes into :func:`evaluate_result_package` with anything that scores it: a package
of this module, a plain function, a torchmetrics metric or collection, or a list or dict of these. Numbers come out.

The metrics of the packages here are scikit-learn's (extra ``metrics``), computed at once over all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from trainloop.errors import ConfigurationError

__all__ = [
    "AbstractResultPackage",
    "BinaryClassificationResultPackage",
    "ClassificationResultPackage",
    "GeneralResultPackage",
    "PreCalculatedResultPackage",
    "RegressionResultPackage",
    "TorchMetricsPackage",
    "accuracy",
    "evaluate_result_package",
    "f1",
    "mae",
    "mse",
    "pr_auc",
    "precision",
    "r2",
    "recall",
    "rmse",
    "roc_auc",
    "scikit_learn",
]

Array = np.ndarray[Any, Any]


def evaluate_result_package(
    package: Any, y_pred: Any, y_true: Any, metadata: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Score predictions.

    Parameters
    ----------
    package : AbstractResultPackage, callable, torchmetrics metric, or list or dict of these
        A function is called as ``package(y_pred, y_true, metadata)`` and gives a number or a dict of them; its name is
        the metric's. In a dict, the key is.
    y_pred, y_true : Tensor, array or list
        Rows of predictions and targets, as ``predict_on_*`` gives them; handed on as they are but to packages, which
        get numpy arrays.
    metadata : mapping, optional
        As ``predict_on_*`` gives it.

    Returns
    -------
    dict from str to float

    Raises
    ------
    ConfigurationError
        If ``package`` is none of these, or a metric's value is no single number.

    Examples
    --------
    >>> evaluate_result_package(ClassificationResultPackage(), [0, 1, 1], [0, 1, 0])["accuracy"]
    0.6666666666666666
    """
    metadata = {} if metadata is None else metadata
    if isinstance(package, AbstractResultPackage):
        package.prepare_result_package(y_true, y_pred, package.hyperparameters, additional_results=dict(metadata))
        return _numbers(package.get_results(), package.pkg_name)
    if isinstance(package, Mapping):
        found: dict[str, float] = {}
        for name, one in package.items():
            values = evaluate_result_package(one, y_pred, y_true, metadata)
            found.update({name: next(iter(values.values()))} if len(values) == 1 else _prefixed(name, values))
        return found
    if isinstance(package, Sequence) and not isinstance(package, str):
        found = {}
        for one in package:
            found.update(evaluate_result_package(one, y_pred, y_true, metadata))
        return found
    if all(callable(getattr(package, name, None)) for name in ("update", "compute", "reset")):
        return _evaluate_torchmetrics(package, y_pred, y_true)
    if callable(package) and not isinstance(package, type):
        name = getattr(package, "__name__", type(package).__name__)
        return _numbers(package(y_pred, y_true, metadata), name)
    hint = " It is a class: call it." if isinstance(package, type) else ""
    raise ConfigurationError(
        f"{package!r} can't score predictions.{hint} Pass a result package such as ClassificationResultPackage(), a "
        "function of (y_pred, y_true, metadata), a torchmetrics metric, or a list or dict of these."
    )


def _evaluate_torchmetrics(metric: Any, y_pred: Any, y_true: Any) -> dict[str, float]:
    """A torchmetrics metric or collection over all rows. Each rank has all of them, so nothing is summed over ranks."""
    parts = list(metric.values()) if hasattr(metric, "values") else [metric]
    before = [getattr(part, "sync_on_compute", True) for part in parts]
    try:
        for part in parts:
            part.sync_on_compute = False
        metric.reset()
        metric.update(_tensor(y_pred, metric), _tensor(y_true, metric))
        values = metric.compute()
    finally:
        for part, sync in zip(parts, before, strict=True):
            part.sync_on_compute = sync
        metric.reset()
    return _numbers(values, type(metric).__name__)


def _tensor(rows: Any, metric: Any) -> Any:
    """Convert lists and arrays of numbers to a tensor on the metric's device; leave others, such as texts."""
    import torch

    if not isinstance(rows, Tensor):
        try:
            rows = torch.as_tensor(np.asarray(rows))
        except (TypeError, ValueError):
            return rows
    return rows.to(getattr(metric, "device", rows.device))


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _numbers(values: Any, name: str) -> dict[str, float]:
    """Floats by name; a single value gets ``name``."""
    if isinstance(values, AbstractResultPackage):
        values = values.get_results()
    if not isinstance(values, Mapping):
        values = {name: values}
    return {str(key): _number(value, str(key)) for key, value in values.items()}


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigurationError(
            f"metric {name!r} gave a {type(value).__name__}{shape}, but must give one number, or a dict of numbers. "
            "Average it, or give each part a name."
        ) from error


# -- packages ----------------------------------------------------------------------------------------------------------


class AbstractResultPackage(ABC):
    """Base of packages of metrics: override :meth:`prepare_results_dict`.

    Parameters
    ----------
    pkg_name : str, optional
        Name in reports. Default: the class name.
    strict_content_check : bool
        Accepted for AIToolbox's code; what it warned about are errors here, or nothing.
    np_array : bool or 'auto'
        Whether predictions and targets become numpy arrays. Rows of unequal length stay a list in any case.
    **kwargs
        Kept as ``package_metadata``.

    Attributes
    ----------
    y_true, y_predicted : array
        The rows to score, there when :meth:`prepare_results_dict` is called.
    additional_results : dict
        ``{'additional_results': metadata}``, metadata as ``predict_on_*`` gives it.
    hyperparameters : dict or None
    requires_loss : bool
        Set to True to get the dataset's mean loss as ``metadata['loss']``.
    results_dict : dict or None
        The last results.

    Examples
    --------
    >>> class Median(AbstractResultPackage):
    ...     def prepare_results_dict(self):
    ...         return {"median_error": np.median(np.abs(self.y_predicted - self.y_true))}
    >>> evaluate_result_package(Median(), [1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    {'median_error': 1.0}
    """

    def __init__(
        self,
        pkg_name: str | None = None,
        strict_content_check: bool = False,
        np_array: bool | str = True,
        **kwargs: Any,
    ) -> None:
        self.pkg_name = pkg_name or type(self).__name__
        self.strict_content_check = strict_content_check
        self.np_array = np_array
        self.package_metadata = kwargs
        self.requires_loss = False
        self.y_true: Any = None
        self.y_predicted: Any = None
        self.additional_results: dict[str, Any] | None = None
        self.hyperparameters: dict[str, Any] | None = None
        self.results_dict: dict[str, Any] | None = None

    @abstractmethod
    def prepare_results_dict(self) -> Mapping[str, Any]:
        """Compute the metrics of ``self.y_predicted`` against ``self.y_true``: numbers by name."""

    def prepare_result_package(
        self, y_true: Any, y_predicted: Any, hyperparameters: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Take rows and compute; :func:`evaluate_result_package` calls it."""
        self.y_true = _array(y_true) if self.np_array else y_true
        self.y_predicted = _array(y_predicted) if self.np_array else y_predicted
        self.hyperparameters = hyperparameters
        self.additional_results = kwargs
        self.results_dict = dict(self.prepare_results_dict())

    def get_results(self) -> dict[str, Any]:
        """The last results.

        Raises
        ------
        ConfigurationError
            If there are none yet.
        """
        if self.results_dict is None:
            raise ConfigurationError(f"{self.pkg_name} has no results yet. Call prepare_result_package first.")
        return self.results_dict

    def __getstate__(self) -> dict[str, Any]:
        # The package travels between ranks without the dataset's predictions.
        return {**self.__dict__, "y_true": None, "y_predicted": None, "additional_results": None}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.get_results().items())


class GeneralResultPackage(AbstractResultPackage):
    """Any metrics together.

    Parameters
    ----------
    metrics_list : list or dict
        What :func:`evaluate_result_package` takes: functions of ``(y_pred, y_true, metadata)`` above all.
    **kwargs
        As for :class:`AbstractResultPackage`.
    """

    def __init__(self, metrics_list: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metrics_list = metrics_list

    def prepare_results_dict(self) -> Mapping[str, Any]:
        metadata = (self.additional_results or {}).get("additional_results")
        return evaluate_result_package(self.metrics_list, self.y_predicted, self.y_true, metadata)


class TorchMetricsPackage(GeneralResultPackage):
    """A torchmetrics metric or ``MetricCollection`` as a package (extra ``metrics``)."""

    def __init__(self, torch_metrics: Any, **kwargs: Any) -> None:
        super().__init__(torch_metrics, **{"np_array": False, **kwargs})


class _ScikitLearnPackage(AbstractResultPackage):
    """Fails at construction, not after the first epoch, where scikit-learn is missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if find_spec("sklearn") is None:  # finding it is quick, importing it takes a second
            raise _no_scikit_learn()


class ClassificationResultPackage(_ScikitLearnPackage):
    """Classes: ``accuracy``, and ``precision``, ``recall`` and ``f1`` averaged over classes.

    Predictions are classes, or rows of scores of which the highest is the class; targets are classes or one-hot rows.
    """

    def prepare_results_dict(self) -> Mapping[str, Any]:
        rows = self.y_predicted, self.y_true
        return {"accuracy": accuracy(*rows), "precision": precision(*rows), "recall": recall(*rows), "f1": f1(*rows)}


class BinaryClassificationResultPackage(_ScikitLearnPackage):
    """Two classes by score: ``accuracy``, ``precision``, ``recall``, ``f1``, ``roc_auc`` and ``pr_auc``.

    Parameters
    ----------
    positive_class_thresh : float
        Scores from here on are the positive class: 0.5 for probabilities, 0.0 for logits.
    **kwargs
        As for :class:`AbstractResultPackage`.

    Notes
    -----
    Predictions are a score a row, of shape (n,) or (n, 1), or the scores of both classes, (n, 2), whose second is used.
    """

    def __init__(self, positive_class_thresh: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.positive_class_thresh = positive_class_thresh

    def prepare_results_dict(self) -> Mapping[str, Any]:
        scores, targets = _scores(self.y_predicted), _scores(self.y_true)
        chosen = (scores >= self.positive_class_thresh).astype(int)
        metrics, rows = scikit_learn(), ((targets == 1).astype(int), chosen)
        return {
            "accuracy": accuracy(chosen, targets),
            "precision": float(metrics.precision_score(*rows, zero_division=0)),
            "recall": float(metrics.recall_score(*rows, zero_division=0)),
            "f1": float(metrics.f1_score(*rows, zero_division=0)),
            "roc_auc": roc_auc(scores, targets),
            "pr_auc": pr_auc(scores, targets),
        }


class RegressionResultPackage(_ScikitLearnPackage):
    """Numbers: ``mse``, ``rmse``, ``mae`` and ``r2``, over all elements."""

    def prepare_results_dict(self) -> Mapping[str, Any]:
        rows = self.y_predicted, self.y_true
        return {"mse": mse(*rows), "rmse": rmse(*rows), "mae": mae(*rows), "r2": r2(*rows)}


class PreCalculatedResultPackage(AbstractResultPackage):
    """Results that were computed elsewhere."""

    def __init__(self, results_dict: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.results_dict = dict(results_dict)
        self._given = dict(results_dict)

    def prepare_results_dict(self) -> Mapping[str, Any]:
        return self._given


# -- metrics -----------------------------------------------------------------------------------------------------------


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
    scores, positive = _scores(y_pred), _scores(y_true) == 1
    if positive.all() or not positive.any() or not _are_finite(scores):
        return float("nan")
    return float(scikit_learn().roc_auc_score(positive, scores))


def pr_auc(y_pred: Any, y_true: Any, metadata: Any = None) -> float:
    """Area under precision over recall, by trapezoids; NaN where there is no positive row."""
    scores, positive = _scores(y_pred), _scores(y_true) == 1
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
    targets = _array(y_true).astype(np.float64).ravel()
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
        raise _no_scikit_learn() from error
    return metrics


def _no_scikit_learn() -> ConfigurationError:
    return ConfigurationError(
        "Metrics of classes and scores, and r2, are scikit-learn's, which is not installed: pip install "
        "'trainloop[metrics]', or score by a function of (y_pred, y_true, metadata)."
    )


def _are_finite(numbers: Array) -> bool:
    """Whether no score is NaN: a diverged model scores NaN, and must not end in scikit-learn's error."""
    return bool(np.isfinite(numbers).all())


def _of_classes(function: str, y_pred: Any, y_true: Any, **options: Any) -> float:
    predicted, targets = _classes(y_pred, y_true)
    if not len(targets):
        return float("nan")
    # By number, as scikit-learn refuses some that are none of its labels: 0.5, say, or classes of several types.
    _, joint = np.unique(np.concatenate([predicted, targets]), return_inverse=True)
    given, there = joint[: len(predicted)], joint[len(predicted) :]
    return float(getattr(scikit_learn(), function)(there, given, **options))


def _array(rows: Any) -> Any:
    """Rows as a numpy array; rows of unequal length as they are."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        return (rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows).numpy()
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Tensor) for row in rows):
        rows = [_array(row) for row in rows]
    try:
        return np.asarray(rows)
    except ValueError:
        return rows


def _as_classes(rows: Any) -> Array:
    array = _array(rows)
    if array.ndim > 1 and array.shape[-1] > 1:
        return np.argmax(array, axis=-1).ravel()
    return array.ravel()


def _classes(y_pred: Any, y_true: Any) -> tuple[Array, Array]:
    predicted, targets = _array(y_pred), _array(y_true)
    if predicted.shape == targets.shape and predicted.ndim > 1 and not _is_one_hot(targets):
        return predicted.ravel(), targets.ravel()  # a class for each element, as of tokens or pixels
    predicted, targets = _as_classes(predicted), _as_classes(targets)
    _check_lengths(predicted, targets)
    return predicted, targets


def _is_one_hot(rows: Array) -> bool:
    return bool(rows.shape[-1] > 1 and np.isin(rows, (0, 1)).all() and (rows.sum(axis=-1) == 1).all())


def _scores(rows: Any) -> Array:
    array = _array(rows)
    if array.ndim == 2 and array.shape[1] == 2:
        return array[:, 1]
    return array.ravel()


def _errors(y_pred: Any, y_true: Any) -> Array:
    predicted, targets = _array(y_pred).astype(np.float64), _array(y_true).astype(np.float64)
    if predicted.size == targets.size:  # (n, 1) against (n,): else numpy would make (n, n) of them
        predicted = predicted.reshape(targets.shape)
    _check_lengths(predicted, targets)
    return predicted - targets


def _check_lengths(predicted: Array, targets: Array) -> None:
    if predicted.shape != targets.shape:
        raise ConfigurationError(
            f"predictions have shape {predicted.shape} and targets {targets.shape}: give one for each."
        )
