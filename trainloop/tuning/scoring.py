"""Score predictions with scikit-learn's scorers, and find the weights of an ensemble of models."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trainloop._support.distribution import pip_install
from trainloop._support.keywords import name_of, unwrapped
from trainloop.errors import ConfigurationError
from trainloop.extending import lower_is_better, warn

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.metrics import get_scorer, make_scorer, roc_auc_score
    from sklearn.utils.multiclass import type_of_target
except ImportError as error:
    raise ConfigurationError(f"trainloop.tuning.scoring needs scikit-learn: {pip_install('metrics')}.") from error

__all__ = ["Scorer", "ensemble_weights", "scorer"]

_ROUNDING = 0.01  # by which the sum of a row of probabilities may differ from 1, as after a training in bfloat16
Rows = np.ndarray[Any, Any]
Metric = Callable[[Any, Any], float]


@dataclass(frozen=True)
class Scorer:
    """A ``metric(y_true, predictions)`` that :func:`scorer` created. Greater is better."""

    name: str
    score_model: Callable[[Any, Any, Any], float]
    """scikit-learn's scorer, which calls a model to predict."""
    greater_is_better: ClassVar[bool] = True
    takes_classes: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, y_true: Any, predictions: Any, *, classes: Sequence[Any] | None = None) -> float:
        """Return the score; NaN, with a warning, if it is undefined for these rows.

        Parameters
        ----------
        y_true, predictions : array
            Targets and predictions: a row for each sample.
        classes : sequence, optional
            The class of each column of probabilities, as an estimator's ``classes_``; by default, 0, 1, 2 ...
        """
        truth, rows = _without_unit_columns(y_true), np.asarray(predictions)
        with warnings.catch_warnings():  # scikit-learn warns if rows lack a class
            warnings.simplefilter("ignore")
            model: _FixedPredictions
            if type_of_target(truth) == "multilabel-indicator":
                model = _Labels(rows, bool((truth.sum(axis=1) == 1).all()))
            elif classes is None and (rows.ndim != 2 or rows.shape[1] == 1 or truth.ndim == 2):
                model = _Numbers(_without_unit_columns(rows))
            else:
                model = _Probabilities(rows, np.arange(rows.shape[1]) if classes is None else np.asarray(classes))
                unknown = truth[~np.isin(truth, model.classes_)]
                if classes is None and len(unknown):
                    raise ConfigurationError(
                        f"{self.name}: y_true contains {unknown.tolist()[0]!r}, but the {rows.shape[1]} columns of the "
                        f"predictions belong to the classes 0 to {rows.shape[1] - 1}. Number the classes: "
                        "np.unique(labels, return_inverse=True)[1]."
                    )
            try:
                return float(self.score_model(model, None, truth))
            except ConfigurationError:
                raise
            except AttributeError as error:
                if not isinstance(model, _Numbers):
                    raise
                raise ConfigurationError(
                    f"{self.name} needs probabilities with a column for each class, but the predictions have shape "
                    f"{rows.shape}. For two classes, return np.stack([1 - p, p], 1), where p is the probability of 1."
                ) from error
            except ValueError as error:
                undefined = error
        warn(f"the score {self.name!r} is undefined for these {len(truth)} rows, and counts as NaN: {undefined}")
        return float("nan")


def scorer(metric: str | Callable[[Any, Any], float], name: str | None = None) -> Scorer:
    """Return a scikit-learn scorer as a ``metric`` for :func:`~trainloop.tuning.tune`, even for a ``TrainLoop``.

    scikit-learn's scorers call a model. The returned function takes predictions instead: numbers or classes in one
    column, or probabilities, with one column for each of the classes 0, 1, 2 ... (for an estimator: of its
    ``classes_``). If targets have several columns, such as labels of which a row may have several (a label counts as
    predicted if its probability is above 0.5) or one-hot rows, predictions have the same columns.

    Parameters
    ----------
    metric : str or callable
        One of ``sklearn.metrics.get_scorer_names()``, such as ``'roc_auc'`` or ``'neg_log_loss'``; or a function
        ``metric(y_true, y_pred)`` for which greater is better. If predictions are probabilities, the function gets the
        most likely classes.
    name : str, optional
        Name in tables.

    Returns
    -------
    callable
        ``metric(y_true, predictions)``, of which ``tune`` takes the greatest. It returns NaN if the score is undefined
        for the rows: for example, rows of a single class have no area under the curve.

    Raises
    ------
    ConfigurationError
        If there is no such scorer, or if lower is better for a function of scikit-learn.

    Warns
    -----
    UserWarning
        If lower is better for a function by its name.

    Examples
    --------
    >>> scorer("accuracy")([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    0.6666666666666666
    """
    if callable(metric):
        own_name = name_of(metric)
        if lower_is_better(own_name):
            if getattr(unwrapped(metric), "__module__", "").startswith("sklearn."):
                raise ConfigurationError(
                    f"scorer: metric={own_name}: lower is better, but the greatest score counts as the best. Pass the "
                    "name of a scorer, such as 'neg_mean_squared_error' or 'neg_log_loss', or a function that returns "
                    "the negative value."
                )
            warn(
                f"scorer: metric={own_name}: by its name, lower is better, but the greatest score counts as the best. "
                "Return the negative value, or ignore this if the function does so."
            )
        return Scorer(name or own_name, make_scorer(metric))
    if metric in _LACKING_CLASSES:
        return Scorer(name or metric, _LACKING_CLASSES[metric])
    try:
        return Scorer(name or metric, get_scorer(metric))
    except ValueError as error:
        raise ConfigurationError(
            f"metric={metric!r}: scikit-learn has no such scorer. Choose one of sklearn.metrics.get_scorer_names()."
        ) from error


