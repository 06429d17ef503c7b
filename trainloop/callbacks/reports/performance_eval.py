"""Callbacks that compute metrics over whole datasets, and the confusion matrix."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainloop import distributed
from trainloop._support.distribution import import_extra
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_counts, check_flags, choice_of, count_of, dict_of, path_of, texts_of
from trainloop.callbacks.base import AbstractCallback, overrides_of_user, require_loader
from trainloop.callbacks.files import check_figure_file, save_figure
from trainloop.errors import ConfigurationError
from trainloop.optim.parameters import own_parameters
from trainloop.parallel.sharded.shards import bit_sums, local_shard
from trainloop.result_package import add_metrics, check_metric_functions, classes_of, evaluate_result_package

__all__ = [
    "ConfusionMatrix",
    "ModelPerformanceEvaluation",
]


@dataclass(eq=False, repr=False)
class ModelPerformanceEvaluation(AbstractCallback):
    """Compute metrics over whole datasets, and add them to the history.

    The name of a metric gets a prefix. ``accuracy`` becomes ``val_accuracy`` (``train_accuracy`` on training data). At
    the end of training it becomes ``train_end_val_accuracy``, and within epochs ``iterfreq<n>_val_accuracy``.
    Predictions are gathered from all ranks, and each sample counts once, so all ranks get exactly the metrics of a
    single process.

    Parameters
    ----------
    result_package : str, callable, torchmetrics metric, or list or dict of these
        Metrics for :func:`trainloop.result_package.evaluate_result_package`.
    args : dict, optional
        Values that are added to the ``metadata`` of metric functions.
    on_each_epoch : bool
        Evaluate after each epoch. The model is always evaluated at the end of training.
    on_train_data, on_val_data : bool
        Datasets to evaluate on; at least one must be True.
    eval_frequency : int, optional
        Epochs between two evaluations, starting with the first. Default: every epoch.
    on_iteration_frequency : int
        Batches between two evaluations within an epoch; 0 for none.

    Raises
    ------
    ConfigurationError
        If no data is selected, or a frequency is out of range; at ``fit``, if the loop has no validation loader, or a
        metric can't be computed; at an evaluation, if two metrics of one name have different values, also those of two
        ``ModelPerformanceEvaluation``.

    Examples
    --------
    >>> evaluation = ModelPerformanceEvaluation(["accuracy", "f1"])
    >>> tl.fit(num_epochs=3, callbacks=[evaluation, EarlyStopping("val_accuracy", patience=2)])
    """

    result_package: Any
    args: dict[str, Any] | None = None
    on_each_epoch: bool = True
    on_train_data: bool = False
    on_val_data: bool = True
    eval_frequency: int | None = None
    on_iteration_frequency: int = 0

    def __post_init__(self) -> None:
        super().__init__("ModelPerformanceEvaluation")
        check_flags(
            type(self).__name__,
            on_each_epoch=self.on_each_epoch,
            on_train_data=self.on_train_data,
            on_val_data=self.on_val_data,
        )
        if not self.on_train_data and not self.on_val_data:
            raise ConfigurationError(
                "ModelPerformanceEvaluation: on_train_data and on_val_data are both False: set at least one to True."
            )
        self.args = dict_of("ModelPerformanceEvaluation", "args", self.args) or {}
        check_counts(self, "eval_frequency", optional=True)
        check_counts(self, "on_iteration_frequency", least=0)
        self._latest: tuple[Any, dict[str, float]] | None = None  # key that identifies the weights; metrics
        self._added: tuple[int, dict[str, float]] = (-1, {})  # index of the batch after which metrics were added

    def uses_hook(self, name: str) -> bool:
        needed = name != "on_batch_end" or self.on_iteration_frequency > 0 or overrides_of_user(self, name)
        return needed and super().uses_hook(name)

    def on_train_loop_registration(self) -> None:
        self.check_loaders()
        check_metric_functions(self.result_package, type(self).__name__)
        self._latest, self._added = None, (-1, {})

    def check_loaders(self) -> None:
        """Raise an error if the loop lacks a loader that the evaluation needs."""
        if self.on_val_data:
            require_loader(self.train_loop_obj, "validation_loader", "ModelPerformanceEvaluation(on_val_data=True)")

    def on_epoch_end(self) -> None:
        if self.on_each_epoch and self.train_loop_obj.epoch % (self.eval_frequency or 1) == 0:
            self.evaluate_model_performance()

    def on_batch_end(self) -> None:
        every = self.on_iteration_frequency
        if every and (self.train_loop_obj.total_iteration_idx + 1) % every == 0:
            self.evaluate_model_performance(prefix=f"iterfreq{every}_")

    def on_train_end(self) -> None:
        self.evaluate_model_performance(prefix="train_end_")
        loop = self.train_loop_obj
        batches = loop.total_iteration_idx + 1
        if 0 < batches < self.on_iteration_frequency and loop.is_global_zero:
            warn(
                f"ModelPerformanceEvaluation(on_iteration_frequency={self.on_iteration_frequency}): training ended "
                f"after {batches} batches, before the first evaluation within an epoch. Use a smaller number."
            )

    def evaluate_model_performance(self, prefix: str = "") -> None:
        """Evaluate now and add the metrics to the history. Collective: all ranks must call it.

        Parameters
        ----------
        prefix : str
            Prefix of each metric's name.
        """
        loop = self.train_loop_obj
        # The same weights are evaluated only once. At the end of training, the last epoch's metrics are usually reused.
        # A callback of the user may have changed labels, a loader or an attribute of the model since.
        hooks = [(callback, hook) for callback in loop.callbacks for hook in self.HOOKS]
        reuses = not any(overrides_of_user(callback, hook) for callback, hook in hooks)
        model = loop.model
        state = (loop.global_step, bit_sums([local_shard(t) for t in (*own_parameters(model), *model.buffers())]))
        latest, metrics = self._latest or (None, {})
        # Rank 0 decides for all ranks. An evaluation copies rank 0's buffers to the other ranks, whose state then
        # looks changed.
        if distributed.exchange_ints([int(latest != state or not reuses)])[0][0]:
            metrics = {}
            if self.on_train_data:
                metrics.update(self._evaluate("train_", loop.predict_on_train_set))
            if self.on_val_data:
                metrics.update(self._evaluate("val_", loop.predict_on_validation_set))
            self._latest = (state, metrics)
        # Several evaluations may compute the same metric, which has one value.
        now, added = loop.total_iteration_idx, {}
        others = [one for one in loop.callbacks if isinstance(one, ModelPerformanceEvaluation) and one is not self]
        for other in others:
            added.update(other._added[1] if other._added[0] == now else {})
        self._added = now, {prefix + name: value for name, value in metrics.items()}
        new = self._added[1].keys() - added
        add_metrics(added, self._added[1])
        for name, value in self._added[1].items():
            if name in new:
                loop.insert_metric_result_into_history(name, value)

    def _evaluate(self, prefix: str, predict: Callable[[], Any]) -> dict[str, float]:
        y_pred, y_true, metadata = predict()
        metrics = evaluate_result_package(self.result_package, y_pred, y_true, {**metadata, **(self.args or {})})
        return {prefix + name: value for name, value in metrics.items()}


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
        self.dataset = choice_of("ConfusionMatrix", "dataset", dataset, "validation", "test")
        self.every_n_epochs = count_of("ConfusionMatrix", "every_n_epochs", every_n_epochs)
        self.class_names = None if class_names is None else texts_of("ConfusionMatrix", "class_names", class_names)
        file = path_of("ConfusionMatrix", "path", path, optional=True)
        self.path = None if file is None else Path(file)
        self.writes = path is not None
        self.matrix: Tensor | None = None

    def on_train_loop_registration(self) -> None:
        owner = f"ConfusionMatrix(dataset={self.dataset!r})"
        require_loader(self.train_loop_obj, f"{self.dataset}_loader", owner)
        if self.path is not None or self._writers():
            import_extra("matplotlib.figure", "ConfusionMatrix", "plot")
        if self.path is not None:
            check_figure_file("ConfusionMatrix", str(self.path))

    def on_epoch_end(self) -> None:
        if self.dataset == "validation" and (self.train_loop_obj.epoch + 1) % self.every_n_epochs == 0:
            self._count(*self.train_loop_obj.predict_on_validation_set()[:2])

    def on_train_end(self) -> None:
        if self.dataset == "test":
            self._count(*self.train_loop_obj.predict_on_test_set()[:2])

    def state_dict(self) -> dict[str, Any]:
        return {} if self.matrix is None else {"matrix": self.matrix}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.matrix = state.get("matrix", self.matrix)  # older checkpoints lack it

    def _count(self, y_pred: Any, y_true: Any) -> None:
        self.matrix = confusion_matrix(y_pred, y_true, 0 if self.class_names is None else len(self.class_names))
        if not self.train_loop_obj.is_global_zero:
            return
        writers = self._writers()
        if self.path is None and not writers:
            return
        figure = self.draw()
        if self.path is not None:
            save_figure("ConfusionMatrix", figure, str(self.path))
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
