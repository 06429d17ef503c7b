"""The models of a fit, trained by ``tune`` under printed plans: those with equal shares side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainloop.resources import Plan, ResourceQuota, plan
from trainloop.tabular.models import Given, Rows
from trainloop.tabular.specs import Shares, Spec, quota_of
from trainloop.tabular.targets import Metric, Target
from trainloop.tuning import BaggedPredictor, EstimatorLoop, Fold, Trial, TuneResult, tune
from trainloop.tuning.space import Searcher, make_searcher

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Course", "Trained", "greedy_weights", "train"]

_START_S = 3.0  # a model's process has begun and imported what it needs
_ROUNDS = 25


@dataclass
class Trained:
    """A model that can predict."""

    name: str
    trial: Trial
    held_out: Rows
    """Predictions of the rows that it did not train on."""
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

    @property
    def notes(self) -> list[str]:
        """What the user should hear of."""
        return [note for facts in self.trial.facts.values() for note in facts["notes"]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictor": self.predictor, "result": None}


@dataclass(frozen=True)
class Course:
    """What is trained on, and how."""

    table: pd.DataFrame
    """Cleaned."""
    y: Rows
    target: Target
    metric: Metric
    total: ResourceQuota
    """In figures."""
    shares: Shares
    """Of a model, where it has none of its own."""
    bag_shares: Shares
    gpus_asked: bool
    num_bag_folds: int
    held_out: tuple[Rows, Rows] | None
    """Rows to train on and to validate on, without bagging."""
    searcher: Any
    num_trials: int
    backend: Any
    parallel_folds: bool
    deadline: float | None
    """Of the whole, by the monotonic clock."""
    say: Callable[[str], None]
    progress: bool


@dataclass
class Outcome:
    """What was trained, and what was not."""

    trained: list[Trained] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    """Why, by name."""


@dataclass
class _MakeModel:
    """``make_loop`` of :func:`~trainloop.tuning.tune`; travels to the models' processes."""

    specs: list[Spec]
    course: Course
    seconds: float | None
    until: float | None
    gpu: bool

    def __call__(self, params: Mapping[str, Any], fold: Fold | None) -> EstimatorLoop:
        spec, course = self.specs[params["model"]], self.course
        rows = course.held_out if fold is None else (fold.train, fold.validation)
        assert rows is not None, "without folds there are rows to validate on"
        train, validation = ((course.table.iloc[part], course.y[part]) for part in rows)
        settings = {**spec.fixed, **params["settings"]}
        model = spec.make(Given(spec.columns, course.target, settings, self.seconds, self.until, self.gpu))
        return EstimatorLoop(model, train, validation, fit=lambda model, x, y: model.fit(x, y, validation))


class _Candidates:
    """Settings of all models, one after the other: a searcher for several spaces, each with one of its own."""

    def __init__(self, specs: list[Spec], searcher: Any, num_trials: int, seed: int) -> None:
        self._searchers: list[Searcher] = []
        self._turns: list[tuple[int, int, dict[str, Any] | None]] = []
        learns = not isinstance(searcher, str) or searcher == "optuna"  # and has to be asked at its time
        for number, spec in enumerate(specs):
            if not spec.space:
                self._searchers.append(make_searcher("grid", {}, seed=seed, mode="max"))
                self._turns.append((number, 0, {}))
                continue
            own = make_searcher(searcher, spec.space, seed=seed, mode="max")
            self._searchers.append(own)
            for turn in range(num_trials):
                settings = None if learns else own.propose(turn)
                if settings is None and not learns:
                    break  # a space with fewer settings
                self._turns.append((number, turn, settings))

    def __len__(self) -> int:
        return len(self._turns)

    def propose(self, number: int) -> dict[str, Any] | None:
        if number >= len(self._turns):
            return None
        model, turn, settings = self._turns[number]
        return {"model": model, "settings": self._searchers[model].propose(turn) if settings is None else settings}

    def tell(self, number: int, params: Mapping[str, Any], score: float | None) -> None:
        model, turn, _ = self._turns[number]
        self._searchers[model].tell(turn, params["settings"], score)

    def name(self, specs: list[Spec], number: int, suffix: str) -> str:
        """Name of a trial; those of a search are numbered."""
        model, turn, _ = self._turns[number]
        return specs[model].name + suffix + (f"/T{turn + 1}" if specs[model].space else "")


@dataclass
class _Group:
    """Models with equal shares, which one plan holds."""

    specs: list[Spec]
    candidates: _Candidates
    plan: Plan
    quotas: dict[str, ResourceQuota | None]
    gpu: bool