def ensemble_weights(
    predictions: Sequence[Any],
    y_true: Any,
    *metrics: Metric,
    rounds: int = 10,
    bags: int = 10,
    time_limit_s: float | None = None,
) -> list[float]:
    """Compute weights for averaging the predictions of models, by bagged greedy selection.

    Each round adds the model that improves the average most; a model can be added several times. The result is the
    weights after the best round (Caruana et al., *Ensemble selection from libraries of models*, 2004). With only a few
    hundred rows, chance partly decides which model is best. Therefore the selection is repeated on samples of the rows,
    drawn with replacement (each class keeps its number of rows), and the weights are averaged.

    Parameters
    ----------
    predictions : sequence of array
        Predictions of each model for the same rows. No model may have been trained on these rows. For the trials of a
        search with bags: ``[result.predictions_of(trial) for trial in result.trials]``.
    y_true : array
        Targets of these rows.
    *metrics : callable
        Functions ``metric(y_true, predictions)`` for which greater is better (:func:`scorer`). The second metric breaks
        ties of the first, and so on, because with few rows many models have the same accuracy.
    rounds : int
        Number of models to add in each selection.
    bags : int
        Number of random samples of the rows. With 0 there is one selection, on the rows themselves.
    time_limit_s : float, optional
        Seconds after which no further sample is drawn; at least one sample is drawn.

    Returns
    -------
    list of float
        One weight for each model; their sum is 1.

    Raises
    ------
    ConfigurationError
        If there are no models, metrics or rounds, if predictions have another number of rows than ``y_true`` or
        unequal shapes, or if they are NaN.

    Notes
    -----
    The first metric is called ``rounds * bags`` times for each model. The other metrics are called only to break ties.
    """
    truth, rows = np.asarray(y_true), [np.asarray(each) for each in predictions]
    lengths = [len(each) for each in rows]
    if set(lengths) != {len(truth)}:
        raise ConfigurationError(
            f"ensemble_weights: predictions have {lengths} rows, and there are {len(truth)} targets. Pass the "
            "predictions of one model or more for the rows of y_true."
        )
    if len(shapes := {each.shape for each in rows}) > 1:  # numpy would broadcast (n,) and (n, 1) to (n, n)
        raise ConfigurationError(
            f"ensemble_weights: predictions have the shapes {sorted(shapes)}. Pass predictions of the same shape."
        )
    missing = [int(np.isnan(each).reshape(len(each), -1).any(1).sum()) for each in rows if each.dtype.kind == "f"]
    if any(missing):
        raise ConfigurationError(
            f"ensemble_weights: {missing} rows of the predictions are NaN. Leave out the rows that no fold holds out, "
            "also of y_true, and the models whose training has diverged."
        )
    if not metrics or rounds < 1:
        raise ConfigurationError(
            f"ensemble_weights: {len(metrics)} metrics, rounds={rounds}: must be 1 or more of both."
        )
    generator = np.random.default_rng(0)  # the same rows give the same weights
    samples = [_drawn(truth, generator) for _ in range(bags)] or [np.arange(len(truth))]
    found: list[Rows] = []
    end = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    for sample in samples:
        if not found or time.monotonic() < end:
            found.append(_select([each[sample] for each in rows], truth[sample], metrics, rounds))
    return [float(weight) for weight in np.mean(found, axis=0)]


def _drawn(truth: Rows, generator: np.random.Generator) -> Rows:
    """Draw rows with replacement. Each class keeps its number of rows, because a metric may need rows of each class."""
    if truth.ndim != 1 or truth.dtype.kind == "f":
        return generator.integers(len(truth), size=len(truth))
    _, of = np.unique(truth, return_inverse=True)
    classes = (np.flatnonzero(of == number) for number in range(of.max() + 1))
    return np.concatenate([generator.choice(rows, size=len(rows)) for rows in classes])


