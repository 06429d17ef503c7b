"""Callbacks that write the history into files, and those that read or write in an experiment's folder."""

from __future__ import annotations

import csv
import os
from typing import Any

from trainloop import checkpoint
from trainloop._support.distribution import import_extra
from trainloop.callbacks.base import AbstractCallback, count_of
from trainloop.callbacks.messages import UNTIL_END_OF_EPOCH
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.history import format_table

__all__ = [
    "AbstractExperimentCallback",
    "ModelLoadContinueTraining",
    "ModelTrainHistoryBaseCB",
    "ModelTrainHistoryFileWriter",
    "ModelTrainHistoryPlot",
    "TrainHistoryPlot",
]


class AbstractExperimentCallback(AbstractCallback):
    """Base of callbacks that write into an experiment's folder.

    Names that are not given are taken from the loop if it writes an experiment's folder, like
    :class:`trainloop.TrainLoopCheckpoint`.

    Parameters
    ----------
    callback_name : str
    project_name, experiment_name, local_model_result_folder_path : str, optional
        The folder is ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>``.
    execution_order, device_idx_execution
        As in :class:`AbstractCallback`.

    Examples
    --------
    >>> class Notes(AbstractExperimentCallback):
    ...     def on_train_loop_registration(self):
    ...         self.try_infer_experiment_details()
    ...     def on_train_end(self):
    ...         Path(self.results_folder(), "notes.txt").write_text("done")
    """

    def __init__(
        self,
        callback_name: str,
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | os.PathLike[str] | None = None,
        execution_order: int = 0,
        device_idx_execution: int | None = None,
    ) -> None:
        super().__init__(callback_name, execution_order=execution_order, device_idx_execution=device_idx_execution)
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.local_model_result_folder_path: str | None = (
            None if local_model_result_folder_path is None else os.path.expanduser(local_model_result_folder_path)
        )

    def try_infer_experiment_details(self, infer_cloud_details: bool = False) -> None:
        """Replace missing names with the loop's names; call this in ``on_train_loop_registration``.

        Raises
        ------
        ConfigurationError
            If a name was not given, and the loop has no experiment to take it from.
        """
        for name in ("project_name", "experiment_name", "local_model_result_folder_path"):
            if getattr(self, name) is None:
                value: Any = getattr(self.train_loop_obj, name, None)
                if value is None:
                    raise ConfigurationError(
                        f"{type(self).__name__} has no {name}, and neither has the {type(self.train_loop_obj).__name__}"
                        f". Pass {name} to the callback, or use a loop that has it, such as TrainLoopCheckpoint."
                    )
                setattr(self, name, os.path.expanduser(value) if name.endswith("path") else value)

    def experiment_folder(self) -> str:
        """Return the experiment's folder. Create it if it is missing."""
        assert self.local_model_result_folder_path is not None, "call try_infer_experiment_details first"
        assert self.project_name is not None, "call try_infer_experiment_details first"
        stamp = getattr(self.train_loop_obj, "experiment_timestamp", None)
        name = f"{self.experiment_name}_{stamp}" if stamp else str(self.experiment_name)
        folder = os.path.join(self.local_model_result_folder_path, self.project_name, name)
        os.makedirs(folder, exist_ok=True)
        return folder

    def results_folder(self) -> str:
        """Return the folder ``results`` in the experiment's folder. Create it if it is missing."""
        folder = os.path.join(self.experiment_folder(), "results")
        os.makedirs(folder, exist_ok=True)
        return folder


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
        self.path = os.path.expanduser(os.fspath(path))
        self.every_n_epochs = count_of("TrainHistoryPlot", "every_n_epochs", every_n_epochs)

    def on_train_loop_registration(self) -> None:
        import_extra("matplotlib", "TrainHistoryPlot", "plot")

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
        Names and location of the experiment's folder. Default: taken from the loop, if it is a ``TrainLoopCheckpoint``
        or similar.

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
            raise ConfigurationError(f"{callback_name}: epoch_end and train_end are both False. Set one to True.")
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
        Names and location of the experiment's folder. Default: taken from the loop, if it is a ``TrainLoopCheckpoint``
        or similar.

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
        import_extra("matplotlib", "ModelTrainHistoryPlot", "plot")
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
        Names and location of the experiment's folder. Default: taken from the loop, if it is a ``TrainLoopCheckpoint``
        or similar.

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


