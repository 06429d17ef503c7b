"""ModelCheckpoint: when it writes, what it keeps, what it does when it can't. The loop is a stand-in."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import StandIn, resumed, steps, written
from kit.small_loop import make_loop
from torch import nn

from trainloop import AbstractCallback, checkpoint, distributed
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint
from trainloop.checkpoint import storage
from trainloop.checkpoint.export import export
from trainloop.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*by its name, (lower|higher) is better")

# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, [(0, 5, "epoch"), (1, 10, "epoch"), (2, 15, "epoch")]),
        ({"every_n_epochs": 2}, [(1, 10, "epoch"), (2, 15, "end")]),
        (
            {"every_n_epochs": None, "every_n_steps": 4},
            [(0, 4, "steps"), (1, 8, "steps"), (2, 12, "steps"), (2, 15, "end")],
        ),
        (
            {"every_n_steps": 7},
            [(0, 5, "epoch"), (1, 7, "steps"), (1, 10, "epoch"), (2, 14, "steps"), (2, 15, "epoch")],
        ),
        ({"every_n_epochs": None}, [(2, 15, "end")]),
        ({"every_n_epochs": None, "monitor": "val_loss"}, [(0, 5, "improved"), (2, 15, "improved")]),
        (
            {"every_n_epochs": 2, "monitor": "val_loss", "mode": "max"},
            [(0, 5, "improved"), (1, 10, "epoch"), (2, 15, "end")],
        ),
    ],
    ids=str,
)
def test_when_checkpoints_are_written(tmp_path: Path, arguments: Any, expected: Any) -> None:
    StandIn(ModelCheckpoint(tmp_path, keep=None, **arguments)).run(3, values=[0.5, 0.6, 0.4])
    assert written(tmp_path) == expected


def test_the_last_step_of_an_epoch_is_written_again_with_the_epochs_history(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_steps=5)
    StandIn(keeper).run(1, values=[0.5])
    assert written(tmp_path) == [(0, 5, "epoch")]  # the same name: one file
    assert checkpoint.load(keeper.last_path or "")["history"]["values"] == {"val_loss": [0.5]}


def test_a_step_that_amp_skipped_is_not_written_twice(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=2)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    for _ in range(2):
        loop.step()
    keeper.save_due()
    assert loop.states == 1


def test_an_endless_interval_writes_at_the_end_only(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_minutes=float("inf"), keep=None)
    make_loop().fit(num_epochs=1, callbacks=[keeper])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s, a checkpoint a minute: written at the first step past each minute; the clock asked now and then."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = []
    monkeypatch.setattr(distributed, "exchange_ints", lambda values: asked.append(values) or [values])
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_minutes=1, keep=None)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    for _ in range(100):
        now[0] += 2.0
        loop.step()
    assert steps(tmp_path) == [30, 60, 90]
    # Steps take 20 ms from now on, 3,000 a minute: asked some twenty times, not 3,000.
    asked.clear()
    for _ in range(6000):
        now[0] += 0.02
        loop.step()
    assert 1 <= len(steps(tmp_path)) - 3 <= 2
    assert len(asked) < 60


def test_an_evaluation_every_n_epochs_judges_only_then(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss", keep=None)
    loop = StandIn(keeper)
    loop.end_auto_eval = 2
    keeper.on_train_begin()
    for values in ({}, {"val_loss": 0.5}, {}, {"val_loss": 0.4}):
        loop.run_epoch(**values)
    assert [c.info.value for c in checkpoint.checkpoints(tmp_path) if c.info] == [None, 0.5, None, 0.4]


def test_a_metric_that_does_not_come_is_told(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="accuracy")
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint: monitor='accuracy' is not in the history"):
        StandIn(keeper).run(1, values=[0.5])


# -- what stays --------------------------------------------------------------------------------------------------------


def test_keep_the_newest(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=2)
    StandIn(keeper).run(5)
    assert steps(tmp_path) == [20, 25]
    assert keeper.last_path == str(tmp_path / "checkpoint-epoch=0005-step=00000025.pt")
    assert keeper.best_path is None


def test_keep_the_best_and_the_newest(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=2, monitor="val_loss")
    StandIn(keeper).run(6, values=[0.5, 0.2, float("nan"), 0.3, 0.9, 0.8])
    assert steps(tmp_path) == [10, 20, 30]
    assert keeper.best_path == str(tmp_path / "checkpoint-epoch=0002-step=00000010.pt")
    assert keeper.best_value == 0.2
    assert keeper.last_path == str(tmp_path / "checkpoint-epoch=0006-step=00000030.pt")


def test_mode_max(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=1, monitor="accuracy", mode="max")
    StandIn(keeper).run(4, values=[0.5, 0.7, 0.6, 0.7], name="accuracy")
    assert steps(tmp_path) == [10, 20]
    assert keeper.best_path == str(tmp_path / "checkpoint-epoch=0002-step=00000010.pt")


def test_steps_fill_places_until_there_are_judged_ones(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=2, monitor="val_loss", every_n_steps=2)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    for _ in range(6):
        loop.step()
    assert steps(tmp_path) == [4, 6]
    loop.run_epoch(3, val_loss=1.0)
    assert steps(tmp_path) == [8, 9]
    for _ in range(3):
        loop.step()
    assert steps(tmp_path) == [9, 12]


def test_others_files_are_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    """Files of an earlier run, of the user, and one that only looks like a checkpoint."""
    StandIn(ModelCheckpoint(tmp_path, keep=1)).run(2)
    (tmp_path / "checkpoint-epoch=0001-step=00000005.pt").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.startswith(".")}
    keeper = ModelCheckpoint(tmp_path, keep=1)
    StandIn(keeper).run(3)
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert {name: after.get(name) for name in before} == before
    assert set(after) - set(before) == {"checkpoint-epoch=0003-step=00000015.pt"}


class Sharded(StandIn):
    gpu_mode, timeout = "fsdp", 5.0

    def checkpoint_state(self, keep_shards: bool = False) -> dict[str, Any]:
        return super().checkpoint_state()


def test_a_folder_replaces_another_only_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step's checkpoint is written again at the end of the epoch, and the user has put a file into it."""

    def fails(*paths: Any) -> None:
        raise OSError(errno.EIO, "no")

    keeper = ModelCheckpoint(tmp_path, keep=1, every_n_steps=5)
    loop = Sharded(keeper)
    keeper.on_train_begin()
    for _ in range(5):
        loop.step()
    assert keeper.last_path is not None
    (note := Path(keeper.last_path) / "notes.txt").write_text("mine")
    monkeypatch.setattr(os, "rename", fails)
    with pytest.warns(RuntimeWarning, match="could not be written"):
        keeper.on_epoch_end()
    monkeypatch.undo()
    assert written(tmp_path) == [(0, 5, "steps")]
    keeper.on_epoch_end()
    assert written(tmp_path) == [(0, 5, "epoch")]
    assert note.read_text() == "mine"


