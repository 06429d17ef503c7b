"""Callbacks that compute, print or combine metrics over whole datasets, and the confusion matrix."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainloop import distributed
from trainloop._support.distribution import import_extra
from trainloop.callbacks.base import AbstractCallback, check_counts, count_of, require_loader
from trainloop.errors import ConfigurationError
from trainloop.parallel.shards import bit_sums, local_shard
from trainloop.result_package import check_metric_functions, classes_of, evaluate_result_package

__all__ = [
    "ConfusionMatrix",
    "MetricHistoryRename",
    "ModelPerformanceEvaluation",
    "ModelPerformancePrintReport",
    "TrainHistoryFormatter",
]


@dataclass(eq=False, repr=False)
class ModelPerformanceEvaluation(AbstractCallback):
    """Compute a result package's metrics over whole datasets, and add them to the history.

    The name of a metric gets a prefix. ``accuracy`` becomes ``val_accuracy`` (``train_accuracy`` on training data). At
    the end of training it becomes ``train_end_val_accuracy``, and within epochs ``iterfreq<n>_val_accuracy``.
    Predictions are gathered from all ranks, and each sample counts once, so all ranks get exactly the metrics of a
    single process.

    Parameters
    ----------
    result_package : result package, torchmetrics metric, or callable
        Package to evaluate with :func:`trainloop.result_package.evaluate_result_package`.
    args : dict, optional
        Hyperparameters for the package's reports (``package.hyperparameters``).
    on_each_epoch : bool
        Evaluate after each epoch. The model is always evaluated at the end of training.
    on_train_data, on_val_data : bool
        Datasets to evaluate on; at least one must be True.
    eval_frequency : int, optional
        Epochs between two evaluations, starting with the first. Default: every epoch.
    on_iteration_frequency : int
        Batches between two evaluations within an epoch; 0 for none.
    if_available_output_to_project_dir : bool
        If True and the loop is a ``TrainLoopCheckpoint`` or similar, the package writes its own files into the results
        folder.

    Raises
    ------
    ConfigurationError
        If no data is selected, or a frequency is out of range; at ``fit``, if the loop has no validation loader.

    Examples
    --------
    >>> from trainloop.result_package import ClassificationResultPackage
    >>> evaluation = ModelPerformanceEvaluation(ClassificationResultPackage())
    >>> tl.fit(num_epochs=3, callbacks=[evaluation, EarlyStopping("val_accuracy", patience=2)])
    """

    result_package: Any
    args: dict[str, Any] | None = None
    on_each_epoch: bool = True
    on_train_data: bool = False
    on_val_data: bool = True
    eval_frequency: int | None = None
    on_iteration_frequency: int = 0
    if_available_output_to_project_dir: bool = True

    def __post_init__(self) -> None:
        super().__init__("ModelPerformanceEvaluation")
        if not self.on_train_data and not self.on_val_data:
            raise ConfigurationError(
                "ModelPerformanceEvaluation: on_train_data and on_val_data are both False: set at least one to True."
            )
        self.args = self.args or {}
        check_counts(self, "eval_frequency", optional=True)
        check_counts(self, "on_iteration_frequency", least=0)
        self._latest: tuple[Any, dict[str, float]] | None = None  # key that identifies the weights; metrics
        if self.on_iteration_frequency:
            # Set the hook only if it is needed, because a hook in every step costs time.
            self.on_batch_end = self._after_batch  # type: ignore[method-assign]

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        self.check_loaders()
        check_metric_functions(self.result_package, type(self).__name__)
        self._latest = None
        if hasattr(self.result_package, "hyperparameters") and self.args:
            self.result_package.hyperparameters = self.args
        set_folder = getattr(self.result_package, "set_experiment_dir_path_for_additional_results", None)
        names = ("project_name", "experiment_name", "experiment_timestamp", "local_model_result_folder_path")
        if self.if_available_output_to_project_dir and set_folder and all(hasattr(loop, name) for name in names):
            set_folder(*(getattr(loop, name) for name in names))

    def check_loaders(self) -> None:
        """Raise an error if the loop lacks a loader that the evaluation needs."""
        if self.on_val_data:
            require_loader(self.train_loop_obj, "validation_loader", "ModelPerformanceEvaluation(on_val_data=True)")

    def on_epoch_end(self) -> None:
        if self.on_each_epoch and self.train_loop_obj.epoch % (self.eval_frequency or 1) == 0:
            self.evaluate_model_performance()

    def _after_batch(self) -> None:
        if (self.train_loop_obj.total_iteration_idx + 1) % self.on_iteration_frequency == 0:
            self.evaluate_model_performance(prefix=f"iterfreq{self.on_iteration_frequency}_")

    def on_train_end(self) -> None:
        self.evaluate_model_performance(prefix="train_end_")

    def evaluate_model_performance(self, prefix: str = "") -> None:
        """Evaluate now and add the metrics to the history. Collective: all ranks must call it.

        Parameters
        ----------
        prefix : str
            Prefix of each metric's name.
        """
        loop = self.train_loop_obj
        # The same weights are evaluated only once. At the end of training, the last epoch's metrics are usually reused.
        model = loop.model
        state = (loop.global_step, bit_sums([local_shard(t) for t in (*model.parameters(), *model.buffers())]))
        latest, metrics = self._latest or (None, {})
        # Rank 0 decides for all ranks. An evaluation copies rank 0's buffers to the other ranks, whose state then
        # looks changed.
        if distributed.exchange_ints([int(latest != state)])[0][0]:
            metrics = {}
            if self.on_train_data:
                metrics.update(self._evaluate("train_", loop.predict_on_train_set, loop.evaluate_loss_on_train_set))
            if self.on_val_data:
                metrics.update(
                    self._evaluate("val_", loop.predict_on_validation_set, loop.evaluate_loss_on_validation_set)
                )
            self._latest = (state, metrics)
        for name, value in metrics.items():
            loop.insert_metric_result_into_history(prefix + name, value)

    def _evaluate(self, prefix: str, predict: Callable[[], Any], loss: Callable[[], Any]) -> dict[str, float]:
        y_pred, y_true, metadata = predict()
        if getattr(self.result_package, "requires_loss", False):
            metadata = {**metadata, "loss": loss()}
        metrics = evaluate_result_package(self.result_package, y_pred, y_true, metadata)
        return {prefix + name: value for name, value in metrics.items()}

    def __getstate__(self) -> dict[str, Any]:
        # A bound method in the instance's dict refers to this instance, which would be pickled as well.
        return {name: value for name, value in self.__dict__.items() if name != "on_batch_end"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.on_iteration_frequency:
            self.on_batch_end = self._after_batch  # type: ignore[method-assign]


class ConfusionMatrix(AbstractCallback):
    """Count predicted versus true classes over a whole dataset. Each sample is counted once across all ranks.

    If :class:`~trainloop.callbacks.TensorBoard` is in ``callbacks``, it shows the matrix as an image.

    Parameters
    ----------
    dataset : {'validation', 'test'}
        ``'validation'`` for the validation set at the end of epochs, ``'test'`` for the test set after training.
    every_n_epochs : int
        Epochs between two matrices of the validation set.
    class_names : sequence of str, optional
        Names of the classes in the picture. Default: their numbers.
    path : str or path, optional
        File for the newest picture; its suffix sets the format. Default: no file.

    Attributes
    ----------
    matrix : Tensor or None
        The newest matrix: ``matrix[i, j]`` samples of class ``i`` were predicted as class ``j``.

    Raises
    ------
    ConfigurationError
        At ``fit``, if the loop has no loader for ``dataset``, or if matplotlib is needed but missing; during training,
        if ``get_predictions`` returns neither classes nor a score for each class.

    Notes
    -----
    Each matrix requires one prediction pass over the data. Pictures need matplotlib: ``pip install
    'tt-trainloop[plot]'``.

    Examples
    --------
    >>> matrix = ConfusionMatrix(class_names=["cat", "dog"])
    >>> tl.fit(num_epochs=1, callbacks=[TensorBoard("runs/first"), matrix])
    >>> matrix.matrix.diagonal().sum() / matrix.matrix.sum()  # accuracy
    """

    def __init__(
        self,
        dataset: Literal["validation", "test"] = "validation",
        every_n_epochs: int = 1,
        *,
        class_names: Sequence[str] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__("ConfusionMatrix", execution_order=500)  # before TensorBoard, which writes the picture
        if dataset not in ("validation", "test"):
            raise ConfigurationError(f"ConfusionMatrix: dataset={dataset!r}: must be 'validation' or 'test'.")
        self.dataset = dataset
        self.every_n_epochs = count_of("ConfusionMatrix", "every_n_epochs", every_n_epochs)
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        self.path = None if path is None else Path(os.path.expanduser(os.fspath(path)))
        self.matrix: Tensor | None = None

    def on_train_loop_registration(self) -> None:
        owner = f"ConfusionMatrix(dataset={self.dataset!r})"
        require_loader(self.train_loop_obj, f"{self.dataset}_loader", owner)
        if self.path is not None or self._writers():
            import_extra("matplotlib.figure", "ConfusionMatrix", "plot")

    def on_epoch_end(self) -> None:
        if self.dataset == "validation" and (self.train_loop_obj.epoch + 1) % self.every_n_epochs == 0:
            self._count(*self.train_loop_obj.predict_on_validation_set()[:2])

    def on_train_end(self) -> None:
        if self.dataset == "test":
            self._count(*self.train_loop_obj.predict_on_test_set()[:2])

    def _count(self, y_pred: Any, y_true: Any) -> None:
        self.matrix = confusion_matrix(y_pred, y_true, 0 if self.class_names is None else len(self.class_names))
        if not self.train_loop_obj.is_global_zero:
            return
        writers = self._writers()
        if self.path is None and not writers:
            return
        figure = self.draw()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.path, dpi=150)
        for writer in writers:
            writer.write_figure(f"confusion_matrix/{self.dataset}", figure)

    def _writers(self) -> list[Any]:
        return [callback for callback in self.train_loop_obj.callbacks if hasattr(callback, "write_figure")]

    def draw(self) -> Any:
        """Return a ``matplotlib.figure.Figure`` of the newest matrix, shaded by each cell's fraction of its row."""
        if self.matrix is None:
            raise ConfigurationError("ConfusionMatrix.draw: nothing has been predicted yet. Call fit first.")
        counts = self.matrix
        number = len(counts)
        names = [*(self.class_names or []), *map(str, range(len(self.class_names or []), number))]
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        side = min(4 + 0.4 * number, 14)
        figure_type = import_extra("matplotlib.figure", "ConfusionMatrix", "plot").Figure
        figure = figure_type(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set(xlabel="predicted", ylabel="true", title=f"{self.dataset}, {int(counts.sum()):,} samples")
        if number <= _MAX_NAMES:
            axes.set_xticks(range(number), names, rotation=45, ha="right")
            axes.set_yticks(range(number), names)
            for i in range(number):
                for j in range(number):
                    if counts[i, j]:
                        color = "white" if shares[i, j] > 0.5 else "black"
                        axes.text(j, i, f"{int(counts[i, j])}", ha="center", va="center", color=color)
        return figure


_MAX_NAMES = 30  # with more classes, names and numbers would overlap


def confusion_matrix(y_pred: Any, y_true: Any, num_classes: int = 0) -> Tensor:
    """Return the number of samples for each pair of a true class (row) and a predicted class (column).

    Parameters
    ----------
    y_pred, y_true : Tensor or array
        Classes, or a score for each class in the last of two dimensions.
    num_classes : int
        Minimum number of classes.
    """
    predicted, true = classes_of(y_pred, y_true)
    for name, classes in (("y_pred", predicted), ("y_true", true)):
        numbers = classes.dtype.kind in "biuf" and bool(np.isfinite(classes).all())
        if not numbers or (classes != np.floor(classes)).any() or (classes < 0).any():
            raise ConfigurationError(
                f"ConfusionMatrix: the {name} that get_predictions returned are not classes. Return classes (integers "
                "from 0) of shape (samples,), or a score for each class, of shape (samples, classes)."
            )
    number = max(num_classes, *(int(classes.max()) + 1 for classes in (predicted, true) if len(classes)), 1)
    pairs = torch.as_tensor(true.astype(np.int64) * number + predicted.astype(np.int64), device="cpu")
    return torch.bincount(pairs, minlength=number * number).reshape(number, number)


@dataclass(eq=False, repr=False)
class ModelPerformancePrintReport(AbstractCallback):
    """Print chosen metrics of the history after each epoch and at the end of training.

    Parameters
    ----------
    metrics : sequence of str
        Names in ``history``; at the end of training, the metrics with the prefix ``train_end_`` are printed too.
    on_each_epoch : bool
        Print after each epoch. The metrics are always printed at the end of training.
    report_frequency : int, optional
        Epochs between two reports, starting with the first. Default: every epoch.
    strict_metric_reporting : bool
        If True, a missing metric is an error; otherwise, a line reports that it is missing.
    list_tracked_metrics : bool
        Print the names of all metrics in the history, too.

    Raises
    ------
    ConfigurationError
        If ``metrics`` is empty; later, if a metric is missing and ``strict_metric_reporting`` is True.

    Examples
    --------
    >>> ModelPerformancePrintReport(["val_accuracy", "val_loss"])
    """

    metrics: Sequence[str]
    on_each_epoch: bool = True
    report_frequency: int | None = None
    strict_metric_reporting: bool = True
    list_tracked_metrics: bool = False

    def __post_init__(self) -> None:
        # Runs after callbacks that compute metrics.
        super().__init__("ModelPerformancePrintReport", execution_order=97, device_idx_execution=0)
        if isinstance(self.metrics, str) or not self.metrics:
            raise ConfigurationError(f"ModelPerformancePrintReport: metrics={self.metrics!r}: must be a list of names.")
        check_counts(self, "report_frequency", optional=True)

    def on_epoch_end(self) -> None:
        if self.on_each_epoch and self.train_loop_obj.epoch % (self.report_frequency or 1) == 0:
            self.print_heading(at_end=False)
            self.print_performance_report()

    def on_train_end(self) -> None:
        self.print_heading(at_end=True)
        self.print_performance_report(prefix="train_end_")

    def print_heading(self, at_end: bool) -> None:
        """Print the line above the metrics."""
        when = "at the end of training" if at_end else f"after epoch {self.train_loop_obj.epoch + 1}"
        print(f"---- Performance {when} ----")

    def print_performance_report(self, prefix: str = "") -> None:
        """Print the newest value of each metric.

        Parameters
        ----------
        prefix : str
            Prefix of each metric's name, used only if the history has the prefixed name.
        """
        history = self.train_loop_obj.history
        if self.list_tracked_metrics:
            print(f"metrics: {', '.join(map(repr, history))}")
        for metric in self.metrics:
            name = prefix + metric if prefix + metric in history else metric
            if name in history:
                print(f"{name}: {history[name][-1]:.6g}")
            else:
                self._report_missing(name, history)

    def _report_missing(self, name: str, history: Iterable[str]) -> None:
        known = ", ".join(map(repr, history))
        message = f"ModelPerformancePrintReport: {name!r} is not in the history. The history has: {known}."
        if self.strict_metric_reporting:
            raise ConfigurationError(message)
        print(message)


@dataclass(eq=False, repr=False)
class TrainHistoryFormatter(AbstractCallback):
    """Compute a new metric from other metrics in the history.

    Parameters
    ----------
    input_metric_getter : callable
        Function of the history that returns a list of values, one for each epoch so far.
    output_metric_setter : callable
        Function of that list that returns ``(name, value)`` to add to the history.
    epoch_end, train_end : bool
        Compute the metric after each epoch, or at the end of training; exactly one must be True.
    strict_metric_extract : bool
        If True, a list without a value for the current epoch is an error; otherwise a line is printed and nothing is
        added.

    Raises
    ------
    ConfigurationError
        If not exactly one of ``epoch_end`` and ``train_end`` is True; later, if the list has no value for the current
        epoch.

    Examples
    --------
    >>> gap = TrainHistoryFormatter(
    ...     lambda history: [v - t for v, t in zip(history["val_loss"], history["loss"])],
    ...     lambda gaps: ("generalisation_gap", gaps[-1]),
    ... )
    """

    input_metric_getter: Callable[[Any], list[Any]]
    output_metric_setter: Callable[[list[Any]], tuple[str, float]]
    epoch_end: bool = True
    train_end: bool = False
    strict_metric_extract: bool = True

    def __post_init__(self) -> None:
        super().__init__("TrainHistoryFormatter")
        if bool(self.epoch_end) == bool(self.train_end):
            raise ConfigurationError(
                f"{type(self).__name__}: epoch_end={self.epoch_end}, train_end={self.train_end}: exactly one must be "
                "True."
            )

    def on_epoch_end(self) -> None:
        if self.epoch_end and self.check_if_history_updated(train_end_phase=False):
            self.format_history()

    def on_train_end(self) -> None:
        if self.train_end and self.check_if_history_updated(train_end_phase=True):
            self.format_history()

    def read_history(self) -> Any:
        """Return the history to pass to ``input_metric_getter``."""
        return self.train_loop_obj.history

    def format_history(self) -> None:
        """Add the new metric's value to the history."""
        name, value = self.output_metric_setter(self.input_metric_getter(self.read_history()))
        self.train_loop_obj.insert_metric_result_into_history(name, value)

    def check_if_history_updated(self, train_end_phase: bool) -> bool:
        """Return True if the list has one value for each epoch so far (at the end of training: exactly one value).

        Raises
        ------
        ConfigurationError
            If a value is missing and ``strict_metric_extract`` is True. (If it is False, a line is printed.)
        """
        expected = 1 if train_end_phase else self.train_loop_obj.epoch + 1
        found = len(self.input_metric_getter(self.read_history()))
        if found == expected:
            return True
        message = (
            f"{type(self).__name__}: input_metric_getter returned a list of length {found} instead of {expected}. Put "
            "this callback after the one that computes the metric."
        )
        if self.strict_metric_extract:
            raise ConfigurationError(message)
        if self.train_loop_obj.is_main_process():
            self.train_loop_obj.report(message, logging.WARNING)
        return False


class MetricHistoryRename(TrainHistoryFormatter):
    """Copy a metric of the history to another name.

    Parameters
    ----------
    input_metric_path : str or callable
        Name of the metric, or a function of the history that returns the list of its values.
    new_metric_name : str
    epoch_end, train_end : bool
        Add the newest value after each epoch, or at the end of training; exactly one must be True.
    strict_metric_extract : bool
        If True, a missing value for the current epoch is an error; otherwise a line is printed and nothing is added.

    Examples
    --------
    >>> MetricHistoryRename("val_accuracy", "score")
    """

    def __init__(
        self,
        input_metric_path: str | Callable[[Any], list[Any]],
        new_metric_name: str,
        epoch_end: bool = True,
        train_end: bool = False,
        strict_metric_extract: bool = True,
    ) -> None:
        self.input_metric_path = input_metric_path
        self.new_metric_name = new_metric_name
        super().__init__(self._values, self._renamed, epoch_end, train_end, strict_metric_extract)

    def _values(self, history: Any) -> list[Any]:
        path = self.input_metric_path
        return path(history) if callable(path) else history.get(path, [])

    def _renamed(self, values: list[Any]) -> tuple[str, float]:
        return self.new_metric_name, values[-1]
