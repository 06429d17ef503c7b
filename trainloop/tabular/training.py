"""Train all models with ``tune``. Models with equal quotas share one plan and train at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trainloop._support.user_line import warn
from trainloop.errors import ConfigurationError
from trainloop.resources import Plan, plan
from trainloop.resources.enforce import applied
from trainloop.tabular.columns import Rows
from trainloop.tabular.ensemble import Ensemble, Trained
from trainloop.tabular.models import Given
from trainloop.tabular.specs import Options, Spec
from trainloop.tabular.targets import Task
from trainloop.tuning import EstimatorLoop, Fold, Trial, tune

__all__ = ["short", "train"]

_MODULES = ["pandas", "sklearn.compose", "sklearn.ensemble", "sklearn.feature_extraction.text", "sklearn.linear_model"]
_SPEC = "the model"  # in the space of a group: no setting has this name


@dataclass(frozen=True)
class _Group:
    """Models with equal quotas, as one trial each; or a single model whose settings are searched."""

    specs: list[Spec]
    gpu: bool
    trials: dict[str, Any]
    """Further arguments of ``tune``: number of trials, quotas and searcher."""
    plan: Plan

    def name_of(self, spec: Spec, trial: int = 0) -> str:
        return spec.name + "_BAG_L1" * (self.plan.num_folds > 1) + (f"/T{trial + 1}" if spec.space else "")

    @property
    def modules(self) -> list[str]:
        """Modules to import once, before the models' processes are forked."""
        networks = sum(spec.model.gpu == "always" for spec in self.specs)
        names = _MODULES + ["lightgbm"] * any(spec.model.needs == "lightgbm" for spec in self.specs)
        # The others need not wait seconds for torch if only one process needs it.
        if networks < len(self.specs) and networks * self.plan.num_folds < 2:
            return names
        # A process's first optimizer imports the compiler, which takes a second. Not with GPUs: nothing may access
        # them before the fork.
        return [*names, "trainloop.tabular.network"] + ["torch._dynamo"] * (not self.gpu)


def train(
    specs: list[Spec], task: Task, options: Options, say: Callable[[str], None], progress: bool
) -> tuple[Ensemble, dict[str, str]]:
    """Print the plans, train all models, and return their ensemble and the errors of those that were lost."""
    groups = _groups(specs, options)
    for group in groups:
        say(f"Plan for {', '.join(spec.name for spec in group.specs)}:\n{group.plan}")
    trained: dict[str, Trained] = {}
    rows: list[Rows] = []
    lost: dict[str, str] = {}
    notes: dict[str, None] = {}  # each once, in their order
    for number, group in enumerate(groups):
        lost |= dict.fromkeys(map(group.name_of, group.specs), "the time limit was reached before it started")
        limit, end = None, float("inf")
        if options.deadline is not None:
            left = options.deadline - time.monotonic()
            limit = left * group.plan.waves / sum(other.plan.waves for other in groups[number:])
            end = time.monotonic() + limit
            if left <= 0:
                continue
        found = tune(
            partial(_make_model, task, group.gpu),
            {**group.specs[0].space, _SPEC: group.specs},
            **{**options.division, **options.search, **group.trials},
            metric=task.metric,
            mode="max",
            seed=0,
            targets=task.y,
            progress=progress,
            lease_timeout_s=limit,
            time_limit_s=limit,
            keep="all",
            preload=group.modules,
        )
        if found.interrupted and time.monotonic() < end:
            raise KeyboardInterrupt  # tune has ended the models; the user wants the fit to end
        for trial in found.trials:
            spec, settings = _of(trial.params)
            name = group.name_of(spec, trial.number)
            lost[name] = next(iter(trial.errors.values()), "its score is not a number")
            if trial.state == "done" and trial.score is not None and np.isfinite(trial.score):
                del lost[name]
                rows.append(np.asarray(found.predictions_of(trial)))
                trained[name] = Trained(settings, found.predictor_of(trial, lazy=True), _row(trial, task))
                notes |= {note: None for facts in trial.facts.values() for note in facts["notes"]}
    if not trained:
        reasons = "\n".join(f"{name}: {why}" for name, why in lost.items())
        raise ConfigurationError(f"no model could be trained. Fix the errors, or allow more time:\n{reasons}")
    for note in notes:
        warn(note)
    with applied(options.own):
        left_s = None if options.end is None else options.end - time.monotonic()
        return Ensemble.of(task, trained, rows, left_s), lost


def _make_model(task: Task, gpu: bool, params: Mapping[str, Any], fold: Fold | None) -> EstimatorLoop:
    """``make_loop`` for :func:`~trainloop.tuning.tune`, called in the models' processes."""
    spec, settings = _of(params)
    rows = task.held_out if fold is None else (fold.train, fold.validation)
    assert rows is not None, "without folds there are rows to validate on"
    train, validation = ((task.table.iloc[part], task.y[part]) for part in rows)
    model = spec.model.make(Given(spec.columns, task.target, settings, gpu))
    return EstimatorLoop(model, train, validation, fit=lambda model, x, y: model.fit(x, y, validation))


def _of(params: Mapping[str, Any]) -> tuple[Spec, dict[str, Any]]:
    """Return the model and the settings of a trial."""
    spec: Spec = params[_SPEC]
    return spec, {**spec.fixed, **{name: value for name, value in params.items() if name != _SPEC}}


def _row(trial: Trial, task: Task) -> dict[str, Any]:
    """Return the row of a model in the leaderboard."""
    used_gpu = any(facts["used_gpu"] for facts in trial.facts.values())
    row = {"score_val": trial.score, "eval_metric": task.metric.name, "fit_time": trial.seconds}
    return {**row, "cpu_seconds": trial.cpu_seconds, "cpus": trial.cpus, "gpus": trial.gpus if used_gpu else 0.0}


def _groups(specs: list[Spec], options: Options) -> list[_Group]:
    members: dict[Any, list[Spec]] = {}
    for spec in specs:
        share = spec.share.filled(options.share)
        bag = spec.bag.filled(options.bag) if options.division["num_bag_folds"] > 1 else None
        asked = options.gpus_asked or spec.share.num_gpus not in ("auto", 0)
        gpu = spec.model.gpu == "always" or (spec.model.gpu == "asked" and asked)
        gpu = gpu and float(options.division["total"].num_gpus) > 0 and share.num_gpus != 0
        if not gpu:  # none for a model that can't use GPUs
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
    """Return one line of an error: the last one, or how the process ended."""
    lines = why.strip().splitlines() or [""]
    return (lines[0] if lines[0].startswith("The fold") else lines[-1])[:300]