def test_a_folder_that_somebody_has_deleted_does_not_stop_the_others(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=2, every_n_epochs=None, every_n_steps=1)
    loop = Sharded(keeper)
    keeper.on_train_begin()
    for _ in range(2):
        loop.step()
    shutil.rmtree(tmp_path)
    for _ in range(3):
        loop.step()
    assert steps(tmp_path) == [4, 5]
    assert str(keeper.last_path).endswith("step=00000005")


def test_weights_that_are_left_of_another_run_stay(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    weights = tmp_path / "checkpoint-epoch=0001-step=00000005.safetensors"
    weights.write_text("mine")
    StandIn(ModelCheckpoint(tmp_path, safetensors=True)).run(1)
    assert weights.read_text() == "mine"
    assert (tmp_path / "checkpoint-epoch=0001-step=00000005_2.safetensors").exists()


def test_a_broken_link_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "checkpoint-epoch=0001-step=00000005.pt"
    link.symlink_to(tmp_path / "gone")
    StandIn(ModelCheckpoint(tmp_path)).run(1)
    assert link.is_symlink()
    assert steps(tmp_path) == [5]


def test_a_name_in_use_by_another_run_gets_a_version(tmp_path: Path) -> None:
    StandIn(ModelCheckpoint(tmp_path)).run(1)
    second, third = ModelCheckpoint(tmp_path), ModelCheckpoint(tmp_path)
    StandIn(second).run(1)
    StandIn(third).run(1)
    assert second.last_path == str(tmp_path / "checkpoint-epoch=0001-step=00000005_2.pt")
    assert third.last_path == str(tmp_path / "checkpoint-epoch=0001-step=00000005_3.pt")


def test_newer_than_all_before_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn(ModelCheckpoint(tmp_path)).run(2)
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    StandIn(ModelCheckpoint(tmp_path)).run(1, steps=3)
    assert steps(tmp_path) == [5, 10, 3]
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found[1]["place"]["step"] == 3


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_none_yet(tmp_path: Path) -> None:
    assert ModelCheckpoint(tmp_path / "new").last_state() is None


def test_a_resumed_run_owns_what_it_wrote_before(tmp_path: Path) -> None:
    StandIn(ModelCheckpoint(tmp_path)).run(1, steps=1)  # of another run: stays
    keeper = ModelCheckpoint(tmp_path, keep=2, monitor="val_loss")
    first = StandIn(keeper)
    keeper.on_train_begin()
    for value in (0.1, 0.5, 0.4):
        first.run_epoch(val_loss=value)
    assert steps(tmp_path) == [1, 5, 15]
    again = ModelCheckpoint(tmp_path, keep=2, monitor="val_loss")
    loop = resumed(again)
    assert again.best_value == 0.1
    assert again.best_path == keeper.best_path == str(tmp_path / "checkpoint-epoch=0001-step=00000005.pt")
    loop.run_epoch(val_loss=0.3)
    assert steps(tmp_path) == [1, 5, 20]
    assert again.best_path == keeper.best_path


def test_a_branch_from_an_older_checkpoint_owns_nothing_of_the_run_it_left(tmp_path: Path) -> None:
    StandIn(ModelCheckpoint(tmp_path, keep=None)).run(4)
    state = checkpoint.load(tmp_path / "checkpoint-epoch=0002-step=00000010.pt")
    branch = ModelCheckpoint(tmp_path, keep=1)
    loop = StandIn(branch)
    branch.on_train_begin()
    branch.load_state_dict(state["callbacks"][0])
    loop.epoch, loop.global_step = 2, 10
    for _ in range(3):
        loop.run_epoch()
    assert steps(tmp_path) == [5, 10, 15, 20, 25]
    assert branch.last_path == str(tmp_path / "checkpoint-epoch=0005-step=00000025.pt")
    # Resumed in turn, the branch owns its own.
    again = ModelCheckpoint(tmp_path, keep=1)
    resumed(again).run_epoch()
    assert steps(tmp_path) == [5, 10, 15, 20, 30]


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_leftovers_of_a_kill_go_with_the_next_checkpoint(monitor: str | None, tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor=monitor)
    first = StandIn(keeper)
    keeper.on_train_begin()
    first.run_epoch(val_loss=0.5)
    mine = tmp_path / f".checkpoint-epoch=0002-step=00000007.pt.{keeper._checkpoints.run}.0123abcd.tmp"
    others = tmp_path / ".checkpoint-epoch=0002-step=00000007.pt.another.0123abcd.tmp"
    mine.touch()
    others.touch()
    resumed(ModelCheckpoint(tmp_path, monitor=monitor)).run_epoch(val_loss=0.4)
    assert not mine.exists()
    assert others.exists()


@pytest.mark.parametrize("where", ["another folder", "an older checkpoint"])
def test_a_resume_that_leaves_the_best_checkpoint_behind_warns(where: str, tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, keep=None, monitor="val_loss")
    first = StandIn(keeper)
    keeper.on_train_begin()
    for value in (0.1, 0.5, 0.4):
        first.run_epoch(val_loss=value)
    newest = where == "another folder"
    path = keeper.last_path if newest else tmp_path / "checkpoint-epoch=0002-step=00000010.pt"
    branch = ModelCheckpoint(tmp_path / "new" if newest else tmp_path, monitor="val_loss")
    StandIn(branch)
    branch.on_train_begin()
    with pytest.warns(UserWarning, match=r"count only .* The best one before had val_loss = 0.1: .*epoch=0001"):
        branch.load_state_dict(checkpoint.load(path)["callbacks"][0])
    assert branch.best_path is None


def test_a_finished_run_resumed_writes_nothing_new(tmp_path: Path) -> None:
    StandIn(ModelCheckpoint(tmp_path)).run(2)
    keeper = ModelCheckpoint(tmp_path)
    loop = resumed(keeper)
    keeper.on_train_end()
    assert loop.states == 0
    assert steps(tmp_path) == [5, 10]
    assert keeper.last_path == str(tmp_path / "checkpoint-epoch=0002-step=00000010.pt")


def test_another_monitor_begins_anew(tmp_path: Path) -> None:
    StandIn(ModelCheckpoint(tmp_path, monitor="val_loss")).run(2, values=[0.5, 0.4])
    for monitor in (None, "accuracy"):
        keeper = ModelCheckpoint(tmp_path, monitor=monitor)
        resumed(keeper)
        assert keeper.best_value is None


def test_load_best(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss", async_save=True)
    loop = StandIn(keeper).run(3, values=[0.5, 0.1, 0.2])
    state = keeper.load_best()
    assert state["place"] == {"epoch": 1, "step": 10}
    assert loop.model.weight.eq(10).all()
    other = nn.Linear(4, 4, bias=False)
    keeper.load_best(other)
    assert other.weight.eq(10).all()
    for wrong in (nn.Linear(4, 4), nn.Linear(4, 3, bias=False)):
        with pytest.raises(CheckpointError, match=r"(?s)does not fit the model.*checkpoint.load\(path\)\['model'\]"):
            keeper.load_best(wrong)


def test_load_best_without_a_metric_is_told(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path)
    StandIn(keeper).run(1)
    with pytest.raises(CheckpointError, match=r"ranked by monitor=None. Pass monitor to ModelCheckpoint, and train"):
        keeper.load_best()


def test_load_best_where_every_value_is_nan_says_so(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss")
    loop = StandIn(keeper)
    loop.run(2, values=[math.nan, math.nan])
    with pytest.raises(CheckpointError, match=r"by monitor='val_loss'\. .* value was NaN, add TerminateOnNaN"):
        keeper.load_best()


@pytest.mark.parametrize(
    "monitor, mode, place", [("val_loss", "auto", 10), ("accuracy", "auto", 5), ("mine", "min", 10), ("mine", "max", 5)]
)
def test_the_best_is_found_from_the_folder_alone(tmp_path: Path, monitor: str, mode: Any, place: int) -> None:
    StandIn(ModelCheckpoint(tmp_path, monitor=monitor, mode=mode)).run(3, name=monitor, values=[0.5, 0.1, 0.2])
    found = checkpoint.best(tmp_path)
    assert found.info is not None
    assert (found.info.step, found.info.monitor) == (place, monitor)
    assert checkpoint.load(found)["place"]["epoch"] + 1 == place // 5
    for other in (ModelCheckpoint(tmp_path, monitor=monitor), ModelCheckpoint(tmp_path)):
        model = nn.Linear(4, 4, bias=False)
        other.load_best(model)
        assert model.weight.eq(place).all()
        assert other.best_path is None  # a training with this callback would begin anew


def test_the_best_of_the_newest_run_with_the_metric(tmp_path: Path) -> None:
    for values in ([0.1, 0.2], [0.5, 0.4, math.nan]):
        StandIn(ModelCheckpoint(tmp_path, monitor="val_loss")).run(len(values), values=values)
    StandIn(ModelCheckpoint(tmp_path, monitor="accuracy")).run(1, name="accuracy", values=[0.9])
    with pytest.warns(UserWarning, match=r"checkpoints of 2 runs. The best one .*\(val_loss = 0.4\)") as warned:
        found = checkpoint.best(tmp_path, "val_loss")
    assert found.info is not None
    assert found.info.value == 0.4
    (other,) = [one for one in checkpoint.checkpoints(tmp_path) if one.info and one.info.value == 0.1]
    assert f"oldest run first:\n  {other.path} (0.1)\n" in str(warned[0].message)
    with pytest.raises(CheckpointError, match=r"ranked by 'accuracy', 'val_loss'.*Pass one of these names as monitor"):
        checkpoint.best(tmp_path)
    with pytest.raises(CheckpointError, match=r"no single best checkpoint by monitor='val_los'"):
        checkpoint.best(tmp_path, "val_los")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"None was ranked"):
        ModelCheckpoint(tmp_path / "empty").load_best(nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match=r"belongs to no loop. Pass the model"):
        ModelCheckpoint(tmp_path, monitor="val_loss").load_best()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "chekpoints"
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.best(folder),
        lambda: checkpoint.best("memory://chekpoints"),
        lambda: ModelCheckpoint(folder).load_best(nn.Linear(4, 4)),
        lambda: checkpoint.load(folder),
        lambda: export(folder, tmp_path / "weights.safetensors"),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"chekpoints: no such (file or )?folder"):
            call()
    keeper = ModelCheckpoint(tmp_path / "gone", monitor="val_loss")
    StandIn(keeper).run(1, values=[math.nan])
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="gone: no such folder"):
        keeper.load_best()
    (tmp_path / "a_file").write_text("")
    with pytest.raises(CheckpointError, match="a_file: no such folder"):
        ModelCheckpoint(tmp_path / "a_file", monitor="val_loss").load_best(nn.Linear(4, 4))


