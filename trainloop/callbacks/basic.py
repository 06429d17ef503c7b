"""Small callbacks: training on a part of the data, and plots of the history."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainloop._support.distribution import import_extra
from trainloop.callbacks.arguments import count_of, path_of
from trainloop.callbacks.base import AbstractCallback, require_loader
from trainloop.callbacks.early_stopping import EarlyStopping, ThresholdEarlyStopping, TimeLimit
from trainloop.callbacks.files import check_figure_file, save_figure
from trainloop.errors import ConfigurationError

__all__ = [
    "DataSubsetTestRun",
    "EarlyStopping",
    "ThresholdEarlyStopping",
    "TimeLimit",
    "TrainHistoryPlot",
]


class DataSubsetTestRun(AbstractCallback):
    """Train or evaluate on only the first few batches, to test that a script runs to its end, or to validate faster.

    The loop's loaders are replaced with shorter ones, and stay replaced after ``fit``. The loaders that you passed to
    the loop are not changed. The first batches are chosen once, so every epoch has the same batches. In ``ddp`` they
    are split over the ranks.

    Parameters
    ----------
    num_train_batches, num_val_batches, num_test_batches : int
        Number of batches to keep; 0 keeps the whole set. At least one number must be positive.

    Raises
    ------
    ConfigurationError
        If a number is out of range; at ``fit``, if a loader that should be shortened is missing.

    Examples
    --------
    >>> tl.fit(num_epochs=1, callbacks=[DataSubsetTestRun(num_train_batches=2, num_val_batches=1)])
    >>> tl.fit(num_epochs=9, callbacks=[DataSubsetTestRun(num_train_batches=0, num_val_batches=50)])
    """

    def __init__(self, num_train_batches: int = 1, num_val_batches: int = 0, num_test_batches: int = 0) -> None:
        super().__init__("DataSubsetTestRun", execution_order=-100)
        me = "DataSubsetTestRun"
        self.num_batches = {
            "train_loader": count_of(me, "num_train_batches", num_train_batches, least=0),
            "validation_loader": count_of(me, "num_val_batches", num_val_batches, least=0),
            "test_loader": count_of(me, "num_test_batches", num_test_batches, least=0),
        }
        if not any(self.num_batches.values()):
            raise ConfigurationError(f"{me}: all three numbers are 0, so no loader would be shortened. Leave it out.")

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        for name, number in self.num_batches.items():
            if number:
                require_loader(loop, name, f"DataSubsetTestRun takes {number} batches of {name}")
        for name, number in self.num_batches.items():
            if number:
                setattr(loop, name, _first_batches(getattr(loop, name), number))


def _first_batches(loader: Any, number: int) -> Any:
    """Return a loader with the first batches of ``loader``."""
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if indexed and loader.batch_sampler is not None:
        indices = [list(batch) for batch in islice(loader.batch_sampler, number)]
        # Without workers: starting them takes longer than loading a few batches.
        return DataLoader(loader.dataset, batch_sampler=indices, collate_fn=loader.collate_fn)
    return list(islice(loader, number))


class TrainHistoryPlot(AbstractCallback):
    """Plot the history into a file that is replaced after each epoch.

    Parameters
    ----------
    path : str or path
        File to write; its suffix sets the format, such as ``.png``, ``.pdf`` or ``.svg``.
    every_n_epochs : int
        Epochs between two plots; the history is always plotted at the end of training.

    Raises
    ------
    ConfigurationError
        If ``every_n_epochs`` is below 1; at ``fit``, if matplotlib is missing, or the file can't be written.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[TrainHistoryPlot("history.png")])
    """

    writes = True

    def __init__(self, path: str | os.PathLike[str] = "train_history.png", every_n_epochs: int = 1) -> None:
        super().__init__("TrainHistoryPlot", execution_order=97, device_idx_execution=0)
        self.path = str(path_of("TrainHistoryPlot", "path", path))
        self.every_n_epochs = count_of("TrainHistoryPlot", "every_n_epochs", every_n_epochs)

    def on_train_loop_registration(self) -> None:
        import_extra("matplotlib", "TrainHistoryPlot", "plot")
        check_figure_file("TrainHistoryPlot", self.path)

    def on_epoch_end(self) -> None:
        if (self.train_loop_obj.epoch + 1) % self.every_n_epochs == 0:
            self._plot()

    def on_train_end(self) -> None:
        self._plot()

    def _plot(self) -> None:
        save_figure("TrainHistoryPlot", self.train_loop_obj.history.plot(), self.path)
