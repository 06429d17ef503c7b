"""Callbacks that save into, and load from, an experiment's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from small_loop import STEPS_PER_EPOCH, Counts, make_loop
from trainloop.callbacks import (
    ModelCheckpoint,
    ModelLoadContinueTraining,
)
from trainloop.callbacks.tracking import Experiment, ExperimentCheckpoint, ExperimentEndSave
from trainloop.errors import CheckpointError, ConfigurationError

PROJECT = ("digits", "cnn")


def run_once(folder: Path) -> str:
    """Two epochs with a checkpoint every four steps; the experiment's time stamp."""
    loop = make_loop(seed=0, shuffle=True)
    loop.fit(num_epochs=2, callbacks=[ExperimentCheckpoint(Experiment(*PROJECT, folder), iteration_save_freq=4)])
    [experiment] = (folder / "digits").iterdir()
    return experiment.name.removeprefix("cnn_")


@pytest.mark.parametrize("epoch, step", [(None, 14), (0, 4), (1, 14)])
def test_continue_training(tmp_path: Path, epoch: int | None, step: int) -> None:
    stamp = run_once(tmp_path)
    whole = make_loop(seed=0, shuffle=True)
    whole.fit(num_epochs=3)
    loop = make_loop(seed=0, shuffle=True)
    load = ModelLoadContinueTraining(stamp, "checkpoints", epoch, *PROJECT, tmp_path)
    begun: list[int] = []
    loop.fit(num_epochs=3, callbacks=[load, *watch(begun)])
    assert begun[0] == step
    assert loop.global_step == 3 * STEPS_PER_EPOCH
    assert torch.equal(loop.model.fc.weight, whole.model.fc.weight)
    loop.fit(num_epochs=1, callbacks=[load])
    assert loop.global_step == 4 * STEPS_PER_EPOCH  # and not from the checkpoint again


def watch(begun: list[int]) -> list[Any]:
    from trainloop.callbacks import FunctionOnTrainLoop

    return [FunctionOnTrainLoop(lambda loop: begun.append(loop.global_step), batch_begin=True)]


def test_nothing_to_continue_from(tmp_path: Path) -> None:
    stamp = run_once(tmp_path)
    for load, words in (
        (ModelLoadContinueTraining(stamp, "checkpoints", 7, *PROJECT, tmp_path), "no checkpoint of epoch_num=7 in"),
        (ModelLoadContinueTraining("1999", "checkpoints", None, *PROJECT, tmp_path), "no checkpoint in "),
    ):
        loop = make_loop()
        with pytest.raises(CheckpointError) as error:
            loop.fit(num_epochs=1, callbacks=[load])
        assert words in str(error.value)
        assert loop.global_step == 0
    with pytest.raises(CheckpointError, match="epochs with a checkpoint: 0, 1"):
        make_loop().fit(
            num_epochs=1, callbacks=[ModelLoadContinueTraining(stamp, "checkpoints", 7, *PROJECT, tmp_path)]
        )
    with pytest.raises(ConfigurationError, match="ModelLoadContinueTraining has no project_name"):
        make_loop().fit(num_epochs=1, callbacks=[ModelLoadContinueTraining(stamp)])


def test_end_save(tmp_path: Path) -> None:
    end = ExperimentEndSave(Experiment(*PROJECT, tmp_path, {"lr": 0.1}, ()), Counts(), None)
    make_loop().fit(num_epochs=1, callbacks=[end])
    [experiment] = (tmp_path / "digits").iterdir()
    assert (experiment / "model.pt").exists()
    assert "rows" in (experiment / "results" / "report.txt").read_text()
    assert end.results["validation"]["rows"] == 33.0


def test_the_name_is_the_package_s_own() -> None:
    from trainloop.callbacks import ModelCheckpoint as public

    assert ModelCheckpoint is public
