"""Where an experiment is, as AIToolbox's callbacks are told: in order or by name, beside their own arguments."""

from __future__ import annotations

from typing import Any

import pytest

from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback
from trainloop.compat.aitoolbox.experiments import ModelLoadContinueTraining
from trainloop.compat.aitoolbox.reports import (
    GradDistributionPlot,
    LogUpload,
    ModelTrainHistoryPlot,
    TensorboardFullTracking,
)

EXPERIMENT = {
    "project_name": "p",
    "experiment_name": "e",
    "local_model_result_folder_path": "f",
    "cloud_save_mode": "s3",
    "bucket_name": "b",
    "cloud_dir_prefix": "d",
}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (AbstractExperimentCallback, ("name",)),
        (LogUpload, ("log.txt", False)),
        (ModelTrainHistoryPlot, (True, True, "pdf")),
        (GradDistributionPlot, (None, "gradients", "png")),
        (TensorboardFullTracking, (["loss"], 10, "logs", False)),
        (ModelLoadContinueTraining, ("T", "model", 3, True, True, True, None)),
    ],
)
def test_an_experiment_is_given_by_place_or_by_name(kind: type[Any], own: tuple[Any, ...]) -> None:
    for callback in (kind(*own, *EXPERIMENT.values()), kind(*own, **EXPERIMENT)):
        assert {name: getattr(callback, name) for name in EXPERIMENT} == EXPERIMENT
    assert all(getattr(kind(*own), name) is None for name in EXPERIMENT)


def test_other_arguments_go_where_they_belong() -> None:
    tensorboard = TensorboardFullTracking(max_queue=3, bucket_name="b")
    assert tensorboard.tb_writer_kwargs == {"max_queue": 3}
    assert (tensorboard.bucket_name, tensorboard.is_project) == ("b", True)
    load = ModelLoadContinueTraining("T", map_location="cpu", project_name="p")
    assert load.local_loader_kwargs == {"map_location": "cpu"}
    assert (load.project_name, load.saved_model_dir) == ("p", "checkpoint_model")
    with pytest.raises(TypeError, match="projekt_name"):
        ModelTrainHistoryPlot(projekt_name="p")
    with pytest.raises(TypeError, match="multiple values for argument 'project_name'"):
        TensorboardFullTracking(None, 1, None, True, "p", project_name="p")
    with pytest.raises(TypeError, match="multiple values for argument 'execution_order'"):
        LogUpload("log.txt", False, *EXPERIMENT.values(), 7)
