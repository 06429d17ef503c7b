"""Define ``TabularPredictor``, and train its models with ``tune``."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from sklearn.inspection import permutation_importance

from trainloop._support.keywords import refuses_unknown
from trainloop.checkpoint import folder
from trainloop.errors import ConfigurationError
from trainloop.extending import path_of, warn
from trainloop.resources import Plan, plan
from trainloop.resources.enforce import applied
from trainloop.resources.quota import checked_count
from trainloop.tabular.columns import Rows, as_text, read_table
from trainloop.tabular.ensemble import Ensemble, Trained
from trainloop.tabular.models import Given
from trainloop.tabular.specs import Options, Spec, parse_hyperparameters, parse_options
from trainloop.tabular.targets import METRICS, Problem, Task, find_metric, labelled_rows
from trainloop.tuning import EstimatorLoop, Fold, Trial, tune
from trainloop.tuning.result import short
from trainloop.tuning.storage import read_checked, write_checked

Data: TypeAlias = pd.DataFrame | str | os.PathLike[str]

_WHAT = ("tabular predictor", 4)
_FILE = "predictor.pkl"


class TabularPredictor:
    """Predict one column of a table from the other columns: numbers, categories, dates, text and pictures.

    Parameters
    ----------
    label : str
        Name of the column to predict.
    problem_type : {'binary', 'multiclass', 'regression'}, optional
        By default it is inferred from the label column, and printed.
    eval_metric : str or callable, optional
        Metric by which models are compared. The default is accuracy, or root mean squared error for regression. A
        function takes ``(y_true, y_pred)`` and returns a score, where greater is better.
    path : path, optional
        Folder in which ``fit`` saves the predictor. It is created if it does not exist.

    Examples
    --------
    >>> predictor = TabularPredictor(label="class").fit(train_data)  # doctest: +SKIP
    >>> predictor.leaderboard(test_data)  # doctest: +SKIP
    """

    @refuses_unknown(others=lambda: {"fit": TabularPredictor.fit})
    def __init__(
        self,
        label: str,
        problem_type: Problem | None = None,
        eval_metric: str | Callable[[Any, Any], float] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if problem_type not in (None, *get_args(Problem)):
            raise ConfigurationError(f"problem_type={problem_type!r}: must be one of {', '.join(METRICS)}, or None.")
        if label is None:
            raise ConfigurationError("label=None: must be the name of the column to predict.")
        self.label = as_text(label)
        self.path = _folder(path)
        self.lost: dict[str, str] = {}
        """Reason for the failure, by the name of each model that could not be trained."""
        self._asked = problem_type, eval_metric
        self._ensemble: Ensemble | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    @refuses_unknown
    def fit(
        self,
        train_data: Data,
        tuning_data: Data | None = None,
        *,
        hyperparameters: str | Mapping[Any, Any] | None = None,
        num_cpus: int | Literal["auto"] = "auto",
        num_gpus: float | Literal["auto"] = "auto",
        memory_limit: float | str | None = None,
        time_limit: float | None = None,
        num_bag_folds: int | None = None,
        ag_args_fit: Mapping[str, Any] | None = None,
        ag_args_ensemble: Mapping[str, Any] | None = None,
        hyperparameter_tune_kwargs: str | Mapping[str, Any] | None = None,
        presets: str | Mapping[str, Any] | None = None,
        verbosity: int = 2,
    ) -> TabularPredictor:
        """Train several models and an ensemble of them.

        The models train in parallel, each in its own process. The plan that divides the resources among the models is
        printed first. If a model fails or exceeds its memory limit, the others are not affected, and the reason is in
        :attr:`lost`. A second call starts from scratch.

        Parameters
        ----------
        train_data : DataFrame or path to a CSV or Parquet file
        tuning_data : DataFrame or path, optional
            Validation data. By default a part of ``train_data`` is held out. Not allowed with bagging.
        hyperparameters : mapping or str, optional
            Models with settings, such as ``{'GBM': [{}, {'extra_trees': True}], 'NN_TORCH': {'hidden': (64, 64)}}``, or
            a name that :func:`get_hyperparameter_config` accepts. Keys are LR, RF, XT, GBM, NN_TORCH, AG_TEXT_NN,
            AG_IMAGE_NN, the class of an estimator, or a function that returns a ``TTModel`` and is called as
            ``function(num_inputs, num_outputs, **settings)``. If a search is requested, a setting may be a list or a
            distribution of :mod:`trainloop.tuning`.
        num_cpus, num_gpus : number or 'auto'
            Total for all models.
        memory_limit : float or str, optional
            Total for all models, in GB or as text such as ``'512MiB'``.
        time_limit : float, optional
            Seconds for the whole fit.
        num_bag_folds : int
            If it is 2 or more, each model is a bag of that many models, trained and scored by cross-validation.
        ag_args_fit : mapping, optional
            ``num_cpus``, ``num_gpus`` and ``memory_limit`` of each single model, even in a bag.
        ag_args_ensemble : mapping, optional
            ``{'ag_args_fit': ...}`` with the resources of each bag. ``'fold_fitting_strategy': 'sequential_local'``
            trains the models of a bag one after the other.
        hyperparameter_tune_kwargs : mapping or str, optional
            Request a search: ``{'searcher': 'random', 'scheduler': 'local', 'num_trials': 10}``. The scheduler is
            ``local`` or ``ray``.
        presets : str or mapping, optional
            ``'medium_quality'``, ``'good_quality'``, ``'high_quality'`` or ``'best_quality'``, which set
            ``num_bag_folds`` and ``hyperparameters``; or a mapping with these two keys.
        verbosity : int
            0: print nothing. 1: print failed models. 2: print columns, plans and the leaderboard, too. 3: print
            progress, too.

        Raises
        ------
        ConfigurationError
            If data or settings are invalid (raised before any process starts), or if no model could be trained.
        ResourceError
            If more resources are requested than the machine has.
        """
        began = time.monotonic()
        checked_count("verbosity", verbosity, 0)
        options = parse_options(
            {"num_cpus": num_cpus, "num_gpus": num_gpus, "memory_limit": memory_limit},
            hyperparameters=hyperparameters,
            num_bag_folds=num_bag_folds,
            time_limit=time_limit,
            ag_args_fit=ag_args_fit,
            ag_args_ensemble=ag_args_ensemble,
            search=hyperparameter_tune_kwargs,
            presets=presets,
        )
        if self.path is not None:
            folder(self.path).check_writable()  # raises an error before the training, not after it
        say: Callable[[str], None] = print if verbosity >= 2 else lambda text: None
        with applied(options.process_quota):
            task = Task.read(train_data, tuning_data, self.label, *self._asked, options.division["num_bag_folds"])
            specs, skipped = parse_hyperparameters(
                options.hyperparameters, task.columns, task.target.problem, searches=options.searches
            )
        say(f"{self.label!r} is a {task.target.problem} problem, scored by {task.metric.name}.\n{task.columns}")
        self._ensemble, lost = train(specs, task, options, say, progress=verbosity >= 3)
        self.lost, self._fit_seconds = skipped | lost, time.monotonic() - began
        if verbosity >= 1:
            for name, why in self.lost.items():
                print(f"without {name}: {short(why)}", file=sys.stderr)
            say(self.leaderboard().to_string(index=False))
        if self.path is not None:
            self.save()
        return self

    # -- prediction --------------------------------------------------------------------------------------------------

    def predict(self, data: Data, model: str | None = None) -> pd.Series:
        """Predict classes or numbers with the ensemble or the named model.

        The result has the same index as ``data``. Classes have the type of the label column.
        """
        frame, found = read_table(data, "data"), self._trained
        return pd.Series(found.target.decode(found.predict(frame, model)), index=frame.index, name=self.label)

    def predict_proba(self, data: Data, model: str | None = None) -> pd.DataFrame:
        """Predict a probability for each class. The result has the same index as ``data``, and a column for each class.

        Raises
        ------
        ConfigurationError
            For a regression problem.
        """
        frame, found = read_table(data, "data"), self._trained
        if found.target.problem == "regression":
            raise ConfigurationError("predict_proba: a regression has no probabilities. Use predict.")
        return pd.DataFrame(found.predict(frame, model), index=frame.index, columns=list(found.target.classes))

    def evaluate(self, data: Data, model: str | None = None) -> dict[str, float]:
        """Return scores on labelled data, with the ``eval_metric`` first. Greater is better, so errors are negative."""
        frame, found = labelled_rows(data, self.label), self._trained
        rows, truth = found.predict(frame, model), found.target.encode(frame[self.label])
        problem = found.target.problem
        metrics = {found.metric.name: found.metric} | {name: find_metric(name, problem) for name in METRICS[problem]}
        return {name: metric(truth, rows) for name, metric in metrics.items()}

    def leaderboard(self, data: Data | None = None) -> pd.DataFrame:
        """Return a table of all models, best first, with the scores and resources of each model.

        ``score_val`` is the score on rows that the model did not train on, and ``score_test`` is the score on ``data``.
        For a bag, ``fit_time`` is the total time of its models in seconds, and ``cpu_seconds`` their total CPU time.
        ``cpus`` and ``gpus`` are the resources of each model. The ensemble's row has the sums over its models.
        """
        return self._trained.board(None if data is None else labelled_rows(data, self.label))

    def feature_importance(self, data: Data, num_shuffle_sets: int = 5, subsample_size: int = 5000) -> pd.DataFrame:
        """Return the permutation importance: the decrease of the score when a column is shuffled, largest first.

        ``importance`` is the mean decrease over ``n`` shuffles, and ``stddev`` the standard deviation (NaN for one
        shuffle). At most ``subsample_size`` rows are read.
        """
        frame, found = labelled_rows(data, self.label), self._trained
        rows = checked_count("subsample_size", subsample_size, 1)
        frame = frame.sample(min(len(frame), rows), random_state=0)
        worse = permutation_importance(
            self,
            found.columns.used_in(frame),
            found.target.encode(frame[self.label]),
            scoring=lambda _, table, truth: found.metric(truth, found.predict(table)),
            n_repeats=checked_count("num_shuffle_sets", num_shuffle_sets, 1),
            random_state=0,
        )
        table = pd.DataFrame(worse.importances.T, columns=[*found.columns.kinds]).agg(["mean", "std", "count"]).T
        table.columns = pd.Index(["importance", "stddev", "n"])
        return table.astype({"n": int}).sort_values("importance", ascending=False)

    def fit_summary(self) -> dict[str, Any]:
        """Print a summary of ``fit``, and return it as a dict."""
        found = self._trained
        board = self.leaderboard()
        print(f"{self!r}, by {found.metric.name}, in {self._fit_seconds:.1f} s\n{found.columns}")
        print(board.to_string(index=False))
        print("ensemble: " + ", ".join(f"{weight:.2f} {name}" for name, weight in found.weights.items()))
        for name, why in self.lost.items():
            print(f"without {name}: {short(why)}")
        return {
            "problem_type": found.target.problem,
            "eval_metric": found.metric.name,
            "columns": dict(found.columns.kinds),
            "dropped": dict(found.columns.dropped),
            "leaderboard": board,
            "weights": dict(found.weights),
            "settings": {name: dict(each.settings) for name, each in found.models.items()},
            "lost": dict(self.lost),
            "seconds": self._fit_seconds,
        }

    @property
    def problem_type(self) -> str:
        """``binary``, ``multiclass`` or ``regression``."""
        return self._trained.target.problem

    @property
    def class_labels(self) -> list[Any]:
        """Sorted classes; empty for a regression."""
        return list(self._trained.target.classes)

    @property
    def model_names(self) -> list[str]:
        """Names for the ``model`` argument of ``predict``."""
        return self._trained.names

    @property
    def _trained(self) -> Ensemble:
        if self._ensemble is None:
            raise ConfigurationError("this predictor is not trained. Call fit(train_data) first.")
        return self._ensemble

    # -- on disk -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Save the predictor to a folder (by default ``path``, or a new folder), and return the folder's path."""
        state = {**self.__dict__, "_ensemble": self._trained}
        now = f"TabularModels/{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
        self.path = _folder(path) or self.path or os.path.abspath(now)
        folder(self.path).check_writable()
        write_checked(Path(self.path) / _FILE, *_WHAT, state, "predictor")
        return self.path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool = False) -> TabularPredictor:
        """Load a predictor that :meth:`save` wrote.

        The file contains pickled objects, and unpickling can execute arbitrary code. Therefore you or root must own the
        file and its folder, and other users must not be able to write to them.

        Parameters
        ----------
        path : path
            The folder.
        trusted : bool
            Skip this check, for a file from a source that you trust.

        Raises
        ------
        CheckpointError
            If the file does not exist, is damaged, or was written by an incompatible version.
        ConfigurationError
            If other users could have written the file.
        """
        where = str(_folder(path))
        state = read_checked(Path(where) / _FILE, *_WHAT, "TabularPredictor.save()", trusted=trusted)
        predictor = cls.__new__(cls)
        predictor.__dict__.update(state, path=where)
        return predictor

    def __repr__(self) -> str:
        found = self._ensemble
        state = "not trained" if found is None else f"{found.target.problem}, {len(found.models)} models"
        return f"TabularPredictor(label={self.label!r}, {state})"


