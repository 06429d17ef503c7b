"""The package's own callbacks in random combinations: each mode equals ``single``, also resumed in another mode.

A failing test names its seed; ``draw`` shows the combination.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import event_files
from torch.optim import lr_scheduler

from ranks.parity import test_random_configurations as configurations
from ranks.parity.test_random_configurations import check, numbers
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import (
    ConfusionMatrix,
    EarlyStopping,
    ExponentialMovingAverage,
    FailureRecorder,
    GradientClipping,
    GradientStats,
    LearningRateMonitor,
    LRScheduler,
    ModelCheckpoint,
    ModelPerformanceEvaluation,
    StochasticWeightAveraging,
    TensorBoard,
    TerminateOnNaN,
    ThresholdEarlyStopping,
)
from trainloop.extending import optimizers_of


class Predicts(AbstractCallback):
    """Logs what an epoch predicts, and keeps it in checkpoints."""

    def __init__(self) -> None:
        super().__init__("predicts")
        self.seen: list[float] = []

    def on_epoch_end(self) -> None:
        self.seen.append(float(self.train_loop_obj.predict_on_test_set()[0].double().square().sum()))
        self.log("predicted", self.seen[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def measures(y_pred: Any, y_true: Any, metadata: Any) -> dict[str, float]:
    return {"rows": float(len(y_pred)), "right": float((y_pred.argmax(1) == torch.as_tensor(y_true)).double().mean())}


def early(r: random.Random, *, validates: bool) -> EarlyStopping:
    every = r.choice([None, 2]) if validates else None
    return EarlyStopping(
        "val_loss" if validates else "loss", r.choice([0, 0.01]), r.choice([0, 1]), every_n_steps=every
    )


def performance(r: random.Random) -> ModelPerformanceEvaluation:
    return ModelPerformanceEvaluation(
        measures, None, r.random() < 0.7, r.random() < 0.4, True, r.choice([None, 2]), r.choice([0, 0, 3])
    )


def ema(r: random.Random) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(
        r.choice([0.5, 0.9]),
        r.choice([1, 2, 3]),
        r.choice([0, 2]),
        evaluate=r.random() < 0.5,
        apply_on_train_end=r.random() < 0.7,
        warmup=r.choice([False, True, 0.75]),
        start_from=r.choice(["first", "initial"]),
    )


def swa(r: random.Random) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(
        r.choice([None, 0.02]),
        r.choice([0, 1]),
        r.choice([0, 1, 2]),
        r.choice(["cos", "linear"]),
        apply_on_train_end=r.random() < 0.8,
    )


def schedule(r: random.Random, loop: TrainLoop) -> LRScheduler:
    first = optimizers_of(loop.optimizer)[0]
    kind = r.choice(["cycle", "restarts", "in sequence"])
    if kind == "cycle":
        of_steps: Any = lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=100, cycle_momentum=False)
    elif kind == "restarts":
        of_steps = lr_scheduler.CosineAnnealingWarmRestarts(first, 2)
    else:
        later = lr_scheduler.ExponentialLR(first, 0.9)
        of_steps = lr_scheduler.SequentialLR(first, [lr_scheduler.LinearLR(first, 0.1, total_iters=3), later], [3])
    return LRScheduler(of_steps, interval="step", frequency=r.choice([1, 1, 2]))


KINDS: dict[str, Callable[[random.Random, TrainLoop, Path], AbstractCallback]] = {
    "ema": lambda r, *_: ema(r),
    "swa": lambda r, *_: swa(r),
    "early": lambda r, *_: early(r, validates=False),
    "early, by validation": lambda r, *_: early(r, validates=True),
    "threshold": lambda r, *_: ThresholdEarlyStopping("loss", r.choice([0.9, 1.5]), r.choice([0, 2])),
    "schedule": lambda r, loop, _: schedule(r, loop),
    "clip": lambda r, *_: GradientClipping(0.3, norm_type=r.choice([2.0, 1.0, float("inf")])),
    "statistics": lambda r, *_: GradientStats(r.choice([1, 2]), r.random() < 0.5),
    "rates": lambda r, *_: LearningRateMonitor(r.choice([1, 2])),
    "performance": lambda r, *_: performance(r),
    "matrix": lambda r, *_: ConfusionMatrix(every_n_epochs=r.choice([1, 2])),
    "nan": lambda r, *_: TerminateOnNaN(check_every_n_steps=r.choice([1, 2])),
    "failures": lambda _, __, folder: FailureRecorder(folder / "failures"),
    "board": lambda r, _, folder: TensorBoard(folder / "board", r.choice([1, 2, 3])),
    "predicts": lambda *_: Predicts(),
}


def draw(seed: int) -> dict[str, Any]:
    """The combination of a seed."""
    config, r = configurations.draw(seed), random.Random(f"callbacks {seed}")
    kinds = r.sample(list(KINDS), r.randint(2, 5))
    if "swa" in kinds and ("ema" in kinds or "num_epochs" not in config["length"]):
        kinds.remove("swa")  # one average at a time, of whole epochs
    if "early, by validation" in kinds and config["evaluated"] is not True:
        kinds.remove("early, by validation")
    return {
        **config,
        "kinds": kinds,
        "callbacks": [],
        "schedule": None,
        "other": r.choice(["single", "ddp", "fsdp", "dp"]),
    }


def results(
    loop: TrainLoop, config: dict[str, Any], folder: Path, *more: AbstractCallback, **arguments: Any
) -> dict[str, Any]:
    """Fit; return the numbers of the loop, of its steps and of its callbacks."""
    r = random.Random(str(config["kinds"]))
    made = {name: KINDS[name](r, loop, folder) for name in config["kinds"]}
    loop.fit(
        callbacks=[*made.values(), *more], grad_accumulation=config["accumulation"], **config["length"], **arguments
    )
    found = {**numbers(loop), **{f"steps of {name}": loop.history.steps(name) for name in loop.history.step_names}}
    for name, callback in made.items():
        if isinstance(callback, EarlyStopping):
            stopped = -1 if callback.stopped_epoch is None else callback.stopped_epoch
            found[name] = [callback.best or 0.0, callback.best_epoch, stopped]
        if isinstance(callback, Predicts):
            found[name] = callback.seen
    return {name: values for name, values in found.items() if not name.startswith(("seconds", "steps of seconds"))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:devices=3 on 2 CPU cores", "ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:LRScheduler.*the schedule ends after")
@pytest.mark.filterwarnings("ignore:.*there is no average", "ignore:ModelPerformanceEvaluation.*before the first")
@pytest.mark.filterwarnings("ignore:EarlyStopping.*was never read", "ignore:the checkpoint has state of callbacks not")
@pytest.mark.parametrize("seed", range(120))
def test_callbacks_are_the_same_in_each_mode(seed: int, tmp_path: Path, may_leave: Callable[[str], None]) -> None:
    """Also in a second fit, in a resumed run, bit by bit, and in one that is resumed in another mode."""
    may_leave("/mpl-data/fonts/")  # matplotlib keeps its fonts open
    config = draw(seed)
    alone, loop = (configurations.make_loop(config, mode) for mode in ("single", config["mode"]))
    keeper = ModelCheckpoint(tmp_path / "checkpoints", every_n_epochs=None, every_n_steps=1, keep=None)
    first, expected = results(loop, config, tmp_path / "ranks", keeper), results(alone, config, tmp_path / "alone")
    check(first, expected, 1e-6)
    if "board" in config["kinds"]:
        ours, theirs = (event_files.read(tmp_path / name / "board") for name in ("ranks", "alone"))
        assert {name: event_files.steps(events) for name, events in ours.items()} == {
            name: event_files.steps(events) for name, events in theirs.items()
        }
    check(results(loop, config, tmp_path / "2"), results(alone, config, tmp_path / "3"), 1e-6)
    written = sorted(path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("checkpoint"))
    path = written[int(config["checkpoint"] * len(written))]
    again = results(configurations.make_loop(config, config["mode"]), config, tmp_path / "4", resume_from=path)
    check(again, first, 0)
    elsewhere = configurations.make_loop(config, config["other"])
    check(results(elsewhere, config, tmp_path / "5", resume_from=path), first, 1e-6)
