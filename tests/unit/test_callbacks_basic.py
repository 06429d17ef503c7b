"""Small callbacks, and which names there are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

import trainloop.callbacks
from conftest import make_data
from small_loop import STEPS_PER_EPOCH, Net, make_loop
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import (
    AllPredictionsSame,
    DataSubsetTestRun,
    EarlyStopping,
    FunctionOnTrainLoop,
    InMultiProcessDataLoad,
    ListRegisteredCallbacks,
)
from trainloop.callbacks.monitor import Monitor
from trainloop.errors import ConfigurationError


def test_list_registered_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    make_loop().fit(num_epochs=1, callbacks=[EarlyStopping(), ListRegisteredCallbacks(), AbstractCallback("mine", -5)])
    assert "Callbacks: mine, ListRegisteredCallbacks, EarlyStopping" in capsys.readouterr().out


class AlwaysTwo(Net):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return torch.full((len(x),), 2), y, {}


class ScoresOf(Net):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return torch.ones(len(x), 3), y, {}


@pytest.mark.usefixtures("events_on_stdout")
@pytest.mark.parametrize(
    "model, arguments, epochs",
    [
        (AlwaysTwo, {"value": 2, "stop_training": True}, 1),
        (AlwaysTwo, {"value": None, "stop_training": True}, 1),
        (AlwaysTwo, {"value": 1, "stop_training": True}, 3),
        (AlwaysTwo, {"value": 2}, 3),
        (Net, {"value": None, "stop_training": True}, 3),
        (ScoresOf, {"value": 1, "stop_training": True}, 1),
        (ScoresOf, {"value": None, "stop_training": True}, 1),
    ],
)
def test_all_predictions_same(model: Any, arguments: Any, epochs: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    loop = make_loop(model())
    loop.fit(num_epochs=3, callbacks=[AllPredictionsSame(**arguments)])
    assert loop.epoch == epochs
    said = "All 33 predictions are" in capsys.readouterr().out
    assert said == (epochs == 1 or not arguments.get("stop_training", False))


def test_all_predictions_same_needs_a_validation_loader() -> None:
    with pytest.raises(ConfigurationError, match="AllPredictionsSame: the loop has no validation_loader"):
        make_loop(validation=False).fit(num_epochs=1, callbacks=[AllPredictionsSame()])


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
        (lambda: DataSubsetTestRun(0), "DataSubsetTestRun: all three numbers are 0"),
        (lambda: DataSubsetTestRun(1, -1), "num_val_batches=-1"),
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[DataSubsetTestRun(1, num_test_batches=2)]),
            "DataSubsetTestRun takes 2 batches of test_loader: the loop has no test_loader. Pass one to TrainLoop.",
        ),
        (
            lambda: FunctionOnTrainLoop(print),
            "FunctionOnTrainLoop: choose when to call the function",
        ),
        (lambda: FunctionOnTrainLoop("print", epoch_end=True), "fn_to_execute='print': must be a function"),  # type: ignore[arg-type]
        (
            lambda: InMultiProcessDataLoad("data"),
            "train_loader_build_fn='data': must be a function that returns a loader",
        ),  # type: ignore[arg-type]
        (lambda: InMultiProcessDataLoad(val_loader_build_fn=True), "val_loader_build_fn=True: must be a function"),
        (lambda: Monitor("loss", "up"), "Monitor: mode='up': must be 'auto', 'min' or 'max'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_cannot_work(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        make()
    assert words in str(error.value)


POINTS = {
    "tl_registration": 1,
    "train_begin": 1,
    "train_end": 1,
    "epoch_begin": 2,
    "epoch_end": 2,
    "batch_begin": 2 * STEPS_PER_EPOCH,
    "batch_end": 2 * STEPS_PER_EPOCH,
    "after_gradient_update": 8,
    "after_optimizer_step": 8,
}


@pytest.mark.parametrize("point, count", POINTS.items())
def test_function_on_train_loop(point: str, count: int) -> None:
    calls: list[Any] = []
    loop = make_loop()
    loop.fit(num_epochs=2, grad_accumulation=2, callbacks=[FunctionOnTrainLoop(calls.append, **{point: True})])
    assert len(calls) == count
    assert all(call is loop for call in calls)


def test_function_that_was_not_asked_for_costs_nothing() -> None:
    from trainloop.callbacks.base import HookTable

    table = HookTable([FunctionOnTrainLoop(print, epoch_end=True)])
    assert len(table.on_epoch_end) == 1
    assert table.on_batch_end == table.on_batch_begin == table.on_after_optimizer_step == ()


class MakesLoaders(InMultiProcessDataLoad):
    """As a subclass, with ``True``."""

    def build_train_dataloader(self) -> Any:
        return DataLoader(make_data(32), 16)


class Batches:
    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_loaders_that_are_made_in_the_rank() -> None:
    loop = make_loop()
    by_function = InMultiProcessDataLoad(
        val_loader_build_fn=lambda: Batches("v"), test_loader_build_fn=lambda: Batches("t")
    )
    by_function.register_train_loop_object(loop)
    MakesLoaders(train_loader_build_fn=True).register_train_loop_object(loop)
    by_function.on_multiprocess_start()
    assert (loop.validation_loader.name, loop.test_loader.name) == ("v", "t")
    assert len(loop.train_loader) == STEPS_PER_EPOCH
    made = MakesLoaders(train_loader_build_fn=True)
    made.register_train_loop_object(loop)
    made.on_multiprocess_start()
    assert len(loop.train_loader) == 2


MODULES = (
    "callbacks.basic callbacks.early_stopping callbacks.gradient callbacks.monitor "
    "callbacks.nan callbacks.performance_eval callbacks.tensorboard callbacks.trackers callbacks.train_schedule "
    "callbacks.weight_averages schedulers.warmup"
).split()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_documented_with_an_example(module: str) -> None:
    home = importlib.import_module(f"trainloop.{module}")
    for name in home.__all__:
        # Python 3.13 takes the indentation away.
        assert "Examples\n--------\n" in inspect.cleandoc(getattr(home, name).__doc__ or ""), name


def test_names_of_aitoolbox_say_what_replaces_them() -> None:
    for name in trainloop.callbacks._REMOVED:
        with pytest.raises(ImportError, match=rf"no {name} since 0\.2\.0\. .*import trainloop\.compat\.aitoolbox"):
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
