"""Loops that maintain an experiment's folder. Each is a :class:`TrainLoop` with additional callbacks.

``from trainloop.train_loop import *`` imports these loops, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainloop.callbacks.base import AbstractCallback
from trainloop.callbacks.reports.experiment import Experiment, ExperimentCheckpoint, ExperimentEndSave, ExperimentRecord
from trainloop.train_loop.arguments.types import Loader, ModelT, Optimizers
from trainloop.train_loop.loop import TrainLoop

__all__ = ["TrainLoopCheckpoint", "TrainLoopCheckpointEndSave", "TrainLoopEndSave"]


class _TrackingLoop(TrainLoop[ModelT]):
    """A loop with an experiment."""

    def __init__(
        self,
        model: ModelT,
        train_loader: Loader | None,
        validation_loader: Loader | None = None,
        test_loader: Loader | None = None,
        optimizer: Optimizers | None = None,
        criterion: Any = None,
        project_name: str = "",
        experiment_name: str = "",
        local_model_result_folder_path: str | os.PathLike[str] = ".",
        hyperparams: Mapping[str, Any] | None = None,
        *,
        source_dirs: Sequence[str | os.PathLike[str]] = (),
        **loop_arguments: Any,
    ) -> None:
        super().__init__(model, train_loader, validation_loader, test_loader, optimizer, criterion, **loop_arguments)
        self.experiment = Experiment(
            project_name, experiment_name, local_model_result_folder_path, hyperparams, source_dirs
        )
        self.project_name, self.experiment_name = project_name, experiment_name
        self.local_model_result_folder_path = self.experiment.local_model_result_folder_path
        self.hyperparams: dict[str, Any] = self.experiment.hyperparams
        self._added_callbacks: list[AbstractCallback] = [ExperimentRecord(self.experiment)]

    def own_callbacks(self) -> list[AbstractCallback]:
        return self._added_callbacks

    @property
    def experiment_timestamp(self) -> str:
        """Time stamp of the experiment's start."""
        return self.experiment.timestamp


class TrainLoopCheckpoint(_TrackingLoop[ModelT]):
    """A loop that writes checkpoints into an experiment's folder; ``resume_from='last'`` resumes from the newest one.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`TrainLoop`.
    project_name, experiment_name : str
        The folder is ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>``.
    local_model_result_folder_path : str or path
        Folder of all projects; by default the current one. With the extra ``cloud``, it may be an fsspec URL such as
        ``s3://bucket/results``.
    hyperparams : dict, optional
        Hyperparameters, written as JSON beside the results.
    source_dirs : sequence of path
        Folders of source code to copy, in addition to the script itself.
    rm_subopt_local_models : bool or str
        ``True``: keep only the best checkpoints by ``loss``. A metric's name: keep only the best checkpoints by this
        metric.
    num_best_checkpoints_kept : int
        Number of best checkpoints to keep.
    iteration_save_freq : int
        Steps between two checkpoints; 0 to write one after each epoch.
    **loop_arguments
        The other arguments of :class:`TrainLoop`.
    """

    def __init__(
        self,
        model: ModelT,
        *args: Any,
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
        iteration_save_freq: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self._added_callbacks.append(
            ExperimentCheckpoint(
                self.experiment, rm_subopt_local_models, num_best_checkpoints_kept, iteration_save_freq
            )
        )


class TrainLoopEndSave(_TrackingLoop[ModelT]):
    """A loop that computes metrics at the end of training, and saves the model and a report.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`TrainLoop`.
    project_name, experiment_name, local_model_result_folder_path, hyperparams, source_dirs
        As in :class:`TrainLoopCheckpoint`.
    val_result_package, test_result_package : optional
        Metrics for :func:`trainloop.result_package.evaluate_result_package`: names, functions of ``(y_pred, y_true,
        metadata)``, torchmetrics, or a list or dict of these.
    **loop_arguments
        The other arguments of :class:`TrainLoop`.
    """

    def __init__(
        self,
        model: ModelT,
        *args: Any,
        val_result_package: Any = None,
        test_result_package: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, *args, **kwargs)
        self.end_save = ExperimentEndSave(self.experiment, val_result_package, test_result_package)
        self._added_callbacks.append(self.end_save)

    @property
    def results(self) -> dict[str, dict[str, float]]:
        """``{'validation': {metric: value}, 'test': ...}`` after training."""
        return self.end_save.results


class TrainLoopCheckpointEndSave(TrainLoopEndSave[ModelT], TrainLoopCheckpoint[ModelT]):
    """A loop that writes checkpoints during training, and saves the results, the model and a report at the end."""
