"""AIToolbox's callbacks that evaluate result packages, and that print and rename metrics in the history."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.performance_eval import ModelPerformancePrintReport as CoreModelPerformancePrintReport
from trainloop.callbacks.performance_eval import TrainHistoryFormatter as CoreTrainHistoryFormatter
from trainloop.compat.aitoolbox.results import AbstractResultPackage, TorchMetricsPackage
from trainloop.errors import ConfigurationError

__all__ = ["MetricHistoryRename", "ModelPerformanceEvaluation", "ModelPerformancePrintReport", "TrainHistoryFormatter"]


class ModelPerformanceEvaluation(AbstractCallback):
    """Evaluate a result package on the training or validation set after epochs, and at the end of training.

    Results are in the history as ``train_<metric>`` and ``val_<metric>``, at the end ``train_end_val_<metric>``.
    """

    def __init__(
        self,
        result_package: AbstractResultPackage,
        args: dict[str, Any],
        on_each_epoch: bool = True,
        on_train_data: bool = False,
        on_val_data: bool = True,
        eval_frequency: int | None = None,
        if_available_output_to_project_dir: bool = True,
    ) -> None:
        super().__init__("Model performance calculator - evaluator")
        if not on_train_data and not on_val_data:
            raise ConfigurationError("on_train_data and on_val_data are both False: at least one must be True.")
        self.result_package = result_package
        self.args = args
        self.on_each_epoch = on_each_epoch
        self.on_train_data = on_train_data
        self.on_val_data = on_val_data
        self.eval_frequency = eval_frequency
        self.if_available_output_to_project_dir = if_available_output_to_project_dir
        if on_train_data:
            self.train_result_package = copy.deepcopy(result_package)

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        names = ("project_name", "experiment_name", "experiment_timestamp", "local_model_result_folder_path")
        if self.if_available_output_to_project_dir and all(hasattr(loop, name) for name in names):
            self.result_package.set_experiment_dir_path_for_additional_results(*(getattr(loop, name) for name in names))
        for package in self._torch_packages():
            package.metric.to(loop.device)

    def on_epoch_end(self) -> None:
        if self.on_each_epoch:
            epoch = self.train_loop_obj.epoch
            if self.eval_frequency is None or epoch % self.eval_frequency == 0:
                self.evaluate_model_performance()
            else:
                print(
                    f"Skipping performance evaluation on this epoch ({epoch}). "
                    f"Evaluating every {self.eval_frequency} epochs."
                )
        for package in self._torch_packages():
            package.metric_reset()

    def on_train_end(self) -> None:
        self.evaluate_model_performance(prefix="train_end_")

    def evaluate_model_performance(self, prefix: str = "") -> None:
        """Evaluate now; names in the history start with ``prefix``."""
        for part, package, predict, loss in self._parts():
            y_pred, y_true, metadata = predict()
            if package.requires_loss:
                metadata = {**metadata, "loss": loss(float_dict_format=True)}
            package.prepare_result_package(y_true, y_pred, hyperparameters=self.args, additional_results=metadata)
            for name, value in package.get_results().items():
                self.train_loop_obj.insert_metric_result_into_history(f"{prefix}{part}_{name}", value)

    def _torch_packages(self) -> list[TorchMetricsPackage]:
        packages = [getattr(self, "train_result_package", None), self.result_package if self.on_val_data else None]
        return [package for package in packages if isinstance(package, TorchMetricsPackage)]

    def _parts(self) -> list[tuple[str, Any, Callable[..., Any], Callable[..., Any]]]:
        loop = self.train_loop_obj
        parts: list[Any] = []
        if self.on_train_data:
            train = loop.predict_on_train_set, loop.evaluate_loss_on_train_set
            parts.append(("train", self.train_result_package, *train))
        if self.on_val_data:
            validation = loop.predict_on_validation_set, loop.evaluate_loss_on_validation_set
            parts.append(("val", self.result_package, *validation))
        return parts


class ModelPerformancePrintReport(CoreModelPerformancePrintReport):
    """Print metrics of the history after epochs, and at the end of training, in AIToolbox's format."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback_name = "Model performance print reporter"  # callbacks_handler finds callbacks by their names

    def on_epoch_end(self) -> None:
        if self.on_each_epoch and self.train_loop_obj.epoch % (self.report_frequency or 1) == 0:
            print("------------------  End of epoch performance report  -------------------")
            self.print_performance_report()

    def on_train_end(self) -> None:
        print("-----------------  End of training performance report  -----------------")
        self.print_performance_report(prefix="train_end_")

    def print_performance_report(self, prefix: str = "") -> None:
        """Print each metric's last result unchanged; at the end of training only those of the end."""
        history = self.train_loop_obj.train_history
        if self.list_tracked_metrics:
            print(list(history.keys()))
        for name in (prefix + metric for metric in self.metrics):
            if history.get(name):
                print(f"{name}: {history[name][-1]}")
            else:
                self._report_missing(name, history.keys())


class TrainHistoryFormatter(CoreTrainHistoryFormatter):
    """Compute a metric of AIToolbox's history from others, after each epoch or at the end of training."""

    train_loop_obj: Any  # this package's loop, with more attributes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.callback_name = "Train history general formatter engine"

    def read_history(self) -> Any:
        return self.train_loop_obj.train_history


class MetricHistoryRename(TrainHistoryFormatter):
    """Store a metric of the history under another name, too."""

    def __init__(
        self,
        input_metric_path: str | Callable[[Any], Any],
        new_metric_name: str,
        epoch_end: bool = True,
        train_end: bool = False,
        strict_metric_extract: bool = True,
    ) -> None:
        get = input_metric_path if callable(input_metric_path) else lambda history: history[input_metric_path]
        super().__init__(
            get, lambda results: (new_metric_name, results[-1]), epoch_end, train_end, strict_metric_extract
        )
