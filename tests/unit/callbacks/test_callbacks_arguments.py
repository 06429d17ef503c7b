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
from torch.optim.lr_scheduler import StepLR

from trainloop import callbacks
from trainloop.callbacks import (
    ConfusionMatrix,
    DataSubsetTestRun,
    EarlyStopping,
    ExponentialMovingAverage,
    FailureRecorder,
    GradientClipping,
    GradientStats,
    LearningRateMonitor,
    LRScheduler,
    MLflowTracking,
    ModelCheckpoint,
    ModelPerformanceEvaluation,
    StochasticWeightAveraging,
    TensorBoard,
    TerminateOnNaN,
    ThresholdEarlyStopping,
    TimeLimit,
    TrainHistoryPlot,
    WandBTracking,
)
from trainloop.errors import ConfigurationError
from trainloop.schedulers import (
    ConstantWithWarmupScheduler,
    CosineWithWarmupScheduler,
    HardRestartsCosineWithWarmupScheduler,
    LinearWithWarmupScheduler,
)

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


# Arguments that a callback can't do without.
NEEDED: dict[Any, dict[str, Any]] = {
    ConstantWithWarmupScheduler: {"num_warmup_steps": 1},
    CosineWithWarmupScheduler: {"num_warmup_steps": 1},
    DataSubsetTestRun: {"num_train_batches": 1},
    FailureRecorder: {"dirpath": "x"},
    GradientClipping: {"max_norm": 1.0},
    HardRestartsCosineWithWarmupScheduler: {"num_warmup_steps": 1},
    LinearWithWarmupScheduler: {"num_warmup_steps": 5},
    LRScheduler: {"scheduler": StepLR, "step_size": 1},
    ModelCheckpoint: {"dirpath": "x"},
    ModelPerformanceEvaluation: {"result_package": ["accuracy"]},
    ThresholdEarlyStopping: {"monitor": "loss", "threshold": 1.0},
}
# A callback's argument, wrong values, and what the error says after naming all three.
WRONG: list[tuple[Any, str, list[Any], str]] = [
    (ConfusionMatrix, "dataset", ["train"], "must be 'validation' or 'test'"),
    (ConfusionMatrix, "every_n_epochs", [0], "must be an int of 1 or more"),
    (ConstantWithWarmupScheduler, "num_warmup_steps", [-1], "must be a number of 0 or more"),
    (CosineWithWarmupScheduler, "num_training_steps", [0.5], "must be a number of"),
    (CosineWithWarmupScheduler, "num_cycles", [None], "must be a number"),
    (CosineWithWarmupScheduler, "num_cycles", [math.inf], "must be a finite number"),
    (DataSubsetTestRun, "num_val_batches", [-1], "must be an int of 0 or more"),
    (EarlyStopping, "patience", [-1, True, np.bool_(True)], "must be a number of 0 or more"),
    (EarlyStopping, "min_delta", ["much"], "must be a number"),
    (EarlyStopping, "mode", ["lower"], "must be 'auto', 'min' or 'max'"),
    (EarlyStopping, "monitor", [""], "must be the name of a metric"),
    (ExponentialMovingAverage, "decay", ["0.9", 1.5, -0.1], "must be a number of 0 or more and of 1 or less"),
    (ExponentialMovingAverage, "every_n_steps", [0], "must be an int of 1 or more"),
    (ExponentialMovingAverage, "start_step", [-1], "must be an int of 0 or more"),
    (ExponentialMovingAverage, "start_from", ["zero"], "must be"),
    (ExponentialMovingAverage, "warmup", [-1.0, "yes", 1000], "must be"),
    (FailureRecorder, "check_every_n_steps", [0, -1, 1.5, True, "often"], "must be an int of 1 or more, or None"),
    (GradientClipping, "max_norm", ["1", 0, -1.0], "must be a number above 0, or None"),
    (GradientClipping, "max_value", [math.nan], "must be a number above 0"),
    (GradientClipping, "norm_type", ["a"], "must be a number"),
    (GradientStats, "every_n_steps", [0], "must be an int of 1 or more"),
    (HardRestartsCosineWithWarmupScheduler, "num_cycles", ["2"], "must be a number"),
    (LRScheduler, "interval", ["batch"], "must be 'step' or 'epoch'"),
    (LRScheduler, "frequency", [0, 1.5], "must be an int of 1 or more"),
    (LRScheduler, "scheduler", ["StepLR"], "must be a class of torch.optim.lr_scheduler"),
    (LearningRateMonitor, "every_n_steps", [0], "must be an int of 1 or more"),
    (LinearWithWarmupScheduler, "num_warmup_steps", ["5"], "must be a number of 0 or more"),
    (LinearWithWarmupScheduler, "num_warmup_steps", [math.inf], "must be a finite number"),
    (LinearWithWarmupScheduler, "num_warmup_steps", [0.1], "must be a number of optimizer"),
    (LinearWithWarmupScheduler, "num_training_steps", ["9"], "must be a number"),
    (MLflowTracking, "log_every_n_steps", [0], "must be an int of 1 or more"),
    (ModelCheckpoint, "async_save", ["no"], "must be True or False"),
    (ModelCheckpoint, "exclude", [3], "must be a list of texts"),
    (ModelCheckpoint, "every_n_epochs", [0], "must be an int of 1 or more, or None"),
    (ModelCheckpoint, "every_n_steps", [1.5, np.True_], "must be an int of 1 or more, or None"),
    (ModelCheckpoint, "every_n_minutes", [-1], "must be a number above 0, or None"),
    (ModelCheckpoint, "keep", [True], "must be an int of 1 or more, or None"),
    (ModelCheckpoint, "mode", ["best", "maxx"], "must be"),
    (ModelPerformanceEvaluation, "eval_frequency", [0], "must be an int of 1 or more"),
    (ModelPerformanceEvaluation, "on_iteration_frequency", [-1], "must be"),
    (StochasticWeightAveraging, "swa_lr", [0, True], "must be"),
    (StochasticWeightAveraging, "start", [1.5, -1], "must be"),
    (StochasticWeightAveraging, "anneal_epochs", [-1], "must be"),
    (StochasticWeightAveraging, "anneal_strategy", ["x"], "must be"),
    (TensorBoard, "log_dir", [3], "must be a path, or None"),
    (TensorBoard, "hyperparameters", [[1]], "must be a dict, or None"),
    (TensorBoard, "log_every_n_steps", [0, 2.5], "must be an int of 1 or more, or None"),
    (TensorBoard, "histograms_every_n_epochs", [-1], "must be an int of 1 or more"),
    (TerminateOnNaN, "check_every_n_steps", [0], "must be an int of 1 or more, or None"),
    (ThresholdEarlyStopping, "patience", [-2], "must be a number of 0 or more"),
    (TimeLimit, "hours", ["2", -1], "must be a number of 0 or more"),
    (TimeLimit, "seconds", [math.nan], "must be a number of 0 or more"),
    (TrainHistoryPlot, "every_n_epochs", [0], "must be an int of 1 or more"),
    (TrainHistoryPlot, "path", ["a\0b.png"], "must be"),
    (WandBTracking, "batch_log_frequency", [0], "must be an int of 1 or more, or None"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "words"),
    [(cls, name, value, words) for cls, name, values, words in WRONG for value in values],
)
def test_the_error_names_the_callback_the_argument_and_the_value(cls: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        cls(**{**NEEDED.get(cls, {}), name: value})
    assert str(caught.value).startswith(f"{cls.__name__}: {name}={value!r}: {words}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataSubsetTestRun(0), "DataSubsetTestRun: all three numbers are 0"),
        (lambda: ModelCheckpoint(""), "'' is not a folder. Pass a path or a URL"),
        (lambda: ModelPerformanceEvaluation(["accuracy"], on_val_data=False), "are both False: set at least one to"),
        (
            lambda: LinearWithWarmupScheduler(5, 4),
            "LinearWithWarmupScheduler: num_training_steps=4: must not be less than num_warmup_steps=5",
        ),
        (lambda: TimeLimit(), "the limit is 0.0 seconds. It must be above zero"),
    ],
)
def test_arguments_that_make_no_sense_together_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_single_text_is_a_list_of_one() -> None:
    tracking = WandBTracking(tags="baseline", source_dirs="src", metric_names=("loss", "acc"))
    assert (tracking.tags, tracking.source_dirs) == (["baseline"], ["src"])
    assert tracking.metric_names == ["loss", "acc"]


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    swa = StochasticWeightAveraging(swa_lr=np.float32(0.5), start=np.int64(1))  # type: ignore[arg-type]
    assert (type(swa.swa_lr), type(swa.start), swa.start) == (float, int, 1)
    assert ExponentialMovingAverage(Fraction(1, 2), warmup=np.float32(0.75)).warmup == 0.75  # type: ignore[arg-type]
    assert f"{EarlyStopping(min_delta=Fraction(1, 4)).min_delta:g}" == "0.25"  # type: ignore[arg-type]
