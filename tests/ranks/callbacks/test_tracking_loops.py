"""The three tracking loops: a TrainLoop each, with an experiment's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import Layers
from torch import nn, optim
from torch.utils.data import DataLoader

import trainloop
import trainloop.train_loop
from conftest import make_data
from trainloop import (
    AbstractCallback,
    TrainLoop,
    TrainLoopCheckpoint,
    TrainLoopCheckpointEndSave,
    TrainLoopEndSave,
)
from trainloop.errors import ConfigurationError


def hits(y_pred: Any, y_true: Any, metadata: Any) -> float:
    return float((y_pred.argmax(1) == y_true).double().mean())


def make(loop: type[TrainLoop], folder: Path, **arguments: Any) -> Any:
    torch.manual_seed(0)
    model = Layers(nn.Linear(8, 3))
    loader = DataLoader(make_data(), batch_size=16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    names = ("digits", "baseline", folder, {"lr": 0.1})
    arguments = {"accelerator": "cpu", "progress_bar": False, **arguments}
    return loop(model, loader, loader, loader, optimizer, nn.CrossEntropyLoss(), *names, **arguments)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}


def test_only_names_are_needed_in_addition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, loader = Layers(nn.Linear(8, 3)), DataLoader(make_data(), batch_size=16)
    arguments: dict[str, Any] = {"optimizer": optim.SGD(model.parameters(), lr=0.1), "criterion": nn.CrossEntropyLoss()}
    with pytest.raises(ConfigurationError, match="project_name=''"):
        TrainLoopCheckpoint(model, loader, **arguments)
    names = {"project_name": "digits", "experiment_name": "baseline"}
    TrainLoopCheckpoint(model, loader, **arguments, **names, progress_bar=False, accelerator="cpu").fit(num_epochs=1)
    assert [path.name for path in tmp_path.glob("digits/baseline_*/hyperparams.json")] == ["hyperparams.json"]


def test_checkpoints_and_resuming(tmp_path: Path) -> None:
    first = make(TrainLoopCheckpoint, tmp_path)
    first.fit(num_epochs=2)
    assert sum(name.startswith("checkpoint-") for name in files(tmp_path)) == 2
    assert {"hyperparams.json", "test_tracking_loops.py"} <= files(tmp_path)
    again = make(TrainLoopCheckpoint, tmp_path)
    again.fit(num_epochs=3, resume_from="last")
    whole = make(TrainLoopEndSave, tmp_path / "whole")
    whole.fit(num_epochs=3)
    assert torch.equal(again.model.layers[0].weight, whole.model.layers[0].weight)
    assert again.history["loss"] == whole.history["loss"]


class ResultsOfRank1(AbstractCallback):
    """Write the results that rank 1 has at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__("results of rank 1", execution_order=1002)
        self.path = path

    def on_train_end(self) -> None:
        if self.train_loop_obj.rank == 1:
            self.path.write_text(json.dumps(self.train_loop_obj.results))


@pytest.mark.long
def test_results_at_the_end_in_ddp(tmp_path: Path) -> None:
    loop = make(
        TrainLoopCheckpointEndSave,
        tmp_path,
        gpu_mode="ddp",
        devices=2,
        val_result_package=[hits],
        test_result_package={"hits": hits},
    )
    loop.fit(num_epochs=1, callbacks=[ResultsOfRank1(tmp_path / "rank 1")])
    y_pred, y_true, _ = loop.predict_on_test_set()
    assert loop.results == {
        "validation": {"hits": hits(y_pred, y_true, {})},
        "test": {"hits": hits(y_pred, y_true, {})},
    }
    assert json.loads((tmp_path / "rank 1").read_text()) == loop.results
    (report,) = tmp_path.rglob("report.json")
    assert json.loads(report.read_text())["results"] == loop.results
    assert "model.pt" in files(tmp_path)
    assert any(name.startswith("checkpoint-") for name in files(tmp_path))


def test_end_save_alone_writes_no_checkpoints(tmp_path: Path) -> None:
    loop = make(TrainLoopEndSave, tmp_path, test_result_package=[hits])
    loop.fit(num_epochs=1)
    assert set(loop.results) == {"test"}
    assert not any(name.startswith("checkpoint-") for name in files(tmp_path))
    assert (loop.project_name, loop.experiment_name, loop.hyperparams) == ("digits", "baseline", {"lr": 0.1})


def test_a_package_without_its_loader_is_refused(tmp_path: Path) -> None:
    loop = make(TrainLoopEndSave, tmp_path, val_result_package=[hits])
    loop.validation_loader = None
    with pytest.raises(ConfigurationError, match="no validation_loader"):
        loop.fit(num_epochs=1)


def test_old_imports_find_them() -> None:
    names: dict[str, Any] = {}
    exec("from trainloop.train_loop import *", names)
    for name in ("TrainLoop", "TrainLoopCheckpoint", "TrainLoopEndSave", "TrainLoopCheckpointEndSave"):
        assert names[name] is getattr(trainloop, name)
    with pytest.raises(AttributeError, match="TrainLoopCloud"):
        _ = trainloop.train_loop.TrainLoopCloud