@pytest.mark.parametrize("name", ["best.pt", "kept/best.pth", Path("model.safetensors"), "s3://bucket/best.ckpt"])
def test_a_file_s_name_is_told_from_a_folder(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a folder, but .* name of a file.*load_best.*Pass, for"):
        ModelCheckpoint(name)


def test_a_folder_that_is_named_like_a_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "run.pt").mkdir()
    StandIn(ModelCheckpoint(tmp_path / "run.pt")).run(1)
    assert steps(tmp_path / "run.pt") == [5]


# -- at a signal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [False, True])
def test_save_now_is_on_the_disk_when_it_returns(tmp_path: Path, async_save: bool) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, async_save=async_save)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    loop.step()
    keeper.save_now("SIGTERM")
    assert written(tmp_path) == [(0, 1, "SIGTERM")]
    keeper.save_now("SIGTERM")
    assert loop.states == 1  # the same state: nothing to do
    loop.step()
    keeper.save_now("SIGTERM")
    assert steps(tmp_path) == [1, 2]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_write_that_failed_is_tried_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ModelCheckpoint(tmp_path)
    loop = StandIn(keeper)
    keeper.on_train_begin()

    def fails(*_: Any) -> None:
        raise RuntimeError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", fails)
        with pytest.warns(
            RuntimeWarning, match=r"could not be written .*RuntimeError: the store is away.*checkpoint: none yet"
        ):
            loop.run_epoch()
    keeper.on_train_end()
    assert written(tmp_path) == [(0, 5, "end")]


