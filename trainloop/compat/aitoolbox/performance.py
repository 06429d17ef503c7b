"""AIToolbox's callbacks that evaluate result packages, and that print and rename what is in the history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.compat.aitoolbox.results import AbstractResultPackage, TorchMetricsPackage
from trainloop.errors import ConfigurationError

__all__ = ["MetricHistoryRename", "ModelPerformanceEvaluation", "ModelPerformancePrintReport", "TrainHistoryFormatter"]


class ModelPerformanceEvaluation(AbstractCallback):
    """Evaluates a result package on the training or validation set after epochs, and at the end of training.

    Results go into the history as ``train_<metric>`` and ``val_<metric>``, at the end ``train_end_val_<metric>``.
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
        """Evaluate now; the history's names begin with ``prefix``."""
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


class ModelPerformancePrintReport(AbstractCallback):
    """Prints metrics of the history after epochs, and at the end of training."""

    train_loop_obj: Any  # the loop of this package, which has more

    def __init__(
        self,
        metrics: Sequence[str],
        on_each_epoch: bool = True,
        report_frequency: int | None = None,
        strict_metric_reporting: bool = True,
        list_tracked_metrics: bool = False,
    ) -> None:
        super().__init__("Model performance print reporter", execution_order=97, device_idx_execution=0)
        if len(metrics) == 0:
            raise ConfigurationError("metrics is empty: name what to print, as ['val_loss'].")
        self.metrics = metrics
        self.on_each_epoch = on_each_epoch
        self.report_frequency = report_frequency
        self.strict_metric_reporting = strict_metric_reporting
        self.list_tracked_metrics = list_tracked_metrics

    def on_epoch_end(self) -> None:
        epoch = self.train_loop_obj.epoch
        if self.on_each_epoch and (self.report_frequency is None or epoch % self.report_frequency == 0):
            print("------------------  End of epoch performance report  -------------------")
            self.print_performance_report()

    def on_train_end(self) -> None:
        print("-----------------  End of training performance report  -----------------")
        self.print_performance_report(prefix="train_end_")

    def print_performance_report(self, prefix: str = "") -> None:
        """Print each metric's last result.

        Raises
        ------
        ConfigurationError
            If one isn't in the history, and the report is strict.
        """
        history = self.train_loop_obj.train_history
        if self.list_tracked_metrics:
            print(list(history.keys()))
        for metric in self.metrics:
            name = f"{prefix}{metric}"
            if history.get(name):
                print(f"{name}: {history[name][-1]}")
                continue
            message = f"metric {name!r} is not in train_history; there are {', '.join(history.keys())}."
            if self.strict_metric_reporting:
                raise ConfigurationError(message)
            print(message)


class TrainHistoryFormatter(AbstractCallback):
    """Makes a metric of the history from others, after each epoch or at the end of training.

    Parameters
    ----------
    input_metric_getter : callable
        From the history to a list of results.
    output_metric_setter : callable
        From that list to ``(name, result)``.
    epoch_end, train_end : bool
        When; exactly one of them.
    strict_metric_extract : bool
        Raise where the list has no new result, instead of printing so.
    """

    train_loop_obj: Any  # the loop of this package, which has more

    def __init__(
        self,
        input_metric_getter: Callable[[Any], Any],
        output_metric_setter: Callable[[Any], tuple[str, Any]],
        epoch_end: bool = True,
        train_end: bool = False,
        strict_metric_extract: bool = True,
    ) -> None:
        if epoch_end == train_end:
            raise ConfigurationError(
                f"epoch_end={epoch_end} and train_end={train_end}: exactly one of them must be True."
            )
        super().__init__("Train history general formatter engine")
        self.input_metric_getter = input_metric_getter
        self.output_metric_setter = output_metric_setter
        self.epoch_end = epoch_end
        self.train_end = train_end
        self.strict_metric_extract = strict_metric_extract

    def on_epoch_end(self) -> None:
        if self.epoch_end and self.check_if_history_updated(train_end_phase=False):
            self.format_history()

    def on_train_end(self) -> None:
        if self.train_end and self.check_if_history_updated(train_end_phase=True):
            self.format_history()

    def format_history(self) -> None:
        """Insert the new metric's result."""
        loop = self.train_loop_obj
        loop.insert_metric_result_into_history(*self.output_metric_setter(self.input_metric_getter(loop.train_history)))

    def check_if_history_updated(self, train_end_phase: bool) -> bool:
        """Whether the input has a result for each epoch; of a metric of the end of training, one."""
        expected = 1 if train_end_phase else self.train_loop_obj.epoch + 1
        found = len(self.input_metric_getter(self.train_loop_obj.train_history))
        if found == expected:
            return True
        message = f"the metric that input_metric_getter gives has {found} results, where {expected} were expected."
        if self.strict_metric_extract:
            raise ConfigurationError(message)
        print(message)
        return False


class MetricHistoryRename(TrainHistoryFormatter):
    """A metric of the history under another name too."""

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
