"""Where an experiment is, as AIToolbox's callbacks are told: in order or by name, beside their own arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainloop.compat.aitoolbox.callbacks import AbstractExperimentCallback
from trainloop.compat.aitoolbox.components import append_concat_predictions, keep_list_transf
from trainloop.compat.aitoolbox.experiments import (
    ModelLoadContinueTraining,
    TrainLoopCheckpoint,
    TrainLoopCheckpointEndSave,
    TrainLoopEndSave,
)
from trainloop.compat.aitoolbox.reports import (
    GradDistributionPlot,
    LogUpload,
    ModelTrainHistoryPlot,
    TensorboardFullTracking,
)
from trainloop.compat.aitoolbox.results import ClassificationResultPackage
from trainloop.model import TTBasicModel


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.fc(x)


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


FIRST = {"project_name": "p", "experiment_name": "e", "local_model_result_folder_path": "f", "hyperparams": {"lr": 1}}
CLOUD = {"cloud_save_mode": None, "bucket_name": "b", "cloud_dir_prefix": "d", "source_dirs": ("s",)}
KEPT = {"rm_subopt_local_models": "val_loss", "num_best_checkpoints_kept": 3, "iteration_save_freq": 5}


@pytest.mark.parametrize(
    ("kind", "packages", "kept"),
    [(TrainLoopCheckpoint, False, KEPT), (TrainLoopEndSave, True, {}), (TrainLoopCheckpointEndSave, True, KEPT)],
)
def test_a_loops_experiment_is_given_by_place_or_by_name(kind: type[Any], packages: bool, kept: dict[str, Any]) -> None:
    chosen = {"val_result_package": ClassificationResultPackage(), "test_result_package": None} if packages else {}
    given = {**FIRST, **chosen, **CLOUD, **kept}
    model = Net()
    batches = [(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))]
    parts = model, batches, batches, None, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    by_place = kind(*parts, *given.values(), append_concat_predictions, keep_list_transf, 2, True)
    by_name = kind(*parts, **given, end_auto_eval=2, lazy_experiment_save=True)
    for loop in (by_place, by_name):
        own = {name: getattr(loop, name) for name in given if name != "num_best_checkpoints_kept"}
        assert own == {name: value for name, value in given.items() if name in own}
        assert (loop.auto_eval, loop.lazy_experiment_save) == (2, True)
        for callback in loop.callbacks_handler.callbacks_cache:
            assert {name: getattr(callback, name) for name in FIRST} == FIRST
            assert (callback.cloud_save_mode, callback.bucket_name, callback.cloud_dir_prefix) == (None, "b", "d")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'hyperparams'"):
        kind(*parts, "p", "e", "f")
    with pytest.raises(TypeError, match="multiple values for keyword argument 'project_name'"):
        kind(*parts, *given.values(), project_name="p")