@pytest.mark.filterwarnings("ignore:the checkpoint of step")
@pytest.mark.parametrize("every_n_epochs", [None, 1])
@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_is_one_that_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool, every_n_epochs: int | None
) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="val_loss", async_save=async_save, every_n_epochs=every_n_epochs)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    save = checkpoint.save

    def full(*args: Any) -> None:
        if loop.history["val_loss"][-1] in (0.6, 0.3):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args)

    monkeypatch.setattr(checkpoint, "save", full)
    loop.run_epoch(val_loss=0.6)
    with pytest.raises(CheckpointError, match=r"ranked by monitor='val_loss'\. .* writing failed, free space"):
        keeper.load_best()
    assert (keeper.best_path, keeper.best_value) == (None, None)
    best = []
    for value in (0.7, 0.3, 0.5, 0.55):
        loop.run_epoch(val_loss=value)
        assert keeper.load_best()["place"]["epoch"] + 1 == int(Path(keeper.best_path or "").name[17:21])
        best.append((keeper.best_value, Path(keeper.best_path or "").name[17:21]))
    assert best == [(0.7, "0002"), (0.7, "0002"), (0.5, "0004"), (0.5, "0004")]


def test_a_state_that_is_not_plain_ends_training(tmp_path: Path) -> None:
    for async_save in (False, True):
        keeper = ModelCheckpoint(tmp_path, async_save=async_save)
        loop = StandIn(keeper)
        loop.checkpoint_state = lambda: {"model": {}, "callbacks": [{"f": print}]}  # type: ignore[method-assign]
        keeper.on_train_begin()
        with pytest.raises(CheckpointError, match=r"state\['callbacks'\]\[0\]\['f'\] is a builtins"):
            loop.run_epoch()


