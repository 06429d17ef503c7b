"""Logs at random places with random options: the history has what a record kept beside it gives."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor

from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint

STEP_HOOKS = ["on_batch_begin", "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end"]
OTHER_HOOKS = ["on_epoch_begin", "on_epoch_end"]
KINDS = {
    "float": float,
    "one element": lambda x: torch.tensor([x], dtype=torch.float64),
    "numpy": np.float64,
    "with a graph": lambda x: torch.tensor(x, dtype=torch.float64, requires_grad=True) * 1,
}


class Metric(NamedTuple):
    """What is logged, where and how."""

    name: str
    places: list[str]
    reduce: str
    on_step: bool | None
    kind: str
    often: float


class Entry(NamedTuple):
    """One logged value."""

    epoch: int
    step: int
    value: float
    weight: float


class LogsAnything(AbstractCallback):
    """Logs by :attr:`plan`, keeps a record, and flushes now and then; what it logs depends on the place only."""

    def __init__(self, plan: list[Metric], seed: int, flush: str | None) -> None:
        super().__init__("logs anything", execution_order=-1)
        self.plan, self.seed, self.flush = plan, seed, flush
        self.record: dict[str, list[Entry]] = defaultdict(list)
        self.step_is_done = False

    def log_all(self, place: str, step: int, sink: Any) -> None:
        tl = self.train_loop_obj
        if place == self.flush and tl.global_step % 2:
            tl.flush_logs()
        for metric in self.plan:
            draws = random.Random(f"{self.seed} {metric.name} {place} {tl.epoch} {tl.total_iteration_idx}")
            if place not in metric.places or draws.random() > metric.often:
                continue
            value, weight = draws.choice([draws.random(), -3.0, math.nan, math.inf, 0.0]), draws.choice([0, 1, 2.5])
            logged = KINDS[metric.kind](value)
            sink.log(metric.name, logged, reduce=metric.reduce, on_step=metric.on_step, batch_size=weight)
            if isinstance(logged, Tensor) and not logged.requires_grad:
                logged.fill_(77.0)  # the value is a copy
            self.record[metric.name].append(Entry(tl.epoch, step, value, weight))

    def on_epoch_begin(self) -> None:
        self.log_all("on_epoch_begin", 0, self)

    def on_batch_begin(self) -> None:
        self.step_is_done = False
        self.log_all("on_batch_begin", self.train_loop_obj.global_step + 1, self)

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.log_all("on_after_gradient_update", self.train_loop_obj.global_step + 1, self)

    def on_after_optimizer_step(self) -> None:
        self.step_is_done = True
        self.log_all("on_after_optimizer_step", self.train_loop_obj.global_step, self.train_loop_obj)

    def on_batch_end(self) -> None:
        self.log_all("on_batch_end", self.train_loop_obj.global_step + (not self.step_is_done), self)

    def on_epoch_end(self) -> None:
        self.log_all("on_epoch_end", 0, self.train_loop_obj)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def reduced(reduce: str, entries: list[Entry]) -> float:
    values = np.array([entry.value for entry in entries])
    if reduce != "mean":
        with np.errstate(invalid="ignore"):
            return float(getattr(np, reduce)(values))
    counted = [entry for entry in entries if entry.weight]
    if not counted:
        return math.nan
    with np.errstate(invalid="ignore"):
        return float(np.average([entry.value for entry in counted], weights=[entry.weight for entry in counted]))


def expected(metric: Metric, entries: list[Entry]) -> tuple[dict[int, float], dict[int, float]]:
    epochs, steps = defaultdict(list), defaultdict(list)
    for entry in entries:
        epochs[entry.epoch].append(entry)
        if entry.step and metric.on_step is not False:
            steps[entry.step].append(entry)
    return tuple({key: reduced(metric.reduce, of[key]) for key in sorted(of)} for of in (epochs, steps))  # type: ignore[return-value]


@pytest.mark.long(every=2)
@pytest.mark.parametrize("seed", range(8))
def test_the_history_has_what_was_logged(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    plan = [
        Metric(
            f"metric_{i}",
            draws.sample([*STEP_HOOKS, *OTHER_HOOKS], draws.choice([1, 2])),
            draws.choice(["mean", "sum", "min", "max"]),
            draws.choice([None, False]),
            draws.choice(list(KINDS)),
            draws.choice([0.3, 1.0]),
        )
        for i in range(4)
    ]
    flush = draws.choice([None, *STEP_HOOKS])
    accumulation = draws.choice([1, 2, 3])

    def trained(folder: Path, resume_from: Path | None = None) -> LogsAnything:
        logs = LogsAnything(plan, seed, flush)
        saves = ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=1, keep=None)
        make_loop(Net(), seed=1).fit(
            num_epochs=3, callbacks=[logs, saves], grad_accumulation=accumulation, resume_from=resume_from
        )
        return logs

    logs = trained(tmp_path / "whole")
    history = logs.train_loop_obj.history
    assert any(logs.record.values())
    for metric in plan:
        epochs, steps = expected(metric, logs.record[metric.name])
        values = history.get(metric.name, [])
        assert dict(zip(history.epochs(metric.name), values)) == pytest.approx(epochs, nan_ok=True)
        assert history.step_indices(metric.name) == list(steps)
        assert history.steps(metric.name) == pytest.approx(list(steps.values()), nan_ok=True)
    resumed = trained(tmp_path / "resumed", draws.choice(sorted((tmp_path / "whole").glob("checkpoint-*"))[:-1]))
    again = resumed.train_loop_obj.history
    assert again.step_names == history.step_names
    for name in history.step_names:
        np.testing.assert_array_equal(again.steps(name), history.steps(name))
        assert again.step_indices(name) == history.step_indices(name)