def train(specs: list[Spec], course: Course) -> Outcome:
    """Train all; the plans are said before the first.

    Raises
    ------
    ResourceError
        If a plan can't be.
    """
    groups = _groups(specs, course)
    for group in groups:
        names = ", ".join(spec.name for spec in group.specs)
        course.say(f"Plan for {names}:\n{group.plan}")
    outcome = Outcome()
    waves = [group.plan.waves for group in groups]
    for number, group in enumerate(groups):
        left = None if course.deadline is None else course.deadline - time.monotonic()
        if left is not None and left <= 0:
            for spec in group.specs:
                outcome.lost[spec.name] = "the time was over before it began"
            continue
        seconds, until = None, None
        if left is not None:
            seconds = max(0.5, left / sum(waves[number:]) - _START_S)
            until = time.time() + 0.9 * left  # what they predict and write takes time, too
        suffix = "_BAG_L1" if course.num_bag_folds > 1 else ""
        found = tune(
            _MakeModel(group.specs, course, seconds, until, group.gpu),
            {"model": [spec.name for spec in group.specs]},
            num_trials=len(group.candidates),
            searcher=group.candidates,
            num_bag_folds=course.num_bag_folds,
            total=course.total,
            parallel_folds=course.parallel_folds,
            metric=course.metric,
            mode="max",
            backend=course.backend,
            seed=0,
            targets=course.y,
            progress=course.progress,
            lease_timeout_s=left,
            time_limit_s=left,
            keep="all",
            preload=_modules(group, course.num_bag_folds),
            per_model=group.quotas["per_model"],
            per_bag=group.quotas.get("per_bag"),
        )
        _collect(found, group, suffix, outcome)
        if found.interrupted and (course.deadline is None or time.monotonic() < course.deadline):
            raise KeyboardInterrupt  # tune has ended the models; the user wants the fit to end
    return outcome


def _modules(group: _Group, num_bag_folds: int) -> list[str]:
    """What the models of a group import."""
    names = ["pandas", "sklearn.compose", "sklearn.ensemble", "sklearn.feature_extraction.text", "sklearn.linear_model"]
    kinds = [spec.key for spec in group.specs]
    if "GBM" in kinds:
        names.append("lightgbm")
    networks = sum(kind not in ("LR", "RF", "XT", "GBM") for kind in kinds)
    # The others need not wait for torch, which takes seconds, if only few models need it.
    if networks == len(kinds) or networks * max(num_bag_folds, 1) > 2:
        names.append("trainloop.tabular.network")
    return names


def _groups(specs: list[Spec], course: Course) -> list[_Group]:
    bagging = course.num_bag_folds > 1
    by_shares: dict[Any, list[Spec]] = {}
    quotas: dict[Any, dict[str, ResourceQuota | None]] = {}
    for spec in specs:
        gpu = spec.may_use_gpus(course.gpus_asked) and float(course.total.num_gpus) > 0
        shares = spec.shares.over(course.shares)
        gpu = gpu and shares.num_gpus != 0
        bag = spec.bag_shares.over(course.bag_shares)
        own: dict[str, ResourceQuota | None] = {"per_model": quota_of(shares, gpus=gpu)}
        if bagging and bag != Shares():
            own["per_bag"] = quota_of(bag, gpus=gpu)
        key = (gpu, *own.items())
        by_shares.setdefault(key, []).append(spec)
        quotas[key] = own
    groups = []
    for key, members in by_shares.items():
        candidates = _Candidates(members, course.searcher, course.num_trials, seed=0)
        division = plan(
            course.total,
            num_trials=len(candidates),
            num_bag_folds=course.num_bag_folds,
            parallel_folds=course.parallel_folds,
            **quotas[key],
        )
        groups.append(_Group(members, candidates, division, quotas[key], key[0]))
    return groups


def _collect(found: TuneResult, group: _Group, suffix: str, outcome: Outcome) -> None:
    for number in range(len(group.candidates)):
        name = group.candidates.name(group.specs, number, suffix)
        trial = found.trials[number] if number < len(found.trials) else None
        if trial is None or trial.state != "done" or trial.score is None or not np.isfinite(trial.score):
            errors = list(trial.errors.values()) if trial is not None else []
            outcome.lost[name] = errors[0] if errors else "the time was over before it began"
            continue
        outcome.trained.append(Trained(name, trial, np.asarray(found.predictions_of(trial)), found))


def greedy_weights(predictions: list[Rows], truth: Rows, metric: Metric, second: Metric) -> list[float]:
    """Weights of an ensemble, by greedy selection with replacement (Caruana et al., 2004).

    Of equal candidates the one that is better by ``second`` is taken: few rows have few accuracies.
    """
    counts = np.zeros(len(predictions))
    total = np.zeros_like(predictions[0])
    best: tuple[tuple[float, float], Rows] | None = None
    for taken in range(1, _ROUNDS + 1):
        scores = [(metric(truth, p), second(truth, p)) for p in ((total + each) / taken for each in predictions)]
        chosen = max(range(len(scores)), key=scores.__getitem__)
        counts[chosen] += 1
        total = total + predictions[chosen]
        if best is None or scores[chosen] > best[0]:
            best = scores[chosen], counts / counts.sum()
    assert best is not None
    return [float(weight) for weight in best[1]]