# -- training: models with equal quotas share one plan and train at the same time --------------------------------------


_SPEC = "the model"  # name of the model's parameter in a group's search space; no setting has this name


@dataclass(frozen=True)
class _Group:
    """Models with equal quotas, where each model is one trial; or a single model whose settings are searched."""

    specs: list[Spec]
    gpu: bool
    trials: dict[str, Any]
    """Further arguments of ``tune``: number of trials, quotas and searcher."""
    plan: Plan

    def name_of(self, spec: Spec, trial: int = 0) -> str:
        return spec.name + "_BAG_L1" * (self.plan.num_folds > 1) + (f"/T{trial + 1}" if spec.space else "")

    @property
    def modules(self) -> list[str]:
        """Modules that the fork server imports before the models' processes are forked."""
        names = [__name__] + ["lightgbm"] * any(spec.model.needs == "lightgbm" for spec in self.specs)
        # The first optimizer in a process imports the compiler, which takes a second. With GPUs it is not imported
        # here, because nothing may access GPUs before the fork.
        networks = any(spec.model.gpu == "always" for spec in self.specs)
        return names + ["torch._dynamo"] * (networks and not self.gpu)


def train(
    specs: list[Spec], task: Task, options: Options, say: Callable[[str], None], progress: bool
) -> tuple[Ensemble, dict[str, str]]:
    """Print the plans and train all models; return the ensemble, and the errors of the models that failed."""
    groups = _groups(specs, options)
    for group in groups:
        say(f"Plan for {', '.join(spec.name for spec in group.specs)}:\n{group.plan}")
    trained: dict[str, Trained] = {}
    rows: list[Rows] = []
    lost: dict[str, str] = {}
    notes: dict[str, None] = {}  # distinct warnings, in order
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
            raise KeyboardInterrupt  # tune returns after Ctrl-C, but the user wants to end fit
        for trial in found.trials:
            spec, settings = _spec_and_settings(trial.params)
            name = group.name_of(spec, trial.number)
            if trial.state != "done":
                lost[name] = next(iter(trial.errors.values()))
                continue
            predictions = np.asarray(found.predictions_of(trial))
            # The score of all rows together, as that of the ensemble. A fold may lack a class that the metric needs.
            row = _leaderboard_row(trial, task, task.metric(task.truth, predictions))
            lost[name] = (
                f"its score ({task.metric.name}) is not a number. The validation rows may lack a class: use more rows, "
                "or another eval_metric"
            )
            if np.isfinite(row["score_val"]) and not np.isfinite(predictions).all():
                lost[name] = "its predictions are not finite: the training has diverged"
            elif np.isfinite(row["score_val"]):
                del lost[name]
                rows.append(predictions)
                trained[name] = Trained(settings, found.predictor_of(trial, lazy=True), row)
                notes |= {note: None for facts in trial.facts.values() for note in facts["notes"]}
    if not trained:
        reasons = "\n".join(f"{name}: {why}" for name, why in lost.items())
        raise ConfigurationError(f"no model could be trained. Fix the errors, or allow more time:\n{reasons}")
    for note in notes:
        warn(note)
    with applied(options.process_quota):
        left_s = None if options.end is None else options.end - time.monotonic()
        return Ensemble.of(task, trained, rows, left_s), lost


