"""Combine trained models into a weighted ensemble, with its predictions and leaderboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trainloop.errors import ConfigurationError
from trainloop.tabular.columns import Columns, Rows
from trainloop.tabular.targets import Target, Task, find_metric
from trainloop.tuning import BaggedPredictor
from trainloop.tuning.scoring import Scorer, ensemble_weights

_NAME = "WeightedEnsemble_L2"


@dataclass(frozen=True)
class Trained:
    """A trained model, with its settings and its row in the leaderboard."""

    settings: Mapping[str, Any]
    predictor: BaggedPredictor
    """The model. It is read from disk on first use, because forests are large, and networks need torch."""
    row: Mapping[str, Any]
    """Row of the model in the leaderboard."""


@dataclass(frozen=True)
class Ensemble:
    """All trained models, and the weights of the models that are in the ensemble."""

    target: Target
    metric: Scorer
    columns: Columns
    models: Mapping[str, Trained]
    weights: Mapping[str, float]
    score: float
    """Score of the ensemble on rows that no model trained on."""

    @classmethod
    def of(cls, task: Task, models: Mapping[str, Trained], rows: list[Rows], time_limit_s: float | None) -> Ensemble:
        """Return an ensemble with the best weights.

        ``rows`` has each model's predictions for rows that it did not train on.
        """
        second = find_metric("log_loss" if task.target.classes else "rmse", task.target.problem)
        weights = ensemble_weights(rows, task.truth, task.metric, second, time_limit_s=time_limit_s)
        score = task.metric(task.truth, np.tensordot(weights, rows, axes=1))
        nonzero = {name: weight for name, weight in zip(models, weights) if weight > 0}
        return cls(task.target, task.metric, task.columns, models, nonzero, score)

    @property
    def names(self) -> list[str]:
        return [*self.models, _NAME]

    def predict(self, frame: pd.DataFrame, name: str | None = None) -> Rows:
        """Return the predictions of one model (default: the ensemble): probabilities of the classes, or numbers."""
        name = _NAME if name is None else name
        if name not in self.names:
            raise ConfigurationError(f"model={name!r}: must be one of {', '.join(self.names)}.")
        return self._predict_all(frame, [*self.weights] if name == _NAME else [name])[name]

    def _predict_all(self, frame: pd.DataFrame, names: list[str]) -> dict[str, Rows]:
        table = self.columns.clean(frame)
        found = {name: np.asarray(self.models[name].predictor.predict(table)) for name in names}
        if self.weights.keys() <= found.keys():
            found[_NAME] = np.asarray(sum(weight * found[name] for name, weight in self.weights.items()))
        return found

    def board(self, frame: pd.DataFrame | None) -> pd.DataFrame:
        """Return the table of ``TabularPredictor.leaderboard``."""
        board = pd.DataFrame.from_dict({name: each.row for name, each in self.models.items()}, "index")
        parts = board.loc[[*self.weights]]
        sums = {"score_val": self.score, **parts[["fit_time", "cpu_seconds"]].sum()}
        board = pd.concat([board, pd.DataFrame({**parts.max(), **sums}, index=[_NAME])])
        if frame is not None:
            truth, rows = self.target.encode(frame[self.target.label]), self._predict_all(frame, [*self.models])
            board.insert(0, "score_test", [self.metric(truth, rows[name]) for name in board.index])
        board = board.sort_values(board.columns[0], ascending=False, kind="stable")
        return board.round({"fit_time": 2, "cpu_seconds": 2}).rename_axis("model").reset_index()