class ModelLoadContinueTraining(AbstractExperimentCallback):
    """Resume from a checkpoint of an earlier experiment: weights, optimizer, schedulers, history, position in epoch.

    ``fit(resume_from=path)`` resumes from the checkpoint at a path, and ``resume_from='last'`` from the newest one.

    Parameters
    ----------
    saved_experiment_timestamp : str
        Time stamp of the earlier experiment's folder, ``<experiment_name>_<time stamp>``.
    saved_model_dir : str
        Subfolder that contains the checkpoints.
    epoch_num : int, optional
        Index of the epoch whose newest checkpoint is loaded. Default: the newest checkpoint of all epochs.
    project_name, experiment_name, local_model_result_folder_path : str, optional
        Names and folder of the earlier experiment. Default: taken from the loop, if it is a ``TrainLoopCheckpoint`` or
        similar.

    Raises
    ------
    CheckpointError
        At ``fit``, if the checkpoint does not exist or belongs to another model.
    ConfigurationError
        At ``fit``, if neither the arguments nor the loop name the folder.

    Examples
    --------
    >>> load = ModelLoadContinueTraining("2026-01-31_23-59-59", project_name="digits", experiment_name="cnn",
    ...                                  local_model_result_folder_path="~/results")
    >>> tl.fit(num_epochs=10, callbacks=[load])
    """

    def __init__(
        self,
        saved_experiment_timestamp: str,
        saved_model_dir: str = "checkpoints",
        epoch_num: int | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        local_model_result_folder_path: str | os.PathLike[str] | None = None,
    ) -> None:
        # After all other callbacks, as when the loop itself resumes.
        super().__init__(
            "ModelLoadContinueTraining",
            project_name,
            experiment_name,
            local_model_result_folder_path,
            execution_order=1_000_000,
        )
        self.saved_experiment_timestamp = saved_experiment_timestamp
        self.saved_model_dir = saved_model_dir
        self.epoch_num = epoch_num
        self._path = ""

    def on_train_loop_registration(self) -> None:
        self.try_infer_experiment_details()
        assert self.local_model_result_folder_path is not None
        assert self.project_name is not None
        name = f"{self.experiment_name}_{self.saved_experiment_timestamp}"
        folder = checkpoint.folder(
            os.path.join(self.local_model_result_folder_path, self.project_name, name, self.saved_model_dir)
        )
        found = [file for file in checkpoint.checkpoints(folder) if file.info is not None]
        wanted = [file for file in found if self.epoch_num in (None, file.info.epoch if file.info else None)]
        if not wanted:
            epochs = ", ".join(sorted({str(file.info.epoch) for file in found if file.info is not None}))
            which = "no checkpoint" if self.epoch_num is None else f"no checkpoint of epoch_num={self.epoch_num}"
            there = f" (epochs with a checkpoint: {epochs})" if epochs else ""
            raise CheckpointError(
                f"ModelLoadContinueTraining: {which} in {folder.location}{there}. Check saved_experiment_timestamp, "
                "saved_model_dir and epoch_num."
            )
        self._path = wanted[-1].path

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 0:  # a second fit continues from the first
            state = checkpoint.load(self._path)
            # The state of the earlier experiment's ModelCheckpoint is about that experiment's files.
            others = [entry for entry in state["callbacks"] if entry["name"] != "ModelCheckpoint"]
            loop.load_checkpoint_state({**state, "callbacks": others})
