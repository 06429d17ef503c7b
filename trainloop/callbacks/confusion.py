"""A confusion matrix of the predicted classes, as numbers and as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainloop._support.distribution import import_extra
from trainloop.callbacks.base import AbstractCallback, count_of, require_loader
from trainloop.errors import ConfigurationError
from trainloop.result_package import classes_of

__all__ = ["ConfusionMatrix"]


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
            self._take(*self.train_loop_obj.predict_on_validation_set()[:2])

    def on_train_end(self) -> None:
        if self.dataset == "test":
            self._take(*self.train_loop_obj.predict_on_test_set()[:2])

    def _take(self, y_pred: Any, y_true: Any) -> None:
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
        if number <= _MOST_NAMES:
            axes.set_xticks(range(number), names, rotation=45, ha="right")
            axes.set_yticks(range(number), names)
            for i in range(number):
                for j in range(number):
                    if counts[i, j]:
                        color = "white" if shares[i, j] > 0.5 else "black"
                        axes.text(j, i, f"{int(counts[i, j])}", ha="center", va="center", color=color)
        return figure


_MOST_NAMES = 30  # with more, names and numbers overlap


def confusion_matrix(y_pred: Any, y_true: Any, num_classes: int = 0) -> Tensor:
    """Return counts by true (rows) and predicted (columns) class.

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
                f"ConfusionMatrix: the {name} that get_predictions returned are not classes. Return classes (whole "
                "numbers from 0) of shape (samples,), or a score for each class, of shape (samples, classes)."
            )
    number = max(num_classes, *(int(classes.max()) + 1 for classes in (predicted, true) if len(classes)), 1)
    pairs = torch.as_tensor(true.astype(np.int64) * number + predicted.astype(np.int64))
    return torch.bincount(pairs, minlength=number * number).reshape(number, number)
