"""Training of all models by ``tune``. Models with equal quotas share one plan and train side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from trainloop.errors import ConfigurationError
from trainloop.resources import Plan, plan
from trainloop.tabular.columns import Rows
from trainloop.tabular.ensemble import Trained
from trainloop.tabular.models import Given
from trainloop.tabular.options import Options
from trainloop.tabular.specs import Spec
from trainloop.tabular.targets import Target
from trainloop.tuning import EstimatorLoop, Fold, tune
from trainloop.tuning.scoring import Scorer

__all__ = ["Course", "short", "train"]

_MODULES = ["pandas", "sklearn.compose", "sklearn.ensemble", "sklearn.feature_extraction.text", "sklearn.linear_model"]


@dataclass(frozen=True)
class Course:
    """The data and options that all models share."""

    options: Options
    table: pd.DataFrame
    """The cleaned table."""
    y: Rows
    target: Target
    metric: Scorer
    held_out: tuple[Rows, Rows] | None
    """Training and validation rows. None with bagging."""
    deadline: float | None
    """End of the time limit, on the monotonic clock."""


@dataclass(frozen=True)
class _Group:
    """Models with equal quotas, as one trial each; or a single model whose settings are searched."""

    specs: list[Spec]
    gpu: bool
    trials: dict[str, Any]
    """Further arguments of ``tune``: number of trials, quotas and searcher."""
    plan: Plan

    @property
    def searches(self) -> bool:
        return bool(self.specs[0].space)

    @property
    def space(self) -> dict[str, Any]:
        return self.specs[0].space or {"model": list(range(len(self.specs)))}

    def of(self, params: Mapping[str, Any]) -> tuple[Spec, dict[str, Any]]:
        """The model and the settings of a trial."""
        spec = self.specs[0 if self.searches else params["model"]]
        return spec, {**spec.fixed, **(params if self.searches else {})}

    def named(self, trial: int) -> str:
        bagged = "_BAG_L1" if self.plan.num_folds > 1 else ""
        return self.specs[0].name + f"{bagged}/T{trial + 1}" if self.searches else self.specs[trial].name + bagged

    @property
    def modules(self) -> list[str]:
        """Modules to import once, before the models' processes are forked."""
        networks = sum(spec.model.gpu == "always" for spec in self.specs)
        names = _MODULES + ["lightgbm"] * any(spec.model.needs == "lightgbm" for spec in self.specs)
        # The others need not wait for torch, which takes seconds, if only one process needs it.
        if networks < len(self.specs) and networks * self.plan.num_folds < 2:
            return names
        # A process's first optimizer imports the compiler, another second. Not where there are GPUs: nothing may look
        # at them before the fork.
        return [*names, "trainloop.tabular.network"] + ["torch._dynamo"] * (not self.gpu)


@dataclass(frozen=True)
class _MakeModel:
    """The ``make_loop`` for :func:`~trainloop.tuning.tune`. It is pickled into the models' processes."""

    group: _Group
    course: Course

    def __call__(self, params: Mapping[str, Any], fold: Fold | None) -> EstimatorLoop:
        spec, settings = self.group.of(params)
        rows = self.course.held_out if fold is None else (fold.train, fold.validation)
        assert rows is not None, "without folds there are rows to validate on"
        train, validation = ((self.course.table.iloc[part], self.course.y[part]) for part in rows)
        model = spec.model.make(Given(spec.columns, self.course.target, settings, self.group.gpu))
        return EstimatorLoop(model, train, validation, fit=lambda model, x, y: model.fit(x, y, validation))


def train(
    specs: list[Spec], skipped: Mapping[str, str], course: Course, say: Callable[[str], None], progress: bool
) -> tuple[list[Trained], dict[str, str]]:
    """Print the plans, train all models, and return the trained ones and the errors of the others."""
    groups = _groups(specs, course.options)
    for group in groups:
        say(f"Plan for {', '.join(spec.name for spec in group.specs)}:\n{group.plan}")
    trained: list[Trained] = []
    lost = dict(skipped)
    for number, group in enumerate(groups):
        names = [group.named(trial) for trial in range(1 if group.searches else len(group.specs))]
        lost |= dict.fromkeys(names, "the time was over before it began")
        limit, end = None, float("inf")
        if course.deadline is not None:
            left = course.deadline - time.monotonic()
            limit = left * group.plan.waves / sum(other.plan.waves for other in groups[number:])
            end = time.monotonic() + limit
            if left <= 0:
                continue
        found = tune(
            _MakeModel(group, course),
            group.space,
            **{**course.options.division, **course.options.search, **group.trials},
            metric=course.metric,
            mode="max",
            seed=0,
            targets=course.y,
            progress=progress,
            lease_timeout_s=limit,
            time_limit_s=limit,
            keep="all",
            preload=group.modules,
        )
        if found.interrupted and time.monotonic() < end:
            raise KeyboardInterrupt  # tune has ended the models; the user wants the fit to end
        for trial in found.trials:
            name = group.named(trial.number)
            lost[name] = next(iter(trial.errors.values()), "its score is no number")
            if trial.state == "done" and trial.score is not None and np.isfinite(trial.score):
                del lost[name]
                rows, models = np.asarray(found.predictions_of(trial)), found.predictor_of(trial, lazy=True)
                trained.append(Trained(name, trial, group.of(trial.params)[1], models, rows))
    if not trained:
        reasons = "\n".join(f"{name}: {why}" for name, why in lost.items())
        raise ConfigurationError(f"no model could be trained. Mend what is wrong, or give more time:\n{reasons}")
    return trained, lost


def _groups(specs: list[Spec], options: Options) -> list[_Group]:
    members: dict[Any, list[Spec]] = {}
    for spec in specs:
        share = spec.share.filled(options.share)
        bag = spec.bag.filled(options.bag) if options.folds > 1 else None
        asked = options.gpus_asked or spec.share.num_gpus not in ("auto", 0)
        gpu = spec.model.gpu == "always" or (spec.model.gpu == "asked" and asked)
        gpu = gpu and float(options.division["total"].num_gpus) > 0 and share.num_gpus != 0
        if not gpu:  # none for a model that can't use any
            share, bag = replace(share, num_gpus=0), bag and replace(bag, num_gpus=0)
        members.setdefault((gpu, share, bag, spec.name if spec.space else ""), []).append(spec)
    groups = []
    for (gpu, share, bag, searched), together in members.items():
        # Networks first: they import torch while the others train.
        together.sort(key=lambda spec: spec.model.gpu != "always")
        trials: dict[str, Any] = {"num_trials": options.search["num_trials"] if searched else len(together)}
        trials |= {"per_model": share, "per_bag": bag}
        division = plan(**options.division, **trials)
        groups.append(_Group(together, gpu, trials if searched else {**trials, "searcher": "grid"}, division))
    return groups


def short(why: str) -> str:
    """One line of an error: the last one, or how the process ended."""
    lines = why.strip().splitlines() or [""]
    return (lines[0] if lines[0].startswith("The fold") else lines[-1])[:300]
