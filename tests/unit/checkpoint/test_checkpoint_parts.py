"""Checkpoints that leave out frozen parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import Distilled, distilled_loop, same
from torch import nn

from trainloop import checkpoint
from trainloop.callbacks import ModelCheckpoint
from trainloop.checkpoint.file import names_under
from trainloop.errors import CheckpointError, ConfigurationError


def keeper(folder: Path, exclude: Any = "teacher", **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, exclude=exclude, **options)


def test_a_part_stands_for_what_is_in_it() -> None:
    names = ["teacher.fc.weight", "teacher.fc.bias", "teachers.fc", "teacher"]
    assert names_under(names, ["teacher"]) == ["teacher.fc.weight", "teacher.fc.bias", "teacher"]
    assert names_under(names, ["teacher.fc.bias", "teachers"]) == ["teacher.fc.bias", "teachers.fc"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_resumed_run_ends_as_an_undisturbed_one(tmp_path: Path, async_save: bool) -> None:
    whole = distilled_loop()
    whole.fit(num_epochs=3)
    distilled_loop().fit(num_epochs=1, callbacks=[keeper(tmp_path, async_save=async_save)])
    (file, *_) = checkpoint.checkpoints(tmp_path)
    state = checkpoint.load(file.path)
    assert set(state["model"]) == {"student.weight", "student.bias"}
    assert Path(file.path).stat().st_size < 30_000
    again = distilled_loop(Distilled(seed=7))
    again.fit(num_epochs=3, callbacks=[keeper(tmp_path)], resume_from="last")
    assert same(again.model.state_dict(), whole.model.state_dict())


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    distilled_loop().fit(num_epochs=1, callbacks=[keeper(tmp_path)])
    other = distilled_loop(Distilled(teacher_seed=2))
    with pytest.raises(CheckpointError, match=r"does not contain teacher\.0\.weight, .* Before fit, load the values"):
        other.fit(num_epochs=2, callbacks=[keeper(tmp_path)], resume_from="last")
    assert other.global_step == 0
    smaller = Distilled()
    smaller.teacher = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match=r"does not contain teacher\.0\.weight"):
        distilled_loop(smaller).fit(num_epochs=2, callbacks=[keeper(tmp_path)], resume_from="last")


def test_what_is_missing_and_was_not_left_out_is_refused(tmp_path: Path) -> None:
    distilled_loop().fit(num_epochs=1, callbacks=[keeper(tmp_path, exclude=["teacher.0", "teacher.2"])])
    model = Distilled()
    model.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"more\.weight is missing in the checkpoint"):
        distilled_loop(model).fit(num_epochs=2, callbacks=[keeper(tmp_path)], resume_from="last")


def test_what_changes_in_training_can_not_be_left_out(tmp_path: Path) -> None:
    model = Distilled()
    model.teacher[1].train()  # frozen, but its statistics move
    with pytest.raises(CheckpointError, match=r"teacher\.1\.running_mean has changed in training.*eval\(\)"):
        distilled_loop(model).fit(num_epochs=1, callbacks=[keeper(tmp_path)])


def test_parts_that_are_trained_or_unknown_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"leaves out student\.weight, which is trained"):
        distilled_loop().fit(num_epochs=1, callbacks=[keeper(tmp_path, exclude=["teacher", "student"])])
    with pytest.raises(ConfigurationError, match=r"exclude='teach': the model has no such part.*: student, teacher,"):
        distilled_loop().fit(num_epochs=1, callbacks=[keeper(tmp_path, exclude="teach")])


def test_the_best_is_loaded_beside_what_is_there(tmp_path: Path) -> None:
    loop = distilled_loop()
    best = keeper(tmp_path, monitor="val_loss", safetensors=True)
    loop.fit(num_epochs=2, callbacks=[best])
    before = {name: value.clone() for name, value in loop.model.state_dict().items() if "teacher" in name}
    best.load_best()
    assert same({name: loop.model.state_dict()[name] for name in before}, before)
    other = Distilled(teacher_seed=3, seed=5)
    best.load_best(other)
    assert torch.equal(other.student.weight, loop.model.student.weight)
    weights = checkpoint.load_weights(next(tmp_path.glob("*.safetensors")))
    assert set(weights) == {"student.weight", "student.bias"}


def test_a_run_that_has_ended_is_taken_up(tmp_path: Path) -> None:
    first = distilled_loop()
    first.fit(num_epochs=1, callbacks=[keeper(tmp_path)])
    again = distilled_loop(Distilled(seed=7))
    again.fit(num_epochs=1, callbacks=[keeper(tmp_path)], resume_from="last")
    assert same(again.model.state_dict(), first.model.state_dict())
