"""AIToolbox's metrics, computed by scikit-learn, and its result packages."""

from __future__ import annotations

import copy
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainloop import result_package as core
from trainloop.compat.aitoolbox.history import StrictCheck, TrainingHistory
from trainloop.errors import ConfigurationError
from trainloop.result_package import as_array, scikit_learn

# -- metrics ----------------------------------------------------------------------------------------------------------


class AbstractBaseMetric(ABC):
    """Base class of metrics, which are computed at construction. ``+`` joins metrics to a dict of results."""

    def __init__(self, y_true: Any, y_predicted: Any, metric_name: str, np_array: bool = True) -> None:
        self.y_true = as_array(y_true) if np_array else y_true
        self.y_predicted = as_array(y_predicted) if np_array else y_predicted
        self.metric_name = metric_name
        self.metric_result: Any = None
        self.metric_result = self.calculate_metric()

    @abstractmethod
    def calculate_metric(self) -> Any:
        """Compute and return the result: a number, a list or a dict."""

    def get_metric(self) -> Any:
        """Return the result."""
        return self.metric_result

    def get_metric_dict(self) -> dict[str, Any]:
        """Return a dict with the result under the metric's name."""
        return {self.metric_name: self.metric_result}

    def __str__(self) -> str:
        return f"{self.metric_name}: {self.metric_result}"

    def __len__(self) -> int:
        if self.metric_result is None:
            return 0
        return len(self.metric_result) if isinstance(self.metric_result, (list, dict)) else 1

    def __lt__(self, other: Any) -> bool:
        return bool(_number_of(self) < _number_of(other))

    def __le__(self, other: Any) -> bool:
        return bool(_number_of(self) <= _number_of(other))

    def __gt__(self, other: Any) -> bool:
        return bool(_number_of(self) > _number_of(other))

    def __ge__(self, other: Any) -> bool:
        return bool(_number_of(self) >= _number_of(other))

    def __contains__(self, item: object) -> bool:
        return item == self.metric_name or (isinstance(self.metric_result, dict) and item in self.metric_result)

    def __getitem__(self, item: str) -> Any:
        if item not in self:
            raise KeyError(item)
        return self.metric_result if item == self.metric_name else self.metric_result[item]

    def concat_metric(self, other: AbstractBaseMetric | Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with the results of both metrics under their names."""
        if not isinstance(other, (AbstractBaseMetric, dict)):
            raise TypeError(f"a metric can't be joined with a {type(other).__name__}. Join it with a metric or a dict.")
        return {**self.get_metric_dict(), **(other if isinstance(other, dict) else other.get_metric_dict())}

    __add__ = __radd__ = concat_metric


def _number_of(value: Any) -> Any:
    value = value.metric_result if isinstance(value, AbstractBaseMetric) else value
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise ConfigurationError(f"{value!r} can't be compared: only metrics whose result is a single number can.")
    return value


class AccuracyMetric(AbstractBaseMetric):
    """``Accuracy``. A row of scores counts as the class with the highest score; single scores have a threshold."""

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


class _Scored(AbstractBaseMetric):
    name, function = "", ""

    def __init__(self, y_true: Any, y_predicted: Any) -> None:
        super().__init__(y_true, y_predicted, self.name)

    def calculate_metric(self) -> float:
        return float(getattr(scikit_learn(), self.function)(self.y_true, self.predictions()))

    def predictions(self) -> Any:
        """Return the predictions in the form that the function expects."""
        return self.y_predicted


class ROCAUCMetric(_Scored):
    """``ROC_AUC``."""

    name, function = "ROC_AUC", "roc_auc_score"


class PrecisionRecallCurveAUCMetric(_Scored):
    """``PrecisionRecall_AUC``: the area under the precision-recall curve, by the trapezoidal rule."""

    name = "PrecisionRecall_AUC"

    def calculate_metric(self) -> float:
        precision, recall, _ = scikit_learn().precision_recall_curve(self.y_true, self.y_predicted)
        return float(scikit_learn().auc(recall, precision))


class _Thresholded(_Scored):
    def __init__(self, y_true: Any, y_predicted: Any, positive_class_thresh: float = 0.5) -> None:
        self.positive_class_thresh = positive_class_thresh
        super().__init__(y_true, y_predicted)

    def predictions(self) -> Any:
        return np.where(self.y_predicted > self.positive_class_thresh, 1, 0)


class F1ScoreMetric(_Thresholded):
    """``F1_score``."""

    name, function = "F1_score", "f1_score"


class PrecisionMetric(_Thresholded):
    """``Precision``."""

    name, function = "Precision", "precision_score"


class RecallMetric(_Thresholded):
    """``Recall``."""

    name, function = "Recall", "recall_score"


class MeanSquaredErrorMetric(_Scored):
    """``Mean_squared_error``."""

    name, function = "Mean_squared_error", "mean_squared_error"


class MeanAbsoluteErrorMetric(_Scored):
    """``Mean_absolute_error``."""

    name, function = "Mean_absolute_error", "mean_absolute_error"


# -- result packages --------------------------------------------------------------------------------------------------


class AbstractResultPackage(StrictCheck, core.AbstractResultPackage):
    """Base class of result packages. Implement :meth:`prepare_results_dict`.

    Parameters
    ----------
    pkg_name : str, optional
    strict_content_check : bool
        Raise errors for problems instead of printing them.
    np_array : bool or 'auto'
        If True, convert targets and predictions to numpy arrays; with ``'auto'``, only if their rows have equal length.
    **kwargs
        Stored as ``package_metadata``.
    """

    def __init__(
        self,
        pkg_name: str | None = None,
        strict_content_check: bool = False,
        np_array: bool | str = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(pkg_name, strict_content_check, np_array, **kwargs)
        self.pkg_name: Any = pkg_name
        self.additional_results_dump_paths: list[list[str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # these include targets and predictions, which MultipleResultPackageWrapper needs

    def get_results(self) -> Any:
        """Return the results by metric."""
        if self.results_dict is None:
            self.warn_about_result_data_problem("Warning: Results dict missing")
        return self.results_dict

    def get_hyperparameters(self) -> dict[str, Any] | None:
        """Return the hyperparameters that were passed to ``prepare_result_package``."""
        self.qa_check_hyperparameters_dict()
        return self.hyperparameters

    def get_additional_results_dump_paths(self) -> list[list[str]] | None:
        """Return additional files to save, each as ``[path in the results, local path]``."""
        self.additional_results_dump_paths = self.list_additional_results_dump_paths()
        self.qa_check_additional_results_dump_paths()
        return self.additional_results_dump_paths

    def list_additional_results_dump_paths(self) -> list[list[str]] | None:
        """Return additional files to save. Packages that write files override this method."""
        return None

    def set_experiment_dir_path_for_additional_results(
        self,
        project_name: str,
        experiment_name: str,
        experiment_timestamp: str,
        local_model_result_folder_path: str,
    ) -> None:
        """Set the folder for additional files. Packages that write files override this method."""

    def qa_check_hyperparameters_dict(self) -> None:
        """Print a message about missing hyperparameters; if the check is strict, raise an error instead."""
        if self.hyperparameters is None:
            self.warn_about_result_data_problem("Warning: Hyperparameters missing")
        for name in ("bash_script_path", "experiment_file_path"):
            if (self.hyperparameters or {}).get(name) is None:
                self.warn_about_result_data_problem(f"{name} missing from hyperparameters dict.")

    def qa_check_additional_results_dump_paths(self) -> None:
        """Raise an error unless :meth:`list_additional_results_dump_paths` returns a list of pairs of paths."""
        paths = self.additional_results_dump_paths
        pairs = isinstance(paths, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(path, str) for path in pair) for pair in paths
        )
        if paths is not None and not pairs:
            raise ConfigurationError(
                f"list_additional_results_dump_paths() returned {paths!r}: must be a list of [path in the results, "
                "local path], or None."
            )

    @staticmethod
    def zip_additional_results_dump(source_dir_path: str, zip_path: str) -> str:
        """Zip a folder, and return the path of the zip file."""
        return shutil.make_archive(zip_path, "zip", source_dir_path)

    def warn_if_results_dict_not_defined(self) -> None:
        """Raise an error if there are no results."""
        if self.results_dict is None:
            raise ConfigurationError("the result package has no results yet. Call prepare_result_package() first.")

    @property
    def _results(self) -> dict[str, Any]:
        self.warn_if_results_dict_not_defined()
        return self.results_dict

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._results.items())

    def __len__(self) -> int:
        return len(self._results)

    def __contains__(self, item: object) -> bool:
        return item in self._results

    def __getitem__(self, item: str) -> Any:
        return self._results[item]

    def __add__(self, other: AbstractResultPackage | dict[str, Any]) -> MultipleResultPackageWrapper:
        return self.add_merge_multi_pkg_wrap(other)

    __radd__ = __add__

    def add_merge_multi_pkg_wrap(self, other_object: Any) -> MultipleResultPackageWrapper:
        """Return a package that contains both packages."""
        self.warn_if_results_dict_not_defined()
        both = MultipleResultPackageWrapper()
        both.prepare_result_package([copy.deepcopy(self), *_packages_of(other_object)], self.hyperparameters)
        return both

    def __iadd__(self, other: AbstractResultPackage | dict[str, Any]) -> AbstractResultPackage:
        return self.add_merge_dicts(other)

    def add_merge_dicts(self, other: AbstractResultPackage | dict[str, Any]) -> AbstractResultPackage:
        """Add the results of the other package to this one. Their names must be different."""
        (package,) = _packages_of(other, joined=True)
        both = self._results.keys() & package.results_dict.keys()
        if both:
            raise ConfigurationError(f"both packages have results with these names: {', '.join(sorted(both))}.")
        self.results_dict = {**self._results, **package.results_dict}
        return self


def _packages_of(other: Any, joined: bool = False) -> list[Any]:
    if isinstance(other, dict):
        return [PreCalculatedResultPackage(copy.deepcopy(other))]
    if not isinstance(other, AbstractResultPackage):
        raise ConfigurationError(
            f"a {type(other).__name__} can't be added to a result package. Add a result package or a dict."
        )
    other.warn_if_results_dict_not_defined()
    other = copy.deepcopy(other)
    return list(other.result_packages) if isinstance(other, MultipleResultPackageWrapper) and not joined else [other]


class PreCalculatedResultPackage(AbstractResultPackage):
    """A package of results that are already known."""

    def __init__(self, results_dict: dict[str, Any], strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("PreCalculatedResult", strict_content_check, **kwargs)
        self.results_dict = results_dict
        self.training_history = TrainingHistory()
        self.hyperparameters = {}

    def prepare_results_dict(self) -> dict[str, Any]:
        return self._results


class MultipleResultPackageWrapper(AbstractResultPackage):
    """A package that contains several packages. Results, targets and predictions are dicts by package name."""

    def __init__(self, strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("MultipleResultWrapper", strict_content_check, **kwargs)
        self.result_packages: list[Any] = []

    def prepare_result_package(  # type: ignore[override]  # receives packages, not targets
        self, result_packages: Sequence[Any], hyperparameters: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Set the packages to combine, which must have results."""
        self.result_packages = list(result_packages)
        self.hyperparameters = hyperparameters
        self.additional_results = kwargs
        self.results_dict = self.prepare_results_dict()

    def prepare_results_dict(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        self.y_true, self.y_predicted = {}, {}
        self.additional_results = {self.pkg_name: self.additional_results} if self.additional_results else {}
        for i, package in enumerate(self.result_packages):
            name = f"ResultPackage{i}" if package.pkg_name is None else package.pkg_name
            name = f"{name}{i}" if name in results else name
            results[name] = package.get_results()
            self.y_true[name], self.y_predicted[name] = package.y_true, package.y_predicted
            self.additional_results[name] = package.additional_results
        return results

    def list_additional_results_dump_paths(self) -> list[list[str]] | None:
        paths = [path for package in self.result_packages for path in package.get_additional_results_dump_paths() or ()]
        return paths or None

    def __str__(self) -> str:
        return "\n".join(f"--> {package.pkg_name}:\n{package}" for package in self.result_packages)

    def __len__(self) -> int:
        return len(self.result_packages)

    def add_merge_multi_pkg_wrap(self, other_object: Any) -> MultipleResultPackageWrapper:
        """Return a new package that contains these packages and others."""
        both = copy.deepcopy(self)
        both += other_object
        return both

    def __iadd__(self, other: Any) -> MultipleResultPackageWrapper:  # type: ignore[misc]  # in-place: the same object
        self.warn_if_results_dict_not_defined()
        packages = [*self.result_packages, *_packages_of(other)]
        self.prepare_result_package(packages, self.hyperparameters, **self.package_metadata)
        return self


class GeneralResultPackage(AbstractResultPackage):
    """A package of any metrics: subclasses of :class:`AbstractBaseMetric`, called with targets and predictions."""

    def __init__(self, metrics_list: Sequence[Any], strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("GeneralResultPackage", strict_content_check, **kwargs)
        self.metrics_list = metrics_list

    def prepare_results_dict(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for metric in self.metrics_list:
            results.update(metric(self.y_true, self.y_predicted).get_metric_dict())
        return results


class BinaryClassificationResultPackage(AbstractResultPackage):
    """``Accuracy``, ``ROC_AUC``, ``PrecisionRecall_AUC`` and ``F1_score``."""

    def __init__(self, positive_class_thresh: float = 0.5, strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("BinaryClassificationResult", strict_content_check, **kwargs)
        self.positive_class_thresh = positive_class_thresh

    def prepare_results_dict(self) -> dict[str, Any]:
        rows, threshold = (self.y_true, self.y_predicted), self.positive_class_thresh
        results = AccuracyMetric(*rows, threshold) + ROCAUCMetric(*rows)
        return {**results, **(PrecisionRecallCurveAUCMetric(*rows) + F1ScoreMetric(*rows, threshold))}


class ClassificationResultPackage(AbstractResultPackage):
    """``Accuracy``."""

    def __init__(self, strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("ClassificationResult", strict_content_check, **kwargs)

    def prepare_results_dict(self) -> dict[str, Any]:
        return AccuracyMetric(self.y_true, self.y_predicted, positive_class_thresh=None).get_metric_dict()


class RegressionResultPackage(AbstractResultPackage):
    """``Mean_squared_error`` and ``Mean_absolute_error``."""

    def __init__(self, strict_content_check: bool = False, **kwargs: Any) -> None:
        super().__init__("RegressionResult", strict_content_check, **kwargs)

    def prepare_results_dict(self) -> dict[str, Any]:
        rows = self.y_true, self.y_predicted
        return MeanSquaredErrorMetric(*rows) + MeanAbsoluteErrorMetric(*rows)


class TorchMetricsPackage(AbstractResultPackage):
    """A package of a torchmetrics metric or collection. Results are named ``<metric>_PTLMetrics``."""

    def __init__(self, torch_metrics: Any) -> None:
        super().__init__("Torch Metrics", np_array=False)
        self.metric = torch_metrics

    def prepare_results_dict(self) -> dict[str, Any]:
        result = self.metric(self.y_predicted, self.y_true)
        if not isinstance(result, dict):
            result = {type(self.metric).__name__: result}
        return {f"{name}_PTLMetrics": value for name, value in result.items()}

    def metric_compute(self) -> Any:
        """Return the metric's value over all predictions that it has received."""
        return self.metric.compute()

    def metric_reset(self) -> None:
        """Reset the metric."""
        self.metric.reset()


class HFEvaluateResultPackage(AbstractResultPackage):
    """A package of a metric of Hugging Face's ``evaluate``. Results are named ``<metric>_HFEvaluate``."""

    def __init__(self, hf_evaluate_metric: Any, use_models_additional_results: bool = True, **kwargs: Any) -> None:
        super().__init__("HuggingFace Evaluate metrics", **kwargs)
        self.metric = hf_evaluate_metric
        self.use_models_additional_results = use_models_additional_results

    def prepare_results_dict(self) -> dict[str, Any]:
        given = (self.additional_results or {}).get("additional_results") or {}
        extra = {**self.package_metadata, **(given if self.use_models_additional_results else {})}
        result = self.metric.compute(references=self.y_true, predictions=self.y_predicted, **extra)
        return {f"{name}_HFEvaluate": value for name, value in (result or {}).items()}


def prepare_package(package: Any, hyperparameters: dict[str, Any], predict: Any, evaluate_loss: Any) -> None:
    """Compute a package's results from predictions and, if the package needs it, the loss."""
    y_pred, y_true, metadata = predict()
    if package.requires_loss:
        metadata = {**metadata, "loss": evaluate_loss(float_dict_format=True)}
    package.prepare_result_package(y_true, y_pred, hyperparameters=hyperparameters, additional_results=metadata)