def test_a_file_in_the_folders_place_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/run' can't be written to: .*/file is a file"):
        StandIn(ModelCheckpoint(tmp_path / "file" / "run"))


def test_a_folder_without_permission_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write everywhere
    monkeypatch.setattr(storage, "_new_locked", refuse)
    for name in ("run", "run/of/today", "."):
        with pytest.raises(ConfigurationError, match=r"no permission to write in .*Choose another folder"):
            StandIn(ModelCheckpoint(tmp_path / name))


def test_an_error_about_a_folder_names_no_internal_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ConfigurationError) as caught:
        StandIn(ModelCheckpoint(tmp_path / "run"))
    assert f"Read-only file system in {tmp_path}. Choose another folder" in str(caught.value)
    assert "probe" not in str(caught.value)


@pytest.mark.parametrize("bad", ["/proc/nothere", "/proc", "link/run", "x" * 300, "null\0"], ids=repr)
def test_a_folder_that_can_not_be_is_told_before_training(tmp_path: Path, bad: str) -> None:
    """Whatever the permissions say; by the real loop, before its first step."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"can't be written to: .*Choose another folder"):
        loop.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path / bad)])
    assert loop.global_step == 0


def test_looking_for_permission_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").mkdir()
    for name in ("new/run", "old"):
        StandIn(ModelCheckpoint(tmp_path / name))
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "_new_locked", full)
    StandIn(ModelCheckpoint(tmp_path / "old"))  # files may be deleted until the first checkpoint is due


def test_safetensors_without_its_package_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        ConfigurationError, match=r"safetensors=True needs safetensors: pip install '\.\[safetensors\]'"
    ):
        ModelCheckpoint(tmp_path, safetensors=True)


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_in_memory_by_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    try:
        keeper = ModelCheckpoint("memory://test-callback/run", keep=2, monitor="val_loss")
        StandIn(keeper).run(4, values=[0.1, 0.4, 0.3, 0.2])
        assert keeper.best_path == "memory://test-callback/run/checkpoint-epoch=0001-step=00000005.pt"
        again = ModelCheckpoint("memory://test-callback/run", keep=2, monitor="val_loss")
        resumed(again).run_epoch(val_loss=0.5)
        assert again.last_path == "memory://test-callback/run/checkpoint-epoch=0005-step=00000025.pt"
        assert len(checkpoint.checkpoints("memory://test-callback/run")) == 3
    finally:
        fsspec.filesystem("memory").rm("/test-callback", recursive=True)


def test_weights_beside_in_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    StandIn(ModelCheckpoint(tmp_path, keep=1, safetensors=True)).run(3)
    stem = "checkpoint-epoch=0003-step=00000015"
    assert sorted(os.listdir(tmp_path)) == [".newest", f"{stem}.pt", f"{stem}.safetensors"]
    assert checkpoint.load_weights(tmp_path / f"{stem}.safetensors")["weight"].eq(15).all()


class Unknown(AbstractCallback):
    """Moves a parameter that only the optimizer has, in each epoch."""

    def __init__(self, unknown: torch.Tensor) -> None:
        super().__init__("unknown")
        self.unknown = unknown

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        loop.insert_metric_result_into_history("score", float(loop.epoch))
        self.best = self.unknown.detach().clone() if loop.epoch == 0 else self.best

    def on_batch_end(self) -> None:
        with torch.no_grad():
            self.unknown += 1


def test_load_best_loads_the_parameters_that_only_the_optimizer_has(tmp_path: Path) -> None:
    tl = make_loop()
    unknown = nn.Parameter(torch.zeros(2))
    tl.optimizer.add_param_group({"params": [unknown]})
    moves, keeper = Unknown(unknown), ModelCheckpoint(tmp_path, monitor="score", mode="min")
    tl.fit(num_epochs=2, callbacks=[moves, keeper])
    assert not torch.equal(unknown, moves.best)
    keeper.load_best()
    assert torch.equal(unknown, moves.best)
