"""The models of a fit, trained by ``tune`` under printed plans: those with equal shares side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from trainloop.errors import ConfigurationError
from trainloop.resources import Plan, ResourceQuota, plan
from trainloop.tabular.columns import Rows
from trainloop.tabular.ensemble import Trained
from trainloop.tabular.models import Given
from trainloop.tabular.options import Options, below
from trainloop.tabular.specs import Spec
from trainloop.tabular.targets import Metric, Target
from trainloop.tuning import EstimatorLoop, Fold, TuneResult, tune

__all__ = ["Course", "short", "train"]

_START_S = 3.0  # a model's process has begun and imported what it needs
_MODULES = ["pandas", "sklearn.compose", "sklearn.ensemble", "sklearn.feature_extraction.text", "sklearn.linear_model"]
_AUTO = ResourceQuota()


@dataclass(frozen=True)
class Course:
    """What is trained on, and how."""

    options: Options
    table: pd.DataFrame
    """Cleaned."""
    y: Rows
    target: Target
    metric: Metric
    held_out: tuple[Rows, Rows] | None
    """Rows to train on and to validate on, without bagging."""
    deadline: float | None
    """Of the whole, by the monotonic clock."""


@dataclass(frozen=True)
class _Group:
    """Models with equal shares, one trial each; or one model, whose space is searched."""

    specs: list[Spec]
    gpu: bool
    trials: dict[str, Any]
    """Their number, shares and, where nothing is searched, order."""
    plan: Plan

    @property
    def searches(self) -> bool:
        return bool(self.specs[0].space)

    @property
    def space(self) -> dict[str, Any]:
        return self.specs[0].space or {"model": list(range(len(self.specs)))}

    def of(self, params: Mapping[str, Any]) -> tuple[Spec, dict[str, Any]]:
        """The model of a trial, and its settings."""
        spec = self.specs[0 if self.searches else params["model"]]
        return spec, {**spec.fixed, **(params if self.searches else {})}

    def named(self, trial: int) -> str:
        bagged = "_BAG_L1" if self.plan.num_folds > 1 else ""
        spec = self.specs[0 if self.searches else trial]
        return spec.name + bagged + (f"/T{trial + 1}" if self.searches else "")


@dataclass(frozen=True)
class _MakeModel:
    """``make_loop`` of :func:`~trainloop.tuning.tune`; travels to the models' processes."""

    group: _Group
    course: Course
    seconds: float | None
    until: float | None

    def __call__(self, params: Mapping[str, Any], fold: Fold | None) -> EstimatorLoop:
        spec, settings = self.group.of(params)
        course, gpu = self.course, self.group.gpu
        rows = course.held_out if fold is None else (fold.train, fold.validation)
        assert rows is not None, "without folds there are rows to validate on"
        train, validation = ((course.table.iloc[part], course.y[part]) for part in rows)
        model = spec.make(Given(spec.columns, course.target, settings, self.seconds, self.until, gpu))
        return EstimatorLoop(model, train, validation, fit=lambda model, x, y: model.fit(x, y, validation))


def train(
    specs: list[Spec], skipped: Mapping[str, str], course: Course, say: Callable[[str], None], progress: bool
) -> tuple[list[Trained], dict[str, str]]:
    """Train all, and tell why some are lost; the plans are said before the first begins. An error if all are."""
    groups = _groups(specs, course)
    for group in groups:
        say(f"Plan for {', '.join(spec.name for spec in group.specs)}:\n{group.plan}")
    trained: list[Trained] = []
    lost = dict(skipped)
    for number, group in enumerate(groups):
        left = None if course.deadline is None else course.deadline - time.monotonic()
        seconds, until, found = None, None, None
        if left is not None:
            seconds = max(0.5, left / sum(group.plan.waves for group in groups[number:]) - _START_S)
            until = time.time() + 0.9 * left  # what they predict and write takes time, too
        if left is None or left > 0:
            found = tune(
                _MakeModel(group, course, seconds, until),
                group.space,
                **{**course.options.division, **course.options.search, **group.trials},
                metric=course.metric,
                mode="max",
                seed=0,
                targets=course.y,
                progress=progress,
                lease_timeout_s=left,
                time_limit_s=left,
                keep="all",
                preload=_modules(group),
            )
            if found.interrupted and (course.deadline is None or time.monotonic() < course.deadline):
                raise KeyboardInterrupt  # tune has ended the models; the user wants the fit to end
        _collect(found, group, trained, lost)
    if not trained:
        reasons = "\n".join(f"{name}: {why}" for name, why in lost.items())
        raise ConfigurationError(f"no model could be trained. Mend what is wrong, or give more time:\n{reasons}")
    return trained, lost


def _groups(specs: list[Spec], course: Course) -> list[_Group]:
    bagging = course.options.division["num_bag_folds"] > 1
    members: dict[Any, list[Spec]] = {}
    for spec in specs:
        share, bag = below(spec.share, course.options.share), below(spec.bag, course.options.bag)
        own_bag = bag != _AUTO
        asked = course.options.gpus_asked or spec.share.num_gpus not in ("auto", 0)
        gpu = {"always": True, "asked": asked, "never": False}[spec.model.gpu]
        gpu = gpu and float(course.options.division["total"].num_gpus) > 0 and share.num_gpus != 0
        if not gpu:  # none for a model that can't use any
            share, bag = (replace(each, num_gpus=0) for each in (share, bag))
        key = gpu, None if share == _AUTO else share, bag if bagging and own_bag else None, spec.name * bool(spec.space)
        members.setdefault(key, []).append(spec)
    groups = []
    for (gpu, share, bag, searched), together in members.items():
        # Networks first: they import torch while the others train.
        together.sort(key=lambda spec: spec.model.gpu != "always")
        num_trials = course.options.search["num_trials"] if searched else len(together)
        trials = {"num_trials": num_trials, "per_model": share, "per_bag": bag}
        division = plan(**course.options.division, **trials)
        groups.append(_Group(together, gpu, trials if searched else {**trials, "searcher": "grid"}, division))
    return groups


def _modules(group: _Group) -> list[str]:
    """What the models of a group import."""
    networks = sum(spec.model.gpu == "always" for spec in group.specs)
    names = _MODULES + ["lightgbm"] * any(spec.model.needs == "lightgbm" for spec in group.specs)
    # The others need not wait for torch, which takes seconds, if only one process needs it.
    if networks < len(group.specs) and networks * group.plan.num_folds < 2:
        return names
    # A process's first optimizer imports the compiler, another second. Not where there are GPUs: nothing may look at
    # them before the fork.
    return [*names, "trainloop.tabular.network"] + ["torch._dynamo"] * (not group.gpu)


def _collect(found: TuneResult | None, group: _Group, trained: list[Trained], lost: dict[str, str]) -> None:
    begun = found.trials if found is not None else []
    for trial in begun:
        name = group.named(trial.number)
        if found is not None and trial.state == "done" and trial.score is not None and np.isfinite(trial.score):
            rows = np.asarray(found.predictions_of(trial))
            trained.append(Trained(name, trial, group.of(trial.params)[1], rows, found))
        else:
            lost[name] = next(iter(trial.errors.values()), "the time was over before it ended")
    expected = len(group.specs) if not group.searches else 1
    for number in range(len(begun), expected):
        lost[group.named(number)] = "the time was over before it began"


def short(why: str) -> str:
    """The line that says most: an error's last, or how a process ended."""
    lines = why.strip().splitlines() or [""]
    return (lines[0] if lines[0].startswith("The fold") else lines[-1])[:300]
