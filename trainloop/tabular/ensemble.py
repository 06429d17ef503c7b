"""Trained models, and the weighted ensemble of them: what they predict, and what each had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trainloop.errors import ConfigurationError
from trainloop.tabular.columns import Columns, Rows
from trainloop.tabular.targets import Metric, Target
from trainloop.tuning import BaggedPredictor, Trial, TuneResult

__all__ = ["Ensemble", "Trained", "greedy_weights"]

_NAME = "WeightedEnsemble_L2"
_ROUNDS = 25


@dataclass
class Trained:
    """A model that can predict."""

    name: str
    trial: Trial
    settings: Mapping[str, Any]
    held_out: Rows
    """Predictions of the rows that it did not train on, until the ensemble is chosen."""
    result: TuneResult | None
    """Holds the models' files until they are read."""
    _predictor: BaggedPredictor | None = None

    @property
    def predictor(self) -> BaggedPredictor:
        """Its models, read when they are needed: forests are large, and networks need torch."""
        if self._predictor is None:
            assert self.result is not None, "there are files until they are read"
            self._predictor, self.result = self.result.predictor_of(self.trial), None
        return self._predictor

    @property
    def gpus(self) -> float:
        """That each of its parts really used."""
        return self.trial.gpus if any(facts["used_gpu"] for facts in self.trial.facts.values()) else 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictor": self.predictor, "result": None}


@dataclass(frozen=True)
class Ensemble:
    """Models by name, and the weights of those that count together."""

    target: Target
    metric: Metric
    columns: Columns
    models: dict[str, Trained]
    weights: dict[str, float]
    score: float
    """Of rows that no model trained on."""

    @classmethod
    def of(cls, target: Target, metric: Metric, columns: Columns, trained: list[Trained], truth: Rows) -> Ensemble:
        """Weighed by what they predicted of rows that they did not train on."""
        second = Metric.find("log_loss" if target.classes else "rmse", target.problem)
        found = greedy_weights([each.held_out for each in trained], truth, metric, second)
        score = metric(truth, np.asarray(sum(weight * each.held_out for weight, each in zip(found, trained))))
        weights = {each.name: weight for each, weight in zip(trained, found) if weight > 0}
        for each in trained:
            each.held_out = np.empty(0)  # has served
        return cls(target, metric, columns, {each.name: each for each in trained}, weights, score)

    @property
    def names(self) -> list[str]:
        return [*self.models, _NAME]

    def predict(self, frame: pd.DataFrame, name: str | None = None) -> Rows:
        """Chances or numbers, by the model of that name or by all that count."""
        name = _NAME if name is None else name
        if name not in self.names:
            raise ConfigurationError(f"model={name!r}: there are {', '.join(self.names)}.")
        return self._predict_all(frame, [*self.weights] if name == _NAME else [name])[name]

    def _predict_all(self, frame: pd.DataFrame, names: list[str]) -> dict[str, Rows]:
        table = self.columns.clean(frame)
        found = {name: np.asarray(self.models[name].predictor.predict(table)) for name in names}
        if self.weights.keys() <= found.keys():
            found[_NAME] = np.asarray(sum(weight * found[name] for name, weight in self.weights.items()))
        return found

    def board(self, frame: pd.DataFrame | None) -> pd.DataFrame:
        """See ``TabularPredictor.leaderboard``."""
        trials = {name: each.trial for name, each in self.models.items()}
        board = pd.DataFrame(
            {
                "score_val": {name: trial.score for name, trial in trials.items()},
                "eval_metric": self.metric.name,
                "fit_time": {name: trial.seconds for name, trial in trials.items()},
                "cpu_seconds": {name: trial.cpu_seconds for name, trial in trials.items()},
                "cpus": {name: trial.cpus for name, trial in trials.items()},
                "gpus": {name: each.gpus for name, each in self.models.items()},
            }
        )
        parts = board.loc[[*self.weights]]
        sums = {"score_val": self.score, **parts[["fit_time", "cpu_seconds"]].sum()}
        board = pd.concat([board, pd.DataFrame({**parts.max(), **sums}, index=[_NAME])]).round(
            {"fit_time": 2, "cpu_seconds": 2}
        )
        if frame is not None:
            truth, rows = self.target.encode(frame[self.target.label]), self._predict_all(frame, [*self.models])
            board.insert(0, "score_test", [self.metric(truth, rows[name]) for name in board.index])
        first = board.columns[0]
        return board.sort_values(first, ascending=False, kind="stable").rename_axis("model").reset_index()


def greedy_weights(predictions: list[Rows], truth: Rows, metric: Metric, second: Metric) -> list[float]:
    """Weights of an ensemble, by greedy selection with replacement (Caruana et al., 2004).

    Of equal candidates the one that is better by ``second`` is taken: few rows have few accuracies.
    """
    counts = np.zeros(len(predictions))
    total = np.zeros_like(predictions[0])
    rounds: list[tuple[tuple[float, float], Rows]] = []
    for taken in range(1, _ROUNDS + 1):
        scores = [(metric(truth, p), second(truth, p)) for p in ((total + each) / taken for each in predictions)]
        chosen = max(range(len(scores)), key=scores.__getitem__)
        counts[chosen] += 1
        total = total + predictions[chosen]
        rounds.append((scores[chosen], counts / counts.sum()))
    return [float(weight) for weight in max(rounds, key=lambda each: each[0])[1]]
