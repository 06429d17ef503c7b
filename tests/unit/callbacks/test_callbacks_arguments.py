"""Arguments of all callbacks: any value is accepted, or is a ConfigurationError that names callback and argument."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainloop import callbacks
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientClipping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TensorBoard,
    TimeLimit,
    TrainHistoryPlot,
    WandBTracking,
)
from trainloop.errors import ConfigurationError
from trainloop.schedulers import CosineWithWarmupScheduler, LinearWithWarmupScheduler

VALUES: dict[str, Any] = {
    "none": None,
    "negative": -1,
    "zero": 0,
    "text": "x",
    "nan": math.nan,
    "object": object(),
    "list": [1],
    "dict": {},
    "bool": True,
    "numpy": np.int64(2),
    "tensor": torch.tensor(0.5),
    "path": Path("x"),
    "function": lambda *_: None,
    "bytes": b"a",
    "complex": 1j,
    "set": {1},
}
CLASSES = [cls for name in callbacks.__all__ if inspect.isclass(cls := getattr(callbacks, name))]
KINDS = {
    "bool": ("text", "list", "negative", "numpy"),
    "str | os.PathLike[str]": ("negative", "list", "object", "bytes"),
}


def parameters(cls: type) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one for one in inspect.signature(cls.__init__).parameters.values() if one.kind not in kinds][1:]  # type: ignore[misc]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_wrong_arguments_of_callbacks_are_configuration_errors(cls: Any, folder: Path) -> None:
    needed = {one.name: str(folder / "x") for one in parameters(cls) if one.default is one.empty}
    for one in parameters(cls):
        for kind, value in VALUES.items():
            try:
                cls(**{**needed, one.name: value})
            except ConfigurationError:
                continue
            refused = KINDS.get(str(one.annotation).removesuffix(" | None"), ())
            assert kind not in refused, f"{cls.__name__}({one.name}={value!r}) is accepted"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ExponentialMovingAverage(decay="0.9"), "ExponentialMovingAverage: decay='0.9': must be a number"),  # type: ignore[arg-type]
        (lambda: GradientClipping("1"), "GradientClipping: max_norm='1': must be a number above 0, or None"),  # type: ignore[arg-type]
        (lambda: ModelCheckpoint("x", async_save="no"), "ModelCheckpoint: async_save='no': must be True or False"),  # type: ignore[arg-type]
        (lambda: ModelCheckpoint("x", exclude=3), "ModelCheckpoint: exclude=3: must be a list of texts"),  # type: ignore[arg-type]
        (lambda: TensorBoard(3), "TensorBoard: log_dir=3: must be a path, or None"),  # type: ignore[arg-type]
        (lambda: TensorBoard(hyperparameters=[1]), "TensorBoard: hyperparameters=[1]: must be a dict, or None"),  # type: ignore[arg-type]
        (lambda: TimeLimit(hours="2"), "TimeLimit: hours='2': must be a number of 0 or more"),  # type: ignore[arg-type]
    ],
)
def test_the_error_names_the_callback_the_argument_and_the_value(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert words in str(caught.value)


def test_a_single_text_is_a_list_of_one() -> None:
    tracking = WandBTracking(tags="baseline", source_dirs="src", metric_names=("loss", "acc"))
    assert (tracking.tags, tracking.source_dirs) == (["baseline"], ["src"])
    assert tracking.metric_names == ["loss", "acc"]


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    swa = StochasticWeightAveraging(swa_lr=np.float32(0.5), start=np.int64(1))  # type: ignore[arg-type]
    assert (type(swa.swa_lr), type(swa.start), swa.start) == (float, int, 1)
    assert ExponentialMovingAverage(Fraction(1, 2), warmup=np.float32(0.75)).warmup == 0.75  # type: ignore[arg-type]
    assert f"{EarlyStopping(min_delta=Fraction(1, 4)).min_delta:g}" == "0.25"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping(patience=np.bool_(True)),  # type: ignore[arg-type]
        lambda: StochasticWeightAveraging(swa_lr=True),
        lambda: LinearWithWarmupScheduler(math.inf),  # type: ignore[arg-type]
        lambda: CosineWithWarmupScheduler(1, num_cycles=math.inf),
        lambda: TrainHistoryPlot("a\0b.png"),
    ],
)
def test_bools_are_no_numbers_and_endless_schedules_and_paths_without_a_name_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        make()
