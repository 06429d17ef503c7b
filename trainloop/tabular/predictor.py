"""``TabularPredictor``: fit, predict, evaluate, compare, save."""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, available
from trainloop.resources.enforce import applied, check_quota
from trainloop.tabular.columns import Columns, import_pandas, read_table
from trainloop.tabular.presets import PRESETS, named
from trainloop.tabular.specs import Shares, memory_of, parse_hyperparameters
from trainloop.tabular.targets import PROBLEMS, Metric, Problem, Rows, Target, find_metric, metrics_of
from trainloop.tabular.training import Course, Trained, greedy_weights, train
from trainloop.tuning.folds import make_folds
from trainloop.tuning.storage import read_checked, write_checked

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TabularPredictor"]

_HEAD = b"trainloop tabular predictor 1\n"
_FILE = "predictor.pkl"
_ENSEMBLE = "WeightedEnsemble_L2"
_TUNE_WORDS = {"searcher", "scheduler", "num_trials"}


class TabularPredictor:
    """Predicts a column of a table from the others: numbers, categories, dates, texts and pictures.

    Parameters
    ----------
    label : str
        Name of the column to predict.
    problem_type : {'binary', 'multiclass', 'regression'}, optional
        Inferred from the column, and said, where it is not given.
    eval_metric : str or callable, optional
        What models are compared by: accuracy, or the root mean squared error of a regression, by default. A function
        takes ``(y_true, y_pred)``; greater is better.
    path : path, optional
        Folder that ``fit`` saves to at its end.

    Examples
    --------
    >>> predictor = TabularPredictor(label="class").fit(train_data)  # doctest: +SKIP
    >>> predictor.leaderboard(test_data)  # doctest: +SKIP
    """

    def __init__(
        self,
        label: str,
        problem_type: Problem | None = None,
        eval_metric: str | Callable[[Any, Any], float] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if problem_type is not None and problem_type not in PROBLEMS:
            raise ConfigurationError(f"problem_type={problem_type!r}: must be one of {', '.join(PROBLEMS)}, or None.")
        self.label = str(label)
        self.path = None if path is None else os.fspath(path)
        self.lost: dict[str, str] = {}
        """Models that are not there, and why."""
        self._asked = problem_type, eval_metric
        self._target: Target | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_data: pd.DataFrame | str | os.PathLike[str],
        tuning_data: pd.DataFrame | str | os.PathLike[str] | None = None,
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
        """Train models side by side, each in a process of its own under a plan that is printed, and weigh them.

        A model that fails, or exceeds its memory, is lost alone; :attr:`lost` says why. A second call begins anew.

        Parameters
        ----------
        train_data : DataFrame or path to CSV or Parquet
        tuning_data : DataFrame or path, optional
            To validate on; by default a part of ``train_data`` is held out. Not with bagging.
        hyperparameters : mapping or str, optional
            Models and their settings: ``{'GBM': [{}, {'extra_trees': True}], 'NN_TORCH': {'hidden': (64, 64)}}``, or
            the name of a :func:`get_hyperparameter_config`. Keys are LR, RF, XT, GBM, NN_TORCH, AG_TEXT_NN,
            AG_IMAGE_NN, an estimator's class, or what makes a ``TTModel`` of ``(num_inputs, num_outputs,
            **settings)``. A setting may be a list or a distribution of :mod:`trainloop.tuning` to search in.
        num_cpus, num_gpus : number or 'auto'
            For all models together.
        memory_limit : float or str, optional
            For all models together, in GB, or text such as ``'512MiB'``.
        time_limit : float, optional
            Seconds for all.
        num_bag_folds : int
            2 or more: each model is a bag, whose parts predict the rows that they did not train on.
        ag_args_fit : mapping, optional
            ``num_cpus``, ``num_gpus`` and ``memory_limit`` of one model, or of one part of a bag.
        ag_args_ensemble : mapping, optional
            ``{'ag_args_fit': ...}`` of one bag; ``'fold_fitting_strategy': 'sequential_local'`` trains its parts one
            after the other.
        hyperparameter_tune_kwargs : mapping or str, optional
            ``{'searcher': 'random', 'scheduler': 'local', 'num_trials': 10}``; the scheduler is ``local`` or ``ray``.
        presets : str or mapping, optional
            ``'medium_quality'`` to ``'best_quality'``: names for arguments of this method.
        verbosity : int
            0 prints nothing, 1 the outcome, 2 columns and plans too, 3 also how the search stands.

        Raises
        ------
        ConfigurationError
            For data or settings that can't work, before any process starts.
        ResourceError
            For more than the machine has.
        """
        began = time.monotonic()
        preset = {**(named("preset", presets, PRESETS) if isinstance(presets, str) else presets or {})}
        hyperparameters = preset.pop("hyperparameters", None) if hyperparameters is None else hyperparameters
        folds = preset.pop("num_bag_folds", 0) if num_bag_folds is None else num_bag_folds
        if preset:
            raise ConfigurationError(f"presets has {', '.join(preset)}: takes hyperparameters and num_bag_folds.")
        if isinstance(folds, bool) or not isinstance(folds, int) or folds < 0:
            raise ConfigurationError(f"num_bag_folds={folds!r}: must be an int of 0 or more.")
        if time_limit is not None and not (isinstance(time_limit, (int, float)) and time_limit > 0):
            raise ConfigurationError(f"time_limit={time_limit!r}: must be a number of seconds above 0, or None.")
        say = print if verbosity >= 2 else _say_nothing
        ensemble_args = dict(ag_args_ensemble or {})
        bag_shares = Shares.parse("ag_args_ensemble['ag_args_fit']", ensemble_args.pop("ag_args_fit", None))
        strategy = ensemble_args.pop("fold_fitting_strategy", "parallel_local")
        if ensemble_args or strategy not in ("parallel_local", "sequential_local"):
            raise ConfigurationError(
                f"ag_args_ensemble={dict(ag_args_ensemble or {})!r}: takes 'ag_args_fit', and 'fold_fitting_strategy', "
                "which is 'parallel_local' or 'sequential_local'."
            )
        if folds <= 1 and bag_shares != Shares():
            warnings.warn("ag_args_ensemble is ignored: without num_bag_folds there are no bags.", stacklevel=2)
        searching = _parse_search(hyperparameter_tune_kwargs)
        total, shares, bag_shares, gpus_asked = _granted(
            num_cpus, num_gpus, memory_of(memory_limit), Shares.parse("ag_args_fit", ag_args_fit), bag_shares
        )

        # Within the quota here, too; not while the models train, which have it then.
        within = applied(ResourceQuota(total.num_cpus)) if num_cpus != "auto" else nullcontext()
        with within:
            frame, target, metric, columns, rows = self._understand(train_data, tuning_data, folds)
            specs, skipped = parse_hyperparameters(hyperparameters, columns, searches=searching is not None)
            say(f"{target.label!r} is a {target.problem} problem, scored by {metric.name}.\n{columns}")
            course = Course(
                table=columns.clean(frame, "train_data"),
                y=target.encode(frame[target.label]),
                target=target,
                metric=metric,
                total=total,
                shares=shares,
                bag_shares=bag_shares,
                gpus_asked=gpus_asked,
                num_bag_folds=folds,
                held_out=rows,
                **(searching or {"searcher": "random", "num_trials": 1, "backend": "local"}),
                parallel_folds=strategy == "parallel_local",
                # What follows the models takes its time too.
                deadline=None if time_limit is None else began + 0.95 * time_limit,
                say=say,
                progress=verbosity >= 3,
            )
        outcome = train(specs, course)
        lost = {**skipped, **outcome.lost}
        if not outcome.trained:
            reasons = "\n".join(f"{name}: {why}" for name, why in lost.items())
            raise ConfigurationError(f"no model could be trained. Mend what is wrong, or give more time:\n{reasons}")
        with applied(ResourceQuota(total.num_cpus)) if num_cpus != "auto" else nullcontext():
            weights, score = _weigh(outcome.trained, course)
        for note in dict.fromkeys(note for each in outcome.trained for note in each.notes):
            warnings.warn(note, stacklevel=2)
        self._target, self._metric, self._columns, self.lost = target, metric, columns, lost
        self._weights, self._ensemble_score = weights, score
        self._models = {each.name: each for each in outcome.trained}
        for each in outcome.trained:
            each.held_out = np.empty(0)  # has served
        self._fit_seconds = time.monotonic() - began
        if verbosity >= 1:
            for name, why in lost.items():
                print(f"without {name}: {_short(why)}", file=sys.stderr)
            say(self.leaderboard().to_string(index=False))
        if self.path is not None:
            self.save()
        return self

    def _understand(
        self, train_data: Any, tuning_data: Any, folds: int
    ) -> tuple[pd.DataFrame, Target, Metric, Columns, tuple[Rows, Rows] | None]:
        """The rows with a label, what is predicted, the columns, and which rows validate."""
        frame = self._labelled(read_table(train_data), "train_data")
        problem, eval_metric = self._asked
        target = Target.learn(self.label, frame[self.label], problem)
        metric = find_metric(eval_metric, target.problem)
        columns = Columns.learn(frame.drop(columns=self.label))
        if tuning_data is not None:
            if folds > 1:
                raise ConfigurationError(
                    "tuning_data with num_bag_folds: a bag validates on its own folds. Leave one of the two out."
                )
            more = self._labelled(read_table(tuning_data, "tuning_data"), "tuning_data")
            columns.clean(more, "tuning_data")
            own, other = len(frame), len(more)
            frame = import_pandas().concat([frame, more[[*columns.kinds, self.label]]], ignore_index=True)
            return frame, target, metric, columns, (np.arange(own), np.arange(own, own + other))
        rows = None if folds > 1 else _held_out(target.encode(frame[self.label]), target)
        return frame, target, metric, columns, rows

    def _labelled(self, frame: pd.DataFrame, what: str) -> pd.DataFrame:
        if self.label not in frame.columns:
            raise ConfigurationError(
                f"{what} has no column {self.label!r}, the label; it has {', '.join(map(repr, frame.columns))}. "
                f"Give a table with it, or TabularPredictor(label=...) its name."
            )
        known = frame[self.label].notna()
        if not known.any():
            raise ConfigurationError(f"the label {self.label!r} is missing in all {len(frame)} rows of {what}.")
        return frame[known]

    # -- prediction --------------------------------------------------------------------------------------------------

    def predict(self, data: pd.DataFrame | str | os.PathLike[str], model: str | None = None) -> pd.Series:
        """Classes, or numbers, with the index of ``data``; by the ensemble, or by the model of that name."""
        frame = read_table(data, "data")
        found = self._target_of_fit().decode(self._rows(frame, model))
        return import_pandas().Series(found, index=frame.index, name=self.label)

    def predict_proba(self, data: pd.DataFrame | str | os.PathLike[str], model: str | None = None) -> pd.DataFrame:
        """Chances of the classes, a column for each, with the index of ``data``.

        Raises
        ------
        ConfigurationError
            For a regression, which has none.
        """
        target = self._target_of_fit()
        if target.problem == "regression":
            raise ConfigurationError("predict_proba: a regression has no chances. Use predict.")
        frame = read_table(data, "data")
        rows = self._rows(frame, model)
        return import_pandas().DataFrame(rows, index=frame.index, columns=list(target.classes))

    def evaluate(self, data: pd.DataFrame | str | os.PathLike[str], model: str | None = None) -> dict[str, float]:
        """Scores on rows with a label, the ``eval_metric`` first; greater is better, so errors are negative."""
        target = self._target_of_fit()
        frame = self._labelled(read_table(data, "data"), "data")
        rows, truth = self._rows(frame, model), target.encode(frame[self.label])
        scorers = {self._metric.name: self._metric, **metrics_of(target.problem)}
        return {name: scorer(truth, rows) for name, scorer in scorers.items()}

    def leaderboard(self, data: pd.DataFrame | str | os.PathLike[str] | None = None) -> pd.DataFrame:
        """Models, the best first, and what each really had.

        ``score_val`` is of rows that a model did not train on, ``score_test`` of ``data``; greater is better.
        ``fit_time`` and ``cpu_seconds`` (counted by the system) are of all parts of a bag together; ``cpus`` and
        ``gpus`` those that each part had.
        """
        target, pandas = self._target_of_fit(), import_pandas()
        test = None
        if data is not None:
            frame = self._labelled(read_table(data, "data"), "data")
            test = self._columns.clean(frame), target.encode(frame[self.label])
        lines = []
        predicted = {name: each.predictor.predict(test[0]) for name, each in self._models.items()} if test else {}
        for name, each in self._models.items():
            trial = each.trial
            had = (trial.seconds, trial.cpu_seconds, trial.cpus, each.gpus)
            lines.append((name, trial.score, *had))
        parts = [self._models[name].trial for name in self._weights]
        whole = (sum(trial.seconds for trial in parts), sum(trial.cpu_seconds for trial in parts))
        most = max(trial.cpus for trial in parts), max(self._models[name].gpus for name in self._weights)
        lines.append((_ENSEMBLE, self._ensemble_score, *whole, *most))
        table = pandas.DataFrame(
            lines, columns=["model", "score_val", "fit_time", "cpu_seconds", "cpus", "gpus"]
        ).round({"fit_time": 2, "cpu_seconds": 2})
        table.insert(2, "eval_metric", self._metric.name)
        if test is not None:
            predicted[_ENSEMBLE] = sum(weight * predicted[name] for name, weight in self._weights.items())
            table.insert(1, "score_test", [self._metric(test[1], predicted[name]) for name in table["model"]])
        return table.sort_values(table.columns[1], ascending=False, kind="stable", ignore_index=True)

    def feature_importance(
        self, data: pd.DataFrame | str | os.PathLike[str], num_shuffle_sets: int = 5, subsample_size: int = 5000
    ) -> pd.DataFrame:
        """How much worse the score is where a column's values are shuffled, the most important column first."""
        target = self._target_of_fit()
        frame = self._labelled(read_table(data, "data"), "data")
        frame = frame.sample(min(len(frame), subsample_size), random_state=0)
        truth = target.encode(frame[self.label])
        whole = self._metric(truth, self._rows(frame, None))
        rng = np.random.default_rng(0)
        lines = {}
        for name in self._columns.kinds:
            losses = []
            for _ in range(num_shuffle_sets):
                shuffled = frame.assign(**{name: frame[name].to_numpy()[rng.permutation(len(frame))]})
                losses.append(whole - self._metric(truth, self._rows(shuffled, None)))
            lines[name] = (np.mean(losses), np.std(losses, ddof=1) if len(losses) > 1 else np.nan, len(losses))
        table = import_pandas().DataFrame.from_dict(lines, orient="index", columns=["importance", "stddev", "n"])
        return table.sort_values("importance", ascending=False)

    def fit_summary(self) -> dict[str, Any]:
        """What ``fit`` came to, printed and as a mapping."""
        target = self._target_of_fit()
        found = {
            "problem_type": target.problem,
            "eval_metric": self._metric.name,
            "columns": dict(self._columns.kinds),
            "dropped": dict(self._columns.dropped),
            "leaderboard": self.leaderboard(),
            "weights": dict(self._weights),
            "settings": {name: each.trial.params["settings"] for name, each in self._models.items()},
            "lost": dict(self.lost),
            "seconds": self._fit_seconds,
        }
        print(
            f"{target.label!r}: {target.problem}, by {self._metric.name}, in {self._fit_seconds:.1f} s\n{self._columns}"
        )
        print(found["leaderboard"].to_string(index=False))
        print("ensemble: " + ", ".join(f"{weight:.2f} {name}" for name, weight in self._weights.items()))
        for name, why in self.lost.items():
            print(f"without {name}: {_short(why)}")
        return found

    @property
    def problem_type(self) -> str:
        """``binary``, ``multiclass`` or ``regression``."""
        return self._target_of_fit().problem

    @property
    def class_labels(self) -> list[Any]:
        """The classes, sorted; empty for a regression."""
        return list(self._target_of_fit().classes)

    @property
    def model_names(self) -> list[str]:
        """Models that can be named in ``predict``."""
        self._target_of_fit()
        return [*self._models, _ENSEMBLE]

    def _target_of_fit(self) -> Target:
        if self._target is None:
            raise ConfigurationError("this predictor is not trained. Call fit(train_data) first.")
        return self._target

    def _rows(self, frame: pd.DataFrame, model: str | None) -> Rows:
        target = self._target_of_fit()
        table = self._columns.clean(frame)
        if model is not None and model != _ENSEMBLE:
            if model not in self._models:
                raise ConfigurationError(f"model={model!r}: there are {', '.join(self.model_names)}.")
            return np.asarray(self._models[model].predictor.predict(table))
        rows = sum(weight * self._models[name].predictor.predict(table) for name, weight in self._weights.items())
        assert target.num_outputs == 1 or rows.shape[1] == target.num_outputs
        return np.asarray(rows)

    # -- on disk -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the predictor into a folder, by default its own ``path`` or a new one; the folder's path."""
        self._target_of_fit()
        if path is not None:
            self.path = os.fspath(path)
        elif self.path is None:
            self.path = os.path.join("TabularModels", f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
        write_checked(Path(self.path) / _FILE, _HEAD, self.__dict__, "predictor")
        return self.path

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool = False) -> TabularPredictor:
        """Read what :meth:`save` wrote.

        The file holds pickled objects, which can run any code when they are read. So it is read only where nobody else
        can have written it: file and folder must belong to this user or to root, and not be writable by others.

        Parameters
        ----------
        path : path
            Of the folder.
        trusted : bool
            You vouch for the file, whoever may have written it: nothing is checked.

        Raises
        ------
        CheckpointError
            If there is none, or it is damaged.
        ConfigurationError
            If others may have written it.
        """
        import_pandas()
        state = read_checked(Path(path) / _FILE, _HEAD, "tabular predictor", "TabularPredictor.save()", trusted=trusted)
        predictor = cls.__new__(cls)
        predictor.__dict__.update(state, path=os.fspath(path))
        return predictor

    def __repr__(self) -> str:
        state = "not trained" if self._target is None else f"{self._target.problem}, {len(self._models)} models"
        return f"TabularPredictor(label={self.label!r}, {state})"


def _say_nothing(text: str) -> None:
    pass


def _short(why: str) -> str:
    """The line that says most: an error's last, or how a process ended."""
    lines = why.strip().splitlines() or [""]
    return (lines[0] if lines[0].startswith("The fold") else lines[-1])[:300]


def _parse_search(given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    words = {"num_trials": 10, **({"searcher": given} if isinstance(given, str) else given)}
    unknown = set(words) - _TUNE_WORDS
    searcher = words.get("searcher", "random")
    scheduler = words.get("scheduler", "local")
    if unknown or scheduler not in ("local", "ray"):
        raise ConfigurationError(
            f"hyperparameter_tune_kwargs={given!r}: takes searcher ('random', 'grid', 'optuna'), scheduler "
            "('local', 'ray') and num_trials."
        )
    trials = words["num_trials"]
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ConfigurationError(f"hyperparameter_tune_kwargs num_trials={trials!r}: must be an int of 1 or more.")
    return {"searcher": "random" if searcher == "auto" else searcher, "num_trials": trials, "backend": scheduler}


def _granted(
    num_cpus: Any, num_gpus: Any, memory: Any, shares: Shares, bag_shares: Shares
) -> tuple[ResourceQuota, Shares, Shares, bool]:
    """What all models together have, in figures; shares without GPUs where there is none to be had."""
    machine = available()
    asked = (num_gpus != "auto" and bool(num_gpus)) or bool(shares.num_gpus) or bool(bag_shares.num_gpus)
    if asked and not machine.num_gpus:
        ResourceQuota(num_gpus=num_gpus)  # a figure that can't be is an error all the same
        warnings.warn(
            f"num_gpus={num_gpus!r}: no GPU is visible here, so all models train on the CPU. Check "
            "CUDA_VISIBLE_DEVICES and the driver, or ask for num_gpus=0 to silence this.",
            stacklevel=3,
        )
        num_gpus, asked = 0, False
        shares, bag_shares = (Shares(each.num_cpus, None, each.memory) for each in (shares, bag_shares))
    quota = ResourceQuota(num_cpus, num_gpus, "auto" if memory is None else memory)
    # A run may hold one and a half GPUs, which its models share.
    whole: Any = "auto" if num_gpus == "auto" else math.ceil(num_gpus)
    check_quota(ResourceQuota(quota.num_cpus, whole, quota.memory), machine=machine)
    cpus = machine.num_cpus if num_cpus == "auto" else num_cpus
    gpus = machine.num_gpus if num_gpus == "auto" else num_gpus
    return ResourceQuota(cpus, gpus, quota.memory), shares, bag_shares, asked


def _held_out(y: Rows, target: Target) -> tuple[Rows, Rows]:
    """Rows to train on and to validate on: AutoGluon's share of them, of each class its part."""
    rows = len(y)
    share = max(0.1, min(0.2, 500 / rows)) if rows < 5000 else max(0.01, min(0.1, 2500 / rows))
    if rows < 2:
        raise ConfigurationError(f"train_data has {rows} row with a label: one is to train on, and one to validate on.")
    fold = make_folds(rows, min(rows, round(1 / share)), seed=0, classes=y if target.classes else None)[0]
    train, validation = fold.train, fold.validation
    if target.classes:  # a class with a single row can only be learnt
        alone = validation[~np.isin(y[validation], y[train])]
        if len(alone) < len(validation):
            train, validation = np.sort(np.append(train, alone)), np.setdiff1d(validation, alone)
    return train, validation


def _weigh(trained: list[Trained], course: Course) -> tuple[dict[str, float], float]:
    """Weights of the ensemble's models, and its score on the rows that they were not trained on."""
    truth = course.y if course.held_out is None else course.y[course.held_out[1]]
    other = find_metric("log_loss" if course.target.classes else "root_mean_squared_error", course.target.problem)
    weights = greedy_weights([each.held_out for each in trained], truth, course.metric, other)
    named_weights = {each.name: weight for each, weight in zip(trained, weights) if weight > 0}
    mixed = sum(weight * each.held_out for each, weight in zip(trained, weights))
    return named_weights, course.metric(truth, mixed)
