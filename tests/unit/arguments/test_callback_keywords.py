"""Arguments of other libraries' callbacks: an error that says what they are called here."""

from __future__ import annotations

import copy
import inspect
import pickle
from abc import ABC, abstractmethod
from typing import Any

import cloudpickle
import pytest
from torch import nn

from trainloop import AbstractCallback, callbacks
from trainloop.callbacks import EarlyStopping, ModelCheckpoint, TensorBoard
from trainloop.errors import ConfigurationError


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("EarlyStopping", {"metric": "a"}, "EarlyStopping() got an unexpected keyword argument 'metric'. Did you mean "
         "monitor=?"),
        ("EarlyStopping", {"patiense": 3}, "Did you mean patience=?"),
        ("EarlyStopping", {"restore_best_weights": True}, "keeps the best weights; call its load_best() after fit"),
        ("EarlyStopping", {"stopping_threshold": 0.9}, "ThresholdEarlyStopping ends training at a value"),
        ("ModelCheckpoint", {"dirpath": "d", "save_top_k": 3}, "'save_top_k'. Did you mean keep=?"),
        ("ModelCheckpoint", {"filepath": "d"}, "Did you mean dirpath=?"),
        ("ModelCheckpoint", {"dirpath": "d", "save_last": True}, "'save_last': the newest checkpoint is always kept."),
        ("ModelCheckpoint", {"dirpath": "d", "every_n_train_steps": 5}, "Did you mean every_n_steps=?"),
        ("TensorBoard", {"save_dir": "d"}, "Did you mean log_dir=?"),
        ("ExponentialMovingAverage", {"beta": 0.9}, "Did you mean decay=?"),
        ("TimeLimit", {"duration": 5}, "Did you mean seconds=?"),
        ("ConfusionMatrix", {"labels": ["a"]}, "Did you mean class_names=?"),
        ("LearningRateMonitor", {"xyz": 1}, "'xyz'. Its arguments: every_n_steps."),
    ],
)  # fmt: skip
def test_names_of_other_libraries(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        getattr(callbacks, name)(**arguments)
    assert isinstance(error.value, TypeError)
    assert words in str(error.value)


def test_signatures_are_those_of_init() -> None:
    assert list(inspect.signature(EarlyStopping).parameters) == [
        "monitor",
        "min_delta",
        "patience",
        "mode",
        "every_n_steps",
    ]
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        if not issubclass(kind, AbstractCallback):
            continue
        of_init = inspect.signature(kind.__init__)
        assert list(inspect.signature(kind).parameters) == list(of_init.parameters)[1:], name


class Plain(AbstractCallback):
    pass


class Takes(AbstractCallback):
    def __init__(self, first: int, *, second: int = 0) -> None:
        super().__init__("takes")
        self.sum = first + second


class TakesAll(AbstractCallback):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__("takes all")
        self.kwargs = kwargs


class Named(AbstractCallback, ABC):
    @abstractmethod
    def name(self) -> str: ...


class WithModule(nn.Module, AbstractCallback):
    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        AbstractCallback.__init__(self, "with a module")
        self.fc = nn.Linear(width, 1)


def test_classes_of_users() -> None:
    assert Takes(1, second=2).sum == 3
    assert TakesAll(metric=1).kwargs == {"metric": 1}
    assert Plain("named", execution_order=3).execution_order == 3
    assert WithModule(width=3).fc.in_features == 3
    with pytest.raises(
        TypeError, match=r"Takes\(\) got an unexpected keyword argument 'secnd'\. Did you mean second=\?"
    ):
        Takes(1, secnd=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        Takes()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="abstract"):
        Named()  # type: ignore[abstract]


@pytest.mark.parametrize("made", [Takes(1), EarlyStopping(), TensorBoard("x"), ModelCheckpoint("x")], ids=repr)
def test_copies_need_no_arguments(made: AbstractCallback) -> None:
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(cloudpickle.dumps(made))):
        assert type(twin) is type(made)
        assert twin.callback_name == made.callback_name