def _select(predictions: list[Rows], truth: Rows, metrics: Sequence[Metric], rounds: int) -> Rows:
    """Select models greedily, and return each model's fraction of the models that were added up to the best round."""
    counts = np.zeros(len(predictions))
    total = np.zeros_like(predictions[0], dtype=float)
    best: tuple[list[float], Rows] | None = None
    for added in range(1, rounds + 1):
        averages = [(total + each) / added for each in predictions]
        equal, score = list(range(len(averages))), []
        for metric in metrics:
            scores = [_comparable_score(metric(truth, averages[model])) for model in equal]
            score.append(max(scores))
            equal = [model for model, its in zip(equal, scores) if its == score[-1]]
        counts[equal[0]] += 1
        total = total + predictions[equal[0]]
        if best is None or score > best[0]:
            best = score, counts / added
    assert best is not None, "there is a round"
    return best[1]


def _without_unit_columns(values: Any) -> Rows:
    """Return rows of a single number as a vector."""
    rows = np.asarray(values)
    return rows.reshape(len(rows)) if rows.ndim > 1 and rows.size == len(rows) else rows


def _comparable_score(score: float) -> float:
    """Return the score, or minus infinity for NaN, so that scores can be compared."""
    return float("-inf") if np.isnan(score) else score


class _FixedPredictions(BaseEstimator):
    """A model that returns given predictions, for scikit-learn's scorers."""

    def __init__(self, predictions: Rows) -> None:
        self.predictions = predictions

    def fit(self) -> None:
        """Do nothing. scikit-learn accepts no model without ``fit``."""

    def predict(self, x: object) -> Rows:
        return self.predictions


class _Numbers(RegressorMixin, _FixedPredictions):
    """A model whose predictions are numbers or classes, with a column for each output if there are several."""


class _Labels(ClassifierMixin, _FixedPredictions):
    """A model whose predictions are probabilities of labels, of which a row may have several: a column for each."""

    def __init__(self, predictions: Rows, one_label: bool) -> None:
        super().__init__(predictions)
        self.one_label = one_label

    @property
    def classes_(self) -> list[Rows]:
        return [np.array([0, 1])] * self.predictions.shape[1]

    def predict(self, x: object) -> Rows:
        rows = self.predictions
        if (rows < 0).any() or (rows > 1).any():
            raise ConfigurationError(
                f"the score needs labels or their probabilities, but the predictions are numbers from {rows.min():.4g} "
                f"to {rows.max():.4g}. Return probabilities from get_predictions, such as torch.sigmoid(logits); if "
                "each row has one label, torch.softmax(logits, 1)."
            )
        if self.one_label and (np.abs(rows.sum(axis=1) - 1) <= _ROUNDING).all():  # one-hot rows of classes
            return np.eye(rows.shape[1], dtype=int)[rows.argmax(axis=1)]
        return (rows > 0.5).astype(int)

    def predict_proba(self, x: object) -> Rows:
        return self.predictions


class _Probabilities(ClassifierMixin, _FixedPredictions):
    """A model whose predictions are probabilities, with a column for each class."""

    def __init__(self, predictions: Rows, classes_: Rows) -> None:
        super().__init__(predictions)
        self.classes_ = classes_

    def predict(self, x: object) -> Rows:
        return self.classes_[self.predictions.argmax(axis=1)]

    def predict_proba(self, x: object) -> Rows:
        rows = self.predictions
        sums = rows.sum(axis=1, keepdims=True)
        if (rows < 0).any() or (np.abs(sums - 1) > _ROUNDING).any():
            raise ConfigurationError(
                f"the score needs probabilities, but the predictions are numbers from {rows.min():.4g} to "
                f"{rows.max():.4g}, and the sums of rows go from {sums.min():.4g} to {sums.max():.4g}. Return "
                "probabilities from get_predictions, such as torch.softmax(logits, 1)."
            )
        return rows / sums  # scikit-learn rejects rows whose sum is not 1


# Saved predictors refer to these functions by their names. Unlike scikit-learn's scorers, they accept rows that lack a
# class.
def _log_loss(model: _Probabilities, x: object, y_true: Rows) -> float:
    """Return the negative log loss."""
    right = np.asarray(y_true)[:, None] == model.classes_  # all False for a class without a column
    return float(np.log(np.clip((model.predict_proba(x) * right).sum(axis=1), 1e-15, 1)).mean())


def _roc_auc_ovo(model: _Probabilities, x: object, y_true: Rows) -> float:
    """Return the mean area under the curve over the pairs of classes that the rows have."""
    chances = model.predict_proba(x)
    if chances.shape[1] == 2:
        return float(roc_auc_score(y_true, chances[:, 1]))
    return float(roc_auc_score(y_true, chances, multi_class="ovo", labels=model.classes_))


_LACKING_CLASSES = {"neg_log_loss": _log_loss, "roc_auc_ovo": _roc_auc_ovo}
