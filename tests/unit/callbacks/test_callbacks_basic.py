"""Small callbacks, and which names there are."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from kit.small_loop import STEPS_PER_EPOCH, Net, make_loop
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

import trainloop.callbacks
from conftest import make_data
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import (
    ConfusionMatrix,
    DataSubsetTestRun,
    Profiler,
    TensorBoard,
    TrainHistoryPlot,
)
from trainloop.callbacks.monitor import Monitor
from trainloop.errors import ConfigurationError


def test_data_subset() -> None:
    loop = make_loop(shuffle=True)
    whole = loop.train_loader
    loop.fit(num_epochs=2, callbacks=[DataSubsetTestRun(num_train_batches=3, num_val_batches=1)])
    assert loop.global_step == 6
    assert len(loop.predict_on_validation_set()[0]) == 16
    assert len(whole) == STEPS_PER_EPOCH  # the loader itself is as it was
    assert len(loop.train_loader) == 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data())


def test_data_subset_of_a_stream() -> None:
    model = Net()
    loader = DataLoader(Stream(), 16)
    loop = TrainLoop(
        model, loader, None, None, optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), progress_bar=False
    )
    loop.fit(num_epochs=2, callbacks=[DataSubsetTestRun(2)])
    assert loop.global_step == 4


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[DataSubsetTestRun(1, num_test_batches=2)]),
            "DataSubsetTestRun takes 2 batches of test_loader: the loop has no test_loader. Pass one to TrainLoop.",
        ),
        (lambda: Monitor("loss", "up"), "Monitor: mode='up': must be 'auto', 'min' or 'max'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_cannot_work(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


class MakesLoaders(AbstractCallback):
    def on_multiprocess_start(self) -> None:
        self.train_loop_obj.train_loader = DataLoader(make_data(32), 16)


def test_any_callback_may_make_the_loaders_in_the_rank() -> None:
    loop = make_loop()
    loop.train_loader = None
    loop.fit(num_epochs=1, in_process_data_load=MakesLoaders())
    assert loop.global_step == 2


MODULES = (
    "callbacks.basic callbacks.early_stopping callbacks.monitor callbacks.weights.gradient "
    "callbacks.weights.train_schedule callbacks.weights.weight_averages callbacks.watch.nan "
    "callbacks.reports.performance_eval callbacks.reports.tensorboard callbacks.reports.trackers schedulers.warmup"
).split()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_documented_with_an_example(module: str) -> None:
    home = importlib.import_module(f"trainloop.{module}")
    for name in home.__all__:
        # Python 3.13 takes the indentation away.
        assert "Examples\n--------\n" in inspect.cleandoc(getattr(home, name).__doc__ or ""), name


def test_names_of_aitoolbox_say_what_replaces_them() -> None:
    for name in trainloop.callbacks._REMOVED:
        with pytest.raises(ImportError, match=rf"has no {name}\. .*\. See the page \"From AIToolbox\""):
            getattr(trainloop.callbacks, name)


def test_every_exported_name_is_there() -> None:
    for name in trainloop.callbacks.__all__:
        assert isinstance(getattr(trainloop.callbacks, name), type), name
    contract = {
        "EarlyStopping", "TerminateOnNaN", "ModelCheckpoint", "TensorBoard", "ModelPerformanceEvaluation",
        "GradientClipping", "GradientStats", "TimeLimit", "LRScheduler",
    }  # fmt: skip
    assert contract <= set(trainloop.callbacks.__all__)


def test_only_the_validation_is_shortened() -> None:
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[DataSubsetTestRun(num_train_batches=0, num_val_batches=1)])
    assert loop.global_step == 7
    assert len(loop.predict_on_validation_set()[0]) == 16


# -- files -------------------------------------------------------------------------------------------------------------


class GoTo(AbstractCallback):
    """Changes the current folder, as some launchers and scripts do."""

    def __init__(self, folder: Path) -> None:
        super().__init__("go to", execution_order=-1000)
        self.folder = folder

    def on_epoch_begin(self) -> None:
        os.chdir(self.folder)


@pytest.mark.long
def test_relative_paths_are_those_of_the_folder_in_which_a_callback_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_leave: Any
) -> None:
    pytest.importorskip("matplotlib.font_manager")  # which lists the fonts in HOME, and would do it again in another
    may_leave(".ttf")  # matplotlib keeps fonts open
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    writers = [TensorBoard("board"), TrainHistoryPlot("plot.png"), ConfusionMatrix(path="~/matrix.png")]
    loop = make_loop()
    loop.fit(num_epochs=1, callbacks=[GoTo(tmp_path / "elsewhere"), *writers, Profiler("profile", skip=0, active=1)])
    names = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"board", "plot.png", "home", "profile"}


@pytest.mark.parametrize("make", [TrainHistoryPlot, lambda path: ConfusionMatrix(path=path)], ids=["plot", "matrix"])
def test_a_figure_that_can_not_be_written_is_refused_or_warned_of(make: Any, tmp_path: Path, may_leave: Any) -> None:
    pytest.importorskip("matplotlib")
    may_leave(".ttf")  # matplotlib keeps fonts open
    (tmp_path / "file").write_text("")
    for name, why in (("a.xyz", "no format 'xyz'"), ("file/a.png", "file is a file"), (".", "is a folder")):
        with pytest.raises(ConfigurationError, match=why):
            make_loop().fit(num_epochs=1, callbacks=[make(tmp_path / name)])

    class Block(AbstractCallback):
        def on_epoch_begin(self) -> None:
            (tmp_path / "later").write_text("")

    loop = make_loop()
    with pytest.warns(RuntimeWarning, match=r"later/a.png could not be written .* Training continues"):
        loop.fit(num_epochs=2, callbacks=[Block("block"), make(tmp_path / "later" / "a.png")])
    assert loop.epoch == 2
