"""The result of a search: all trials, and the best trial, whose models (one, or those of folds) predict."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainloop.errors import ConfigurationError
from trainloop.extending import import_extra, path_of
from trainloop.history import format_table, html_table
from trainloop.resources import Plan
from trainloop.tuning import fitting
from trainloop.tuning.fitting import LoopModel, align, by_column, is_number
from trainloop.tuning.folds import Fold
from trainloop.tuning.storage import read, read_checked, write_checked

State = Literal["done", "partial", "failed", "interrupted"]


@dataclass
class Trial:
    """One setting of the parameters, with the results of its models."""

    number: int
    """Number of the trial, counted from 0 in the order of proposal."""
    params: dict[str, Any]
    """Parameters that ``make_loop`` received."""
    scores: list[float | None]
    """Score of each fold, None for a fold without a score. Without bagging, the list has one score."""
    seconds: float
    """Total duration of the trial's folds, in seconds."""
    state: State
    """``done``: all folds finished; ``partial``: some folds failed; ``failed``: all folds failed; ``interrupted``: the
    search ended first."""
    errors: dict[int, str] = field(default_factory=dict)
    """By fold, the traceback of a failed fold, or a description of how the fold's process ended."""
    cpus: int = 0
    """Number of CPUs that each model of the trial could run on."""
    gpus: float = 0.0
    """Number of GPUs, or fraction of a GPU, that each model of the trial could use."""
    cpu_seconds: float = 0.0
    """CPU seconds used by all folds, at most ``cpus`` times ``seconds``."""
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The ``facts`` attribute of each fold's model, by fold; an empty dict if the model has none."""

    @property
    def score(self) -> float | None:
        """Mean over the folds that have a score; None if no fold has a score."""
        present = [score for score in self.scores if score is not None]
        return sum(present) / len(present) if present else None


