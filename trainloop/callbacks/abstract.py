"""The base of callbacks that write into an experiment's folder."""

from __future__ import annotations

import os
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.errors import ConfigurationError

__all__ = ["AbstractCallback", "AbstractExperimentCallback"]


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
