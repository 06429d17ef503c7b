"""Things that folds train in the tests: small, quick to import, and able to fail in many ways."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def rows(length: int = 21) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x is the row's number, y half of it."""
    x = np.arange(length, dtype=float)[:, None]
    return x, x[:, 0] / 2


class Scaled:
    """Predicts ``scale * x``; remembers the mean of what it was trained on."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.mean = float("nan")
        self.bias = 0.0

    def fit(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], bias: float = 0.0) -> None:
        self.mean = float(y.mean())
        self.bias = bias

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.scale * x[:, 0] + self.bias


def make_scaled(params: dict[str, Any], fold: Any) -> Scaled:
    return Scaled(params["scale"])


class Frequencies:
    """Predicts how frequent each class was in what it was trained on."""

    def fit(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        self.classes_, counts = np.unique(y, return_counts=True)
        self.chances = counts / counts.sum()

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.full(len(x), self.classes_[self.chances.argmax()])

    def predict_proba(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.tile(self.chances, (len(x), 1))


def make_frequencies(params: dict[str, Any], fold: Any) -> Frequencies:
    return Frequencies()


def make_broken(params: dict[str, Any], fold: Any) -> Any:
    raise RuntimeError("no data here")


class Failing(Scaled):
    """Leaves a mark when it trains; fold 1 does ``do`` the first time."""

    def __init__(self, marks: Path, trial: str, fold: int, do: str) -> None:
        super().__init__(0.5)
        self.marks, self.name, self.index, self.do = marks, f"{trial}-{fold}", fold, do

    def fit(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], bias: float = 0.0) -> None:
        before = len(list(self.marks.glob(f"{self.name}-*")))
        (self.marks / f"{self.name}-{before}").write_text(str(os.getpid()))
        super().fit(x, y)
        if self.index == 1 and before == 0:
            fail(self.do)


def fail(do: str) -> None:
    print("about to", do, flush=True)
    if do == "raise":
        raise ValueError("this fold raises")
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "kill the parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if do == "_exit":
        os._exit(7)
    if do == "exit":
        sys.exit(3)
    if do == "orphan":  # a child that outlives it, as a loader's worker may
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if do == "hang":
        time.sleep(600)


class MakeFailing:
    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def __call__(self, params: dict[str, Any], fold: Any) -> Failing:
        return Failing(self.marks, params["do"], fold.index, params["do"])


class Busy(Scaled):
    """Keeps as many threads busy as it gets, for a while, and tells which CPUs it may use."""

    def __init__(self, marks: Path, fold: int, seconds: float) -> None:
        super().__init__(0.5)
        self.marks, self.index, self.seconds = marks, fold, seconds

    def fit(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], bias: float = 0.0) -> None:
        super().fit(x, y)
        mark = self.marks / f"fold-{self.index}"
        mark.with_suffix(".tmp").write_text(str(os.getpid()))
        os.replace(mark.with_suffix(".tmp"), mark)
        values = np.random.default_rng(0).normal(size=(400, 400))
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            values @ values
        mark.unlink()


class MakeBusy:
    def __init__(self, marks: Path, seconds: float) -> None:
        self.marks, self.seconds = marks, seconds

    def __call__(self, params: dict[str, Any], fold: Any) -> Busy:
        return Busy(self.marks, fold.index, self.seconds)
