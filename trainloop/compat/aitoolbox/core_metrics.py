"""AIToolbox's metric objects, computed by scikit-learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainloop.errors import ConfigurationError
from trainloop.result_package import scikit_learn

__all__ = [
    "AbstractBaseMetric",
    "AccuracyMetric",
    "F1ScoreMetric",
    "MeanAbsoluteErrorMetric",
    "MeanSquaredErrorMetric",
    "PrecisionMetric",
    "PrecisionRecallCurveAUCMetric",
    "ROCAUCMetric",
    "RecallMetric",
    "as_array",
]


def as_array(rows: Any) -> Any:
    """Return targets or predictions as a new numpy array."""
    return np.array(rows.detach().cpu().numpy() if isinstance(rows, Tensor) else rows)


class AbstractBaseMetric(ABC):
    """A metric of targets and predictions, computed at construction; ``+`` joins metrics to a dict of results."""

    def __init__(self, y_true: Any, y_predicted: Any, metric_name: str, np_array: bool = True) -> None:
        self.y_true = as_array(y_true) if np_array else y_true
        self.y_predicted = as_array(y_predicted) if np_array else y_predicted
        self.metric_name = metric_name
        self.metric_result: Any = None
        self.metric_result = self.calculate_metric()

    @abstractmethod
    def calculate_metric(self) -> Any:
        """Return the result: a number, a list or a dict."""

    def get_metric(self) -> Any:
        """Return the result."""
        return self.metric_result

    def get_metric_dict(self) -> dict[str, Any]:
        """Return the result by its name."""
        return {self.metric_name: self.metric_result}

    def __str__(self) -> str:
        return f"{self.metric_name}: {self.metric_result}"

    def __len__(self) -> int:
        if self.metric_result is None:
            return 0
        return len(self.metric_result) if isinstance(self.metric_result, (list, dict)) else 1

    def __lt__(self, other: Any) -> bool:
        return bool(self._number() < _number_of(other))

    def __le__(self, other: Any) -> bool:
        return bool(self._number() <= _number_of(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self._number() > _number_of(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self._number() >= _number_of(other))

    def _number(self) -> Any:
        return _number_of(self.metric_result)

    def __contains__(self, item: object) -> bool:
        return item == self.metric_name or (isinstance(self.metric_result, dict) and item in self.metric_result)

    def __getitem__(self, item: str) -> Any:
        if item == self.metric_name:
            return self.metric_result
        if isinstance(self.metric_result, dict) and item in self.metric_result:
            return self.metric_result[item]
        raise KeyError(item)

    def __add__(self, other: AbstractBaseMetric | Mapping[str, Any]) -> dict[str, Any]:
        return self.concat_metric(other)

    __radd__ = __add__

    def concat_metric(self, other: AbstractBaseMetric | Mapping[str, Any]) -> dict[str, Any]:
        """Return both results by their names."""
        if not isinstance(other, (AbstractBaseMetric, dict)):
            raise TypeError(f"a metric and a {type(other).__name__} can't be joined: only metrics and dicts can.")
        return {**self.get_metric_dict(), **(other if isinstance(other, dict) else other.get_metric_dict())}


def _number_of(value: Any) -> Any:
    value = value.metric_result if isinstance(value, AbstractBaseMetric) else value
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise ConfigurationError(f"{value!r}: only metrics whose result is a number can be compared.")
    return value


class AccuracyMetric(AbstractBaseMetric):
    """``Accuracy``; rows of scores count as the class with the highest, single scores are compared with a threshold."""

    def __init__(self, y_true: Any, y_predicted: Any, positive_class_thresh: float | None = 0.5) -> None:
        self.positive_class_thresh = positive_class_thresh
        super().__init__(y_true, y_predicted, "Accuracy")

    def calculate_metric(self) -> float:
        if self.y_predicted.ndim > 1 and self.y_predicted.shape[1] > 1:
            self.y_predicted = np.argmax(self.y_predicted, axis=1)
        elif self.positive_class_thresh is not None:
            if self.y_predicted.min() >= 0 and self.y_predicted.max() <= 1:
                self.y_predicted = self.y_predicted >= self.positive_class_thresh
            else:
                print("Accuracy: predictions are not between 0 and 1. The threshold has not been applied.")
        if self.y_true.ndim > 1 and self.y_true.shape[1] > 1:
            self.y_true = np.argmax(self.y_true, axis=1)
        return float(scikit_learn().accuracy_score(self.y_true, self.y_predicted))


class ROCAUCMetric(AbstractBaseMetric):
    """``ROC_AUC``."""

    def __init__(self, y_true: Any, y_predicted: Any) -> None:
        super().__init__(y_true, y_predicted, "ROC_AUC")

    def calculate_metric(self) -> float:
        return float(scikit_learn().roc_auc_score(self.y_true, self.y_predicted))


class PrecisionRecallCurveAUCMetric(AbstractBaseMetric):
    """``PrecisionRecall_AUC``: the area under the curve, by trapezoids."""

    def __init__(self, y_true: Any, y_predicted: Any) -> None:
        super().__init__(y_true, y_predicted, "PrecisionRecall_AUC")

    def calculate_metric(self) -> float:
        precision, recall, _ = scikit_learn().precision_recall_curve(self.y_true, self.y_predicted)
        return float(scikit_learn().auc(recall, precision))


class _Thresholded(AbstractBaseMetric):
    name, function = "", ""

    def __init__(self, y_true: Any, y_predicted: Any, positive_class_thresh: float = 0.5) -> None:
        self.positive_class_thresh = positive_class_thresh
        super().__init__(y_true, y_predicted, self.name)

    def calculate_metric(self) -> float:
        labels = np.where(self.y_predicted > self.positive_class_thresh, 1, 0)
        return float(getattr(scikit_learn(), self.function)(self.y_true, labels))


class F1ScoreMetric(_Thresholded):
    """``F1_score``."""

    name, function = "F1_score", "f1_score"


class PrecisionMetric(_Thresholded):
    """``Precision``."""

    name, function = "Precision", "precision_score"


class RecallMetric(_Thresholded):
    """``Recall``."""

    name, function = "Recall", "recall_score"


class MeanSquaredErrorMetric(AbstractBaseMetric):
    """``Mean_squared_error``."""

    def __init__(self, y_true: Any, y_predicted: Any) -> None:
        super().__init__(y_true, y_predicted, "Mean_squared_error")

    def calculate_metric(self) -> float:
        return float(scikit_learn().mean_squared_error(self.y_true, self.y_predicted))


class MeanAbsoluteErrorMetric(AbstractBaseMetric):
    """``Mean_absolute_error``."""

    def __init__(self, y_true: Any, y_predicted: Any) -> None:
        super().__init__(y_true, y_predicted, "Mean_absolute_error")

    def calculate_metric(self) -> float:
        return float(scikit_learn().mean_absolute_error(self.y_true, self.y_predicted))
