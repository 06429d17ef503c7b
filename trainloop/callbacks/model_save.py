"""Checkpoints and final models in an experiment's folder, by AIToolbox's module and names.

:class:`ModelCheckpoint` is the one of this package, with a folder of one's choice; the other two name a project and an
experiment, as the tracking loops do (:class:`trainloop.TrainLoopCheckpointEndSave`), for use with a plain loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainloop.callbacks.checkpoint import ModelCheckpoint
from trainloop.callbacks.tracking import Experiment, ExperimentCheckpoint, ExperimentEndSave

__all__ = ["ModelCheckpoint", "ModelIterationCheckpoint", "ModelTrainEndSave"]


class ModelIterationCheckpoint(ExperimentCheckpoint):
    """Write a checkpoint every so many optimizer steps, into an experiment's folder.

    Parameters
    ----------
    save_frequency : int
        Optimizer steps between two checkpoints.
    project_name, experiment_name, local_model_result_folder_path
        Where: in ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>/checkpoints``.
    hyperparams : mapping, optional
        Of the experiment.
    **more
        As for :class:`trainloop.callbacks.tracking.ExperimentCheckpoint`.

    Examples
    --------
    >>> ModelIterationCheckpoint(500, "digits", "cnn", "~/results")
    """

    def __init__(
        self,
        save_frequency: int,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str | os.PathLike[str],
        hyperparams: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        experiment = Experiment(project_name, experiment_name, local_model_result_folder_path, hyperparams)
        super().__init__(experiment, iteration_save_freq=save_frequency, **more)


class ModelTrainEndSave(ExperimentEndSave):
    """Save the model and a report at the end of training, into an experiment's folder.

    Parameters
    ----------
    project_name, experiment_name, local_model_result_folder_path
        Files go to ``<local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>``.
    hyperparams : mapping, optional
        Of the experiment; they stand in the report.
    val_result_package, test_result_package
        Evaluated at the end, see :func:`trainloop.result_package.evaluate_result_package`.
    source_dirs : sequence of str or path
        Folders of source that belong to the experiment.

    Examples
    --------
    >>> ModelTrainEndSave("digits", "cnn", "~/results", {"lr": 0.1}, test_result_package=ClassificationResultPackage())
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str | os.PathLike[str],
        hyperparams: Mapping[str, Any] | None = None,
        val_result_package: Any = None,
        test_result_package: Any = None,
        source_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        where = (project_name, experiment_name, local_model_result_folder_path)
        super().__init__(Experiment(*where, hyperparams, source_dirs), val_result_package, test_result_package)