def _make_model(task: Task, gpu: bool, params: Mapping[str, Any], fold: Fold | None) -> EstimatorLoop:
    """Return the loop of one model. This is ``make_loop`` for :func:`~trainloop.tuning.tune`."""
    spec, settings = _spec_and_settings(params)
    rows = task.held_out if fold is None else (fold.train, fold.validation)
    assert rows is not None, "without folds there are rows to validate on"
    train, validation = ((task.table.iloc[part], task.y[part]) for part in rows)
    model = spec.model.make(Given(spec.columns, task.target, settings, gpu))
    return EstimatorLoop(model, train, validation, fit=lambda model, x, y: model.fit(x, y, validation))


def _spec_and_settings(params: Mapping[str, Any]) -> tuple[Spec, dict[str, Any]]:
    """Return the model and the settings of a trial."""
    spec: Spec = params[_SPEC]
    return spec, {**spec.fixed, **{name: value for name, value in params.items() if name != _SPEC}}


def _leaderboard_row(trial: Trial, task: Task, score: float) -> dict[str, Any]:
    """Return a model's row in the leaderboard."""
    used_gpu = any(facts["used_gpu"] for facts in trial.facts.values())
    row = {"score_val": score, "eval_metric": task.metric.name, "fit_time": trial.seconds}
    return {**row, "cpu_seconds": trial.cpu_seconds, "cpus": trial.cpus, "gpus": trial.gpus if used_gpu else 0.0}


