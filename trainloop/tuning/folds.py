"""Folds: the rows on which each model of a bag trains, and those that it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainloop.errors import ConfigurationError

__all__ = ["Fold", "class_targets", "make_folds"]


@dataclass(frozen=True, eq=False)
class Fold:
    """One model's part of the data; ``torch.utils.data.Subset(data, fold.train)`` takes it as it is."""

    index: int
    """Number of the fold, from 0."""
    num_folds: int
    """Folds of the bag."""
    train: np.ndarray[Any, Any]
    """Rows to train on, ascending; int64."""
    validation: np.ndarray[Any, Any]
    """Rows held out, ascending; each row of the data is held out by one fold."""

    def __repr__(self) -> str:
        return f"Fold({self.index} of {self.num_folds}, train={len(self.train)}, validation={len(self.validation)})"


def class_targets(targets: object) -> np.ndarray[Any, Any] | None:
    """Targets as classes, or None where they are none: floats, several a row, or hardly any value twice."""
    if targets is None:
        return None
    if hasattr(targets, "detach"):
        targets = targets.detach().cpu()
    values = np.asarray(targets)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "biuUSO":
        return None
    if values.dtype.kind == "O":
        values = values.astype(str)
    _, codes = np.unique(values, return_inverse=True)
    return codes if len(codes) >= 2 * (codes.max(initial=0) + 1) else None


def make_folds(
    num_samples: int, num_folds: int, *, seed: int, classes: Sequence[int] | np.ndarray[Any, Any] | None = None
) -> list[Fold]:
    """Folds that hold out each row once, as equal in size as possible, stratified if there are classes.

    Parameters
    ----------
    num_samples : int
        Rows of the data.
    num_folds : int
        2 or more.
    seed : int
        Seed of the shuffle.
    classes : sequence of int, optional
        Class of each row: a fold then has of each class its equal part, give or take one row.

    Raises
    ------
    ConfigurationError
        If there are fewer rows than folds.
    """
    if num_samples < num_folds:
        raise ConfigurationError(
            f"num_bag_folds={num_folds} for {num_samples} rows: each fold holds out one row at least. Use fewer folds."
        )
    rng = np.random.default_rng([seed, num_folds])
    order = rng.permutation(num_samples)
    if classes is not None:
        # Class by class, dealt like cards: the next class goes on where the last one ended, so sizes stay equal too.
        order = order[np.argsort(np.asarray(classes)[order], kind="stable")]
    held_by = np.empty(num_samples, dtype=np.int64)
    held_by[order] = np.arange(num_samples) % num_folds
    rows = np.arange(num_samples)
    return [Fold(k, num_folds, rows[held_by != k], rows[held_by == k]) for k in range(num_folds)]
