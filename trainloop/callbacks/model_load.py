"""Continue from the checkpoint of an earlier experiment."""

from __future__ import annotations

import os

from trainloop import checkpoint
from trainloop.callbacks.abstract import AbstractExperimentCallback
from trainloop.errors import CheckpointError

__all__ = ["ModelLoadContinueTraining"]


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
        Names and folder of the earlier experiment. Default: those of the loop, if it is a ``TrainLoopCheckpoint``
        or similar.

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
            there = f"there are checkpoints of epochs {epochs}" if epochs else "there is none at all"
            raise CheckpointError(
                f"ModelLoadContinueTraining: {which} in {folder.location}; {there}. "
                "Check saved_experiment_timestamp, saved_model_dir and epoch_num."
            )
        self._path = wanted[-1].path

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 0:  # a second fit continues from the first
            state = checkpoint.load(self._path)
            # The state of the earlier experiment's ModelCheckpoint is about that experiment's files.
            others = [entry for entry in state["callbacks"] if entry["name"] != "ModelCheckpoint"]
            loop.load_checkpoint_state({**state, "callbacks": others})