def _folder(path: Any) -> str | None:
    """Return an absolute path, or None."""
    given = path_of("TabularPredictor", "path", path, optional=True)
    return None if given is None else os.path.abspath(given)


def _groups(specs: list[Spec], options: Options) -> list[_Group]:
    members: dict[Any, list[Spec]] = {}
    for spec in specs:
        share = spec.share.filled(options.share)
        bag = spec.bag.filled(options.bag) if options.division["num_bag_folds"] > 1 else None
        asked = options.gpus_asked or spec.share.num_gpus not in ("auto", 0)
        gpu = spec.model.gpu == "always" or (spec.model.gpu == "asked" and asked)
        gpu = gpu and float(options.division["total"].num_gpus) > 0 and share.num_gpus != 0
        if not gpu:  # the model uses no GPU
            share, bag = replace(share, num_gpus=0), bag and replace(bag, num_gpus=0)
        members.setdefault((gpu, share, bag, spec.name if spec.space else ""), []).append(spec)
    groups = []
    for (gpu, share, bag, searched), together in members.items():
        # Networks are first, because they import torch while the other models train.
        together.sort(key=lambda spec: spec.model.gpu != "always")
        trials: dict[str, Any] = {"num_trials": options.search["num_trials"] if searched else len(together)}
        trials |= {"per_model": share, "per_bag": bag}
        division = plan(**options.division, **trials)
        groups.append(_Group(together, gpu, trials if searched else {**trials, "searcher": "grid"}, division))
    return groups
