"""Callbacks that write the history into files: plots and tables."""

from __future__ import annotations

import csv
import os
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.callbacks.abstract import AbstractExperimentCallback
from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.messages import UNTIL_END_OF_EPOCH
from trainloop.errors import ConfigurationError
from trainloop.history import format_table

__all__ = ["ModelTrainHistoryBaseCB", "ModelTrainHistoryFileWriter", "ModelTrainHistoryPlot", "TrainHistoryPlot"]


def require_matplotlib(owner: str) -> None:
    """Raise an error at once, rather than after the first epoch, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{owner} needs matplotlib: {pip_install('plot')}.") from error


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
        If ``every_n_epochs`` is below 1; at ``fit``, if matplotlib is missing.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[TrainHistoryPlot("history.png")])
    """

    def __init__(self, path: str | os.PathLike[str] = "train_history.png", every_n_epochs: int = 1) -> None:
        super().__init__("TrainHistoryPlot", execution_order=97, device_idx_execution=0)
        if every_n_epochs < 1:
            raise ConfigurationError(f"TrainHistoryPlot: every_n_epochs={every_n_epochs}: must be 1 or more.")
        self.path = os.path.expanduser(os.fspath(path))
        self.every_n_epochs = every_n_epochs

    def on_train_loop_registration(self) -> None:
        require_matplotlib("TrainHistoryPlot")

    def on_epoch_end(self) -> None:
        if (self.train_loop_obj.epoch + 1) % self.every_n_epochs == 0:
            self._plot()

    def on_train_end(self) -> None:
        self._plot()

    def _plot(self) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self.train_loop_obj.history.plot(self.path)


class ModelTrainHistoryBaseCB(AbstractExperimentCallback):
    """Base of callbacks that write the history into an experiment's results folder.

    Parameters
    ----------
    callback_name : str
    epoch_end, train_end : bool
        ``epoch_end``: write after each epoch. ``train_end``: write at the end of training. At least one must be True.
    file_format : str
        Suffix of the file.
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Names and location of the experiment's folder. Default: those of the loop, if it is a
        ``TrainLoopCheckpoint`` or similar.

    Examples
    --------
    >>> class AsJson(ModelTrainHistoryBaseCB):
    ...     def file_stem(self):
    ...         return "history"
    ...     def write_history(self, path):
    ...         Path(path).write_text(json.dumps(self.train_loop_obj.history.to_dict()))
    >>> AsJson("AsJson", file_format="json")
    """

    FILE_FORMATS: tuple[str, ...] = ()

    def __init__(
        self,
        callback_name: str,
        epoch_end: bool = True,
        train_end: bool = False,
        file_format: str = "",
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | None = None,
    ) -> None:
        super().__init__(
            callback_name,
            project_name,
            experiment_name,
            local_model_result_folder_path,
            execution_order=97,
            device_idx_execution=0,
        )
        if not epoch_end and not train_end:
            raise ConfigurationError(f"{callback_name}: epoch_end and train_end are both False: set at least one.")
        if self.FILE_FORMATS and file_format not in self.FILE_FORMATS:
            raise ConfigurationError(
                f"{callback_name}: file_format={file_format!r}: must be {' or '.join(map(repr, self.FILE_FORMATS))}."
            )
        self.epoch_end = epoch_end
        self.train_end = train_end
        self.file_format = file_format

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details()

    def on_epoch_end(self) -> None:
        if self.epoch_end:
            self._write("")

    def on_train_end(self) -> None:
        if self.train_end:
            self._write("train_end_")

    def _write(self, prefix: str) -> None:
        path = os.path.join(self.results_folder(), f"{prefix}{self.file_stem()}.{self.file_format}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.write_history(path)
        self.message_service.write_message(f"{self.callback_name}_results_file_local_paths", path, UNTIL_END_OF_EPOCH)

    def file_stem(self) -> str:
        """Return the name of the file, without folder and suffix."""
        raise NotImplementedError

    def write_history(self, path: str) -> None:
        """Write the file."""
        raise NotImplementedError


class ModelTrainHistoryPlot(ModelTrainHistoryBaseCB):
    """Plot the history into an experiment's results folder, as ``plots_epoch_<n>/history.png``.

    Parameters
    ----------
    epoch_end, train_end : bool
        ``epoch_end``: write after each epoch. ``train_end``: write at the end of training. At least one must be True.
    file_format : {'png', 'pdf'}
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Names and location of the experiment's folder. Default: those of the loop, if it is a
        ``TrainLoopCheckpoint`` or similar.

    Examples
    --------
    >>> ModelTrainHistoryPlot(epoch_end=False, train_end=True, file_format="pdf")

    See Also
    --------
    TrainHistoryPlot : plots into one file that you choose.
    """

    FILE_FORMATS = ("png", "pdf")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "png", **kwargs: Any
    ) -> None:
        super().__init__("ModelTrainHistoryPlot", epoch_end, train_end, file_format, **kwargs)

    def on_train_loop_registration(self) -> None:
        require_matplotlib("ModelTrainHistoryPlot")
        super().on_train_loop_registration()

    def file_stem(self) -> str:
        return os.path.join(f"plots_epoch_{self.train_loop_obj.epoch}", "history")

    def write_history(self, path: str) -> None:
        self.train_loop_obj.history.plot(path)


class ModelTrainHistoryFileWriter(ModelTrainHistoryBaseCB):
    """Write the history into an experiment's results folder, as ``results_hist_epoch_<n>.txt``.

    Parameters
    ----------
    epoch_end, train_end : bool
        ``epoch_end``: write after each epoch. ``train_end``: write at the end of training. At least one must be True.
    file_format : {'txt', 'tsv', 'csv'}
        ``'txt'`` is an aligned table for people; ``'tsv'`` and ``'csv'`` are for programs.
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Names and location of the experiment's folder. Default: those of the loop, if it is a
        ``TrainLoopCheckpoint`` or similar.

    Examples
    --------
    >>> ModelTrainHistoryFileWriter(file_format="csv")
    """

    FILE_FORMATS = ("txt", "tsv", "csv")

    def __init__(
        self, epoch_end: bool = True, train_end: bool = False, file_format: str = "txt", **kwargs: Any
    ) -> None:
        super().__init__("ModelTrainHistoryFileWriter", epoch_end, train_end, file_format, **kwargs)

    def file_stem(self) -> str:
        return f"results_hist_epoch_{self.train_loop_obj.epoch}"

    def write_history(self, path: str) -> None:
        rows = self.train_loop_obj.history.rows()
        with open(path, "w", newline="", encoding="utf-8") as file:
            if self.file_format == "txt":
                file.write(format_table(rows) + "\n")
                return
            names = list(dict.fromkeys(name for row in rows for name in row))
            writer = csv.DictWriter(file, names, dialect="excel-tab" if self.file_format == "tsv" else "excel")
            writer.writeheader()
            writer.writerows(rows)