def best_first(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """Return the trials, best first. Complete trials rank before all others, and trials without a score are last."""
    sign = 1 if mode == "min" else -1
    return sorted(trials, key=lambda t: (not is_number(t.score), t.state != "done", sign * (t.score or 0.0), t.number))


def best_of(trials: Sequence[Trial], mode: str) -> Trial | None:
    """Return the best trial, or None if no trial has a score."""
    return next((trial for trial in best_first(trials, mode) if is_number(trial.score)), None)


def short(error: str) -> str:
    """Return one line of an error: the last line of a traceback, or the line about how the process ended."""
    lines = error.strip().splitlines() or [""]
    return (lines[0] if lines[0].startswith("The fold") else lines[-1])[:300]


@dataclass(eq=False, repr=False)
class TuneResult:
    """The trials of a search, the best trial, and the models of that trial.

    :func:`~trainloop.tuning.tune` returns it. Print it to see a table of the trials.
    """

    trials: list[Trial]
    """All trials that were started, in order."""
    metric: str
    """Name of the metric."""
    mode: str
    """``min`` or ``max``."""
    plan: Plan
    """Resources of the search, of each trial and of each model."""
    folder: Path
    """Folder with parameters, predictions, models and logs. Without ``storage``, it is deleted with this result."""
    folds: list[Fold] | None
    """Folds of the bag; None without bagging."""
    interrupted: bool = False
    """True if the search was stopped before it had finished."""
    trusted: bool = False
    """True if the folder is read without checking who may have written it."""
    num_rows: int | None = None
    """Number of rows of ``data`` or ``targets``; None if ``tune`` was called without them."""

    @property
    def best_trial(self) -> Trial:
        """The trial with the best score.

        Raises
        ------
        ConfigurationError
            If no trial has a score. The message contains the first error.
        """
        best = best_of(self.trials, self.mode)
        if best is None:
            errors = [error for trial in self.trials for error in trial.errors.values()]
            scores = [trial.score for trial in self.trials if trial.score is not None]
            why = "No trial was started."
            if errors:
                why = f"See the errors in result.trials. The first error:\n{errors[0]}"
            elif scores:
                why = "The scores are NaN: the trainings diverged, or the metric is undefined for these rows."
            elif self.trials:
                why = "No trial has finished."
            raise ConfigurationError(f"None of the {len(self.trials)} trials has a score. {why}")
        return best

    @property
    def best_params(self) -> dict[str, Any]:
        """Parameters of the best trial."""
        return self.best_trial.params

    @property
    def best_score(self) -> float:
        """Score of the best trial: the mean over the trial's folds."""
        score = self.best_trial.score
        assert score is not None
        return score

    @property
    def predictor(self) -> BaggedPredictor:
        """The best trial's models as one predictor. Call its ``save`` to keep it."""
        return self.predictor_of(self.best_trial)

    def predictor_of(self, trial: Trial, *, lazy: bool = False) -> BaggedPredictor:
        """Return the models of any trial as one predictor.

        Parameters
        ----------
        trial : Trial
            One of :attr:`trials`. For a trial other than the best, this requires ``tune(..., keep='all')``.
        lazy : bool
            If True, read the models' files only when a model is first needed. Until then, the predictor keeps this
            result and its folder alive.
        """
        paths = [folder / "model.pkl" for _, folder in self._finished(trial)]
        if not all(path.exists() for path in paths):
            raise ConfigurationError(
                f"trial {trial.number} is not the best trial, so its models were not kept. Use tune(..., keep='all')."
            )
        predictor = BaggedPredictor(lambda: [self._read_stored(path) for path in paths])
        return predictor if lazy else BaggedPredictor(predictor._read())

    def predictions_of(self, trial: Trial) -> Any:
        """Return a trial's predictions for the rows that its models did not train on.

        With bagging, they have the same form as :attr:`out_of_fold_predictions`. Without bagging, they are the
        predictions for the loop's validation set. Class probabilities have one column for each class that any fold was
        trained on, in sorted order.

        Raises
        ------
        ConfigurationError
            If the trial has no finished fold.
        """
        finished = self._finished(trial)
        if not finished:
            raise ConfigurationError(f"trial {trial.number} has no finished fold. See its attribute errors.")
        predictions = [self._read_stored(folder / "predictions.pkl") for _, folder in finished]
        if self.folds is None:
            return predictions[0]
        classes = [self._read_stored(folder / "result.pkl").get("classes") for _, folder in finished]
        numbers = [fold for fold, _ in finished]
        return by_column(lambda *rows: self._joined(dict(zip(numbers, align(rows, classes)))), *predictions)

    def _joined(self, parts: dict[int, Any]) -> Any:
        """Return the predictions of folds in the order of the data's rows."""
        assert self.folds is not None, "the caller has looked"
        first = next(iter(parts.values()))
        last = max(int(part.max()) for fold in self.folds for part in (fold.train, fold.validation))
        rows = self.num_rows or last + 1
        held_out = {row for fold in parts for row in self.folds[fold].validation.tolist()}
        gaps = len(held_out) < rows
        dtype = np.result_type(*parts.values()) if first.dtype.kind in "biufcUS" else first.dtype
        if gaps and dtype.kind not in "fc":
            dtype = np.dtype(object)
        whole = np.full((rows, *first.shape[1:]), np.nan if dtype.kind in "fc" else None if gaps else 0, dtype=dtype)
        for fold, part in parts.items():
            whole[self.folds[fold].validation] = part
        return whole

    def predict(self, data: Any) -> Any:
        """Return the mean prediction of the best trial's models; see :meth:`BaggedPredictor.predict`."""
        return self.predictor.predict(data)

    @property
    def out_of_fold_predictions(self) -> Any:
        """The best trial's prediction for each row of the data, from the model that did not train on that row.

        If a fold failed, its rows are NaN, or None if predictions are not floats. The same applies to rows that no fold
        of your own ``folds`` holds out. If several folds hold out a row, the last fold counts.

        Raises
        ------
        ConfigurationError
            If the search does not use bagging.
        """
        if self.folds is None:
            raise ConfigurationError("out-of-fold predictions need folds. Use tune(..., num_bag_folds=5).")
        return self.predictions_of(self.best_trial)

    def _read_stored(self, path: Path) -> Any:
        return read(path, trusted=self.trusted)

    def _finished(self, trial: Trial) -> list[tuple[int, Path]]:
        folder = self.folder / f"trial-{trial.number:04d}"
        if trial.score is not None and not folder.exists():
            raise ConfigurationError(
                f"{str(self.folder)!r} has been deleted. Without storage, it is deleted with the result that tune "
                "returned; copies of that result don't keep it. Use tune(..., storage=folder), or save the predictor."
            )
        return [(fold, folder / f"fold-{fold}") for fold, score in enumerate(trial.scores) if score is not None]

    # -- display -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Return a list with a dict for each trial, best first; ``pandas.DataFrame`` accepts it.

        If a parameter has the name of another column, such as ``seconds``, its own column is ``params.seconds``.
        """
        taken = ("trial", self.metric, "folds", "seconds", "state")
        return [
            {
                "trial": trial.number,
                **{f"params.{name}" if name in taken else name: value for name, value in trial.params.items()},
                self.metric: trial.score,
                "folds": trial.scores,
                "seconds": round(trial.seconds, 2),
                "state": trial.state,
            }
            for trial in best_first(self.trials, self.mode)
        ]

    def _repr_html_(self) -> str:
        return html_table(self.rows())

    def table(self) -> str:
        """Return a table of the trials as text, best first."""
        return format_table(self.rows())

    def __str__(self) -> str:
        ended = "; interrupted" if self.interrupted else ""
        done = sum(trial.state == "done" for trial in self.trials)
        return f"{self.table()}\n{done} of {len(self.trials)} trials done{ended}"

    def __repr__(self) -> str:
        best = best_of(self.trials, self.mode)
        score = "no score" if best is None else f"best {self.metric} {best.score:.6g} (trial {best.number})"
        return f"TuneResult({len(self.trials)} trials, {score}{', interrupted' if self.interrupted else ''})"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot scores by trial, and by each numeric parameter.

        Parameters
        ----------
        path : path, optional
            File to write the figure to.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ConfigurationError
            If matplotlib is not installed (``pip install 'tt-trainloop[plot]'``).
        """
        scored = [trial for trial in self.trials if is_number(trial.score)]
        numeric = [
            name
            for name in dict.fromkeys(n for trial in scored for n in trial.params)
            if all(
                isinstance(t.params.get(name), (int, float)) and not isinstance(t.params[name], bool) for t in scored
            )
        ]
        figure_type = import_extra("matplotlib.figure", "TuneResult.plot", "plot").Figure
        figure = figure_type(figsize=(4 * (1 + len(numeric)), 3.2), layout="constrained")
        axes = figure.subplots(1, 1 + len(numeric), squeeze=False)[0]
        for ax, name in zip(axes, ["trial", *numeric]):
            xs = [trial.number if name == "trial" else trial.params[name] for trial in scored]
            for x, trial in zip(xs, scored):
                folds = [score for score in trial.scores if score is not None]
                ax.plot([x] * len(folds), folds, ".", color="0.7")
            ax.plot(xs, [trial.score for trial in scored], "o")
            if name != "trial" and min(xs, default=0) > 0 and max(xs) > 50 * min(xs):
                ax.set_xscale("log")
            ax.set_xlabel(name)
        axes[0].set_ylabel(self.metric)
        if path is not None:
            figure.savefig(path_of("plot", "path", path))
        return figure


# -- the predictor of a bag --------------------------------------------------------------------------------------------


_WHAT = ("bagged predictor", 1)


class BaggedPredictor:
    """One predictor that combines the models of a bag.

    Parameters
    ----------
    models : sequence of object, or callable
        ``TTModel`` objects, or estimators with ``predict``, all of one kind; or a callable that returns them. The
        callable is called when the models are first needed, because models may be large and their libraries may take
        seconds to import.
    """

    def __init__(self, models: Sequence[Any] | Callable[[], Sequence[Any]]) -> None:
        self._models = models if callable(models) else list(models)

    @property
    def models(self) -> list[Any]:
        """The models of the bag."""
        return [one.model if isinstance(one, LoopModel) else one for one in self._read()]

    def _read(self) -> list[Any]:
        """Return the models, each with its loop's functions if it has some; read them if they have not been read."""
        if callable(self._models):
            self._models = list(self._models())
        return self._models

    def __getstate__(self) -> dict[str, Any]:
        return {"_models": self._read()}

    def predict(self, data: Any) -> Any:
        """Return the mean prediction of the models, with a row for each row of ``data``.

        Each model's predictions are made by the ``collate_batch_pred_fn`` and ``pred_transform_fn`` of its loop.

        Parameters
        ----------
        data : DataLoader, Dataset or array
            For a ``TTModel``, a loader or dataset whose batches its ``get_predictions`` accepts; for an estimator, the
            argument of its ``predict``.

        Returns
        -------
        numpy.ndarray
            The mean if predictions are logits, probabilities or numbers. If they are classes (integers, texts, and all
            predictions of a classifier without ``predict_proba``), the most frequent class; in a tie, the lowest one.
            If models were trained on different classes, probabilities have one column for each class that any model
            knows, in sorted order. A model contributes 0 for classes that it does not
            know. If ``get_predictions`` returns a dict or a tuple of columns, so does this method.
        """
        predictions = [fitting.predict_with(model, data) for model in self._read()]
        classes = [fitting.classes_of(model) for model in self.models]
        votes = all(map(fitting.predicts_classes, self.models))
        return by_column(lambda *rows: fitting.combine(rows, classes, votes=votes), *predictions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the models into one file, atomically."""
        write_checked(_path("save", path), *_WHAT, self._read(), "models")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trusted: bool = False) -> BaggedPredictor:
        """Read a predictor from a file that :meth:`save` wrote.

        The file contains pickled objects, which can execute arbitrary code when they are read. Therefore it is read
        only if nobody else could have written it: you or root must own the file and its folder, and other users must
        not be able to write to them.

        Parameters
        ----------
        path : path
            File that :meth:`save` wrote.
        trusted : bool
            Skip the check of owner and mode, for a file from a source that you trust.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, not a predictor, or from an incompatible version.
        ConfigurationError
            If other users could have written the file.
        """
        return cls(read_checked(_path("load", path), *_WHAT, "BaggedPredictor.save()", trusted=trusted))

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        kinds = sorted({type(model).__name__ for model in self.models})
        return f"BaggedPredictor({len(self.models)} of {', '.join(kinds)})"


def _path(method: str, path: Any) -> Path:
    return Path(str(path_of(f"BaggedPredictor.{method}", "path", path)))
