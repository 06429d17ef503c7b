"""Count the rows of a dataset, train a fold with a loop, and return its score, predictions and model."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from trainloop._support.keywords import name_of, unwrapped
from trainloop.errors import ConfigurationError
from trainloop.extending import import_extra
from trainloop.train_loop.loop import TrainLoop
from trainloop.tuning.folds import Fold

Metric = str | Callable[[Any, Any], float]

DEFAULT_EPOCHS = 10


@dataclass
class Outcome:
    """The result of one fold."""

    score: float
    """Value of the metric on the fold's validation rows."""
    predictions: Any
    """Predictions for the validation rows, in the same order; None if there is no validation set."""
    model: Any
    """The trained model, on the CPU."""
    classes: list[Any] | None = None
    """Class of each column if the predictions are an estimator's class probabilities; otherwise None."""
    stored: LoopModel | None = None
    """The model with its loop's own functions for predictions; None if it has none."""


@dataclass
class LoopModel:
    """A loop's trained model, with the functions by which the loop makes rows of the batches' predictions."""

    model: Any
    functions: dict[str, Any]
    """``collate_batch_pred_fn`` and ``pred_transform_fn`` of the loop, without defaults."""


_OF_ROWS = ("collate_batch_pred_fn", "pred_transform_fn")


class EstimatorLoop:
    """Wrap an object with ``fit`` and ``predict`` (scikit-learn, LightGBM, XGBoost) so that a fold can train it.

    If you pass ``data`` to ``tune``, ``make_loop`` may return the object itself. Use this class in all other cases: for
    other data, for sample weights, or for training that falls back to the CPU.

    Parameters
    ----------
    estimator : object
        Object with ``fit(x, y, **fit_args)`` and ``predict(x)``. If it has ``predict_proba(x)``, this method is used
        instead of ``predict``.
    train, validation : (x, y)
        Arrays or tables; ``validation`` may be None.
    fit : callable, optional
        ``fit(estimator, x, y, **fit_args)`` returns the trained estimator. It replaces the estimator's own ``fit``, for
        example to use :func:`trainloop.resources.gpu_or_cpu`.
    """

    def __init__(
        self,
        estimator: Any,
        train: tuple[Any, Any],
        validation: tuple[Any, Any] | None = None,
        *,
        fit: Callable[..., Any] | None = None,
    ) -> None:
        self.estimator = estimator
        self.train = train
        self.validation = validation
        self._fit = fit

    def fit(self, **fit_args: Any) -> Any:
        """Train the estimator and return it."""
        if self._fit is not None:
            trained = self._fit(self.estimator, *self.train, **fit_args)
            self.estimator = self.estimator if trained is None else trained
        else:
            self.estimator.fit(*self.train, **fit_args)
        return self.estimator


def rows_of(data: Any, rows: np.ndarray[Any, Any]) -> Any:
    """Return the given rows of an array, a table, a tensor or a list."""
    if hasattr(data, "iloc"):
        return data.iloc[rows]
    if hasattr(data, "tocsr"):  # of scipy's sparse matrices, some have no rows to index
        data = data.tocsr()
    return [data[row] for row in rows] if isinstance(data, (list, tuple)) else data[rows]


def fit(
    made: Any,
    *,
    fold: Fold | None,
    data: tuple[Any, Any] | None,
    fit_args: Mapping[str, Any] | None,
    params: Mapping[str, Any],
    metric: Metric,
) -> Outcome:
    """Train the object that ``make_loop`` returned, unless it is already trained, and score it.

    Raises
    ------
    ConfigurationError
        If the object can't be trained, does not have the metric, or does not predict the fold's rows.
    """
    if hasattr(made, "predict_on_validation_set"):
        outcome = _fit_loop(made, fit_args, params, metric)
    elif isinstance(made, EstimatorLoop):
        outcome = _fit_estimator(made, fit_args, metric)
    elif hasattr(made, "fit") and hasattr(made, "predict"):
        if data is None or fold is None:
            raise ConfigurationError(
                f"make_loop returned a {type(made).__name__} without data to train it on. Pass data=(x, y) and "
                "num_bag_folds=2 or more to tune, or return EstimatorLoop(estimator, train=(x, y), validation=(x, y))."
            )
        train, held_out = ((rows_of(data[0], rows), rows_of(data[1], rows)) for rows in (fold.train, fold.validation))
        outcome = _fit_estimator(EstimatorLoop(made, train, held_out), fit_args, metric)
    else:
        raise ConfigurationError(
            f"make_loop returned a {type(made).__name__}. Return a TrainLoop, or an object with fit and predict."
        )
    numbers: list[int] = [] if outcome.predictions is None else _numbers_of_rows(outcome.predictions)
    if fold is not None and set(numbers) != {len(fold.validation)}:
        number = next((number for number in numbers if number != len(fold.validation)), 0)
        if not hasattr(made, "predict_on_validation_set"):
            raise ConfigurationError(
                f"the {type(outcome.model).__name__} predicts {number} rows, but the fold holds out "
                f"{len(fold.validation)}. Its predict must return one row for each row of x."
            )
        raise ConfigurationError(
            f"the validation set has {number} rows, but the fold holds out {len(fold.validation)}. In make_loop, build "
            "it from fold.validation: DataLoader(Subset(data, fold.validation), batch_size=...)."
        )
    return outcome


def _fit_loop(loop: Any, fit_args: Mapping[str, Any] | None, params: Mapping[str, Any], metric: Metric) -> Outcome:
    if not loop.epoch and not len(loop.history):
        given = dict(fit_args or {})
        if not given.keys() & {"num_epochs", "num_iterations"}:
            given["num_epochs"] = params.get("num_epochs", DEFAULT_EPOCHS)
        loop.fit(**given)
    predictions, truth = None, None
    if loop.validation_loader is not None:
        predictions, truth = (by_column(as_rows, rows) for rows in loop.predict_on_validation_set()[:2])
    if callable(metric):
        score = _score(metric, truth, predictions)
    elif metric in loop.history:
        score = float(loop.history[metric][-1])
    elif metric == "val_loss" and loop.validation_loader is not None:
        loss = loop.evaluate_loss_on_validation_set()
        score = float(sum(loss.values()) if isinstance(loss, Mapping) else loss)
    else:
        raise ConfigurationError(
            f"metric={metric!r} is not in the loop's history, which has "
            f"{', '.join(sorted(loop.history)) or 'nothing'}. "
            "Use one of these names, log the metric in the model, or pass a validation_loader (for val_loss) or a "
            "callable metric(y_true, y_pred)."
        )
    # The process that reads the result may have no GPU, and must not initialize one.
    model = loop.model.cpu()
    usual = {name: inspect.signature(TrainLoop).parameters[name].default for name in _OF_ROWS}
    functions = {name: own for name, one in usual.items() if (own := getattr(loop, name, one)) is not one}
    return Outcome(score, predictions, model, stored=LoopModel(model, functions) if functions else None)


def _score(metric: Callable[..., Any], truth: Any, predictions: Any, classes: list[Any] | None = None) -> float:
    takes_classes = classes is not None and getattr(unwrapped(metric), "takes_classes", False)
    value = metric(truth, predictions, classes=classes) if takes_classes else metric(truth, predictions)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"metric {name_of(metric)}(y_true, y_pred) returned {value!r:.100}, but must return a single number."
        ) from error


def _fit_estimator(loop: EstimatorLoop, fit_args: Mapping[str, Any] | None, metric: Metric) -> Outcome:
    if loop.validation is None:
        raise ConfigurationError(
            f"EstimatorLoop({type(loop.estimator).__name__}) has no validation rows to score. Pass validation=(x, y)."
        )
    estimator = loop.fit(**(fit_args or {}))
    x, y = loop.validation
    predictions, classes = predict_with(estimator, x), classes_of(estimator)
    if callable(metric):
        score = _score(metric, as_rows(y), predictions, classes)
    elif metric == "val_loss":
        score = _validation_loss(estimator, predictions, np.asarray(y))
    else:
        metrics = import_extra("sklearn.metrics", f"metric={metric!r} of a {type(estimator).__name__}", "metrics")
        score = float(metrics.get_scorer(metric)(estimator, x, y))
    return Outcome(score, predictions, estimator, classes)


def _validation_loss(estimator: Any, predictions: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> float:
    """Return an estimator's ``val_loss``: cross entropy, or squared error of numbers.

    For classes without probabilities, it is the share of wrong ones.
    """
    if truth.ndim == 2 and truth.shape[1] == 1:  # a table with one column
        truth = truth[:, 0]
    if hasattr(estimator, "predict_proba"):
        if truth.ndim != 1:
            raise ConfigurationError(
                f"metric='val_loss' for classes needs a single target for each row, but y has the shape "
                f"{truth.shape}. Pass a callable "
                "metric(y_true, y_pred)."
            )
        column = {label: number for number, label in enumerate(np.asarray(estimator.classes_).tolist())}
        columns = np.array([column.get(label, -1) for label in truth.tolist()], dtype=int)
        # A class that the estimator was not trained on has no column.
        probabilities = np.where(columns < 0, 0.0, predictions[np.arange(len(truth)), columns])
        return float(-np.log(np.clip(probabilities, 1e-15, 1.0)).mean())
    if predicts_classes(estimator):
        return float((np.asarray(predictions).reshape(truth.shape) != truth).mean())
    return float(np.square(np.asarray(predictions, dtype=float).reshape(truth.shape) - truth).mean())


def as_rows(values: Any) -> Any:
    """Return rows as a numpy array. If the items of a list have different shapes, the array has ``dtype=object``."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    if isinstance(values, np.ndarray):
        return values
    try:
        return np.asarray(values)
    except ValueError:  # the items have different shapes
        rows = np.empty(len(values), dtype=object)
        rows[:] = list(values)
        return rows


def by_column(function: Callable[..., Any], *predictions: Any) -> Any:
    """Call a function with predictions; if ``get_predictions`` returns a dict or a tuple, for each of its columns."""
    first = predictions[0]
    if isinstance(first, Mapping):
        return {name: by_column(function, *(each[name] for each in predictions)) for name in first}
    if isinstance(first, tuple):
        return tuple(by_column(function, *columns) for columns in zip(*predictions, strict=True))
    return function(*predictions)


def _numbers_of_rows(predictions: Any) -> list[int]:
    numbers: list[int] = []
    by_column(lambda rows: numbers.append(len(rows)), predictions)
    return numbers


def predict_with(model: Any, data: Any) -> Any:
    """Return the predictions of one trained model, with a row for each row of ``data``.

    Parameters
    ----------
    model : object
        A ``TTModel`` or a :class:`LoopModel` if ``data`` is a ``DataLoader`` or a dataset; an estimator if ``data`` is
        an array or a table.
    """
    model, functions = (model.model, model.functions) if isinstance(model, LoopModel) else (model, {})
    if hasattr(model, "get_predictions"):
        loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=256)
        loop = TrainLoop(model, None, progress_bar=False, **functions)
        return by_column(as_rows, loop.predict_with_model(loader)[0])
    if _predicts_probabilities(model):
        return as_rows(model.predict_proba(data))
    return as_rows(model.predict(data))


def _predicts_probabilities(model: Any) -> bool:
    """Return False also for a classifier of several targets, which has a list of classes, and of arrays, for each."""
    classes = getattr(model, "classes_", None)
    return hasattr(model, "predict_proba") and (classes is None or not any(np.ndim(label) for label in classes))


def predicts_classes(model: Any) -> bool:
    """Return True if :func:`predict_with` returns classes, whatever their type, as the model itself says."""
    if hasattr(model, "get_predictions") or _predicts_probabilities(model):
        return False
    base = sys.modules.get("sklearn.base")  # a model of scikit-learn has imported it
    with contextlib.suppress(Exception):  # an object of another library, without scikit-learn's tags
        if base is not None and base.is_classifier(model):
            return True
    return getattr(model, "classes_", None) is not None or getattr(model, "_estimator_type", "") == "classifier"


def classes_of(model: Any) -> list[Any] | None:
    """Return the class of each column that :func:`predict_with` returns; None if the columns are not classes."""
    if hasattr(model, "get_predictions") or not _predicts_probabilities(model):
        return None
    classes = getattr(model, "classes_", None)
    return None if classes is None else np.asarray(classes).tolist()


def align(predictions: Sequence[Any], classes: Sequence[list[Any] | None]) -> list[Any]:
    """Return the predictions with one column for each class that any of the models was trained on, in sorted order.

    A model's probability of a class that it was not trained on is 0. If all models have the same classes, or if the
    classes of a model are unknown, the predictions are returned unchanged.
    """
    parts = [np.asarray(each) for each in predictions]
    known = [each for each in classes if each is not None]
    if len(known) < len(parts) or all(each == known[0] for each in known):
        return parts
    if any(part.ndim != 2 or part.shape[1] != len(each) for part, each in zip(parts, known)):
        return parts
    column = {label: number for number, label in enumerate(sorted({label for each in known for label in each}))}
    aligned = [np.zeros((len(part), len(column)), dtype=part.dtype) for part in parts]
    for whole, part, each in zip(aligned, parts, known):
        whole[:, [column[label] for label in each]] = part
    return aligned


def combine(
    predictions: Sequence[Any], classes: Sequence[list[Any] | None] | None = None, *, votes: bool = False
) -> Any:
    """Combine the predictions of several models: return the mean of floats, or the most frequent class.

    In a tie, the class with the lowest label is returned. ``classes`` has the result of :func:`classes_of` for each
    model. With ``votes``, floats are classes, too.

    Raises
    ------
    ConfigurationError
        If rows are objects that have no order, such as dicts with the boxes of an image.
    """
    rows = align(predictions, classes or [None] * len(predictions))
    if rows[0].dtype.kind in "fc" and not votes:
        return np.mean(rows, axis=0)
    try:
        values, codes = np.unique(np.stack(rows), return_inverse=True)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the models' predictions can't be combined: {error}. Predict with each model of predictor.models, and "
            "combine the rows yourself."
        ) from error
    codes = codes.reshape(len(rows), *rows[0].shape)
    counts = np.stack([(codes == code).sum(axis=0) for code in range(len(values))])
    return values[counts.argmax(axis=0)]


def learn_rows(make_loop: Callable[..., Any], params: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the number of rows in the dataset that ``make_loop`` uses, and the rows' targets if these can be found.

    ``make_loop`` is called with a fold of two rows. The ``train_loader`` of the loop that it returns must load a
    ``Subset`` of the dataset with all rows.

    Raises
    ------
    ConfigurationError
        If the loop's training loader does not have a ``Subset``.
    """
    made = make_loop(dict(params), Fold(0, 2, np.array([0]), np.array([1])))
    part: Any = getattr(getattr(made, "train_loader", None), "dataset", None)
    if not (hasattr(part, "indices") and hasattr(part, "dataset")):
        raise ConfigurationError(
            "The loop that make_loop returned for a fold of two rows does not show how many rows the data has. "
            "Pass targets (one per row) or data=(x, y) to tune, or build the loader with Subset(data, fold.train)."
        )
    return len(part.dataset), _targets_of(part.dataset)


def check_rows(made: Any, fold: Fold | None, rows: int | None) -> None:
    """Raise an error if the folds were made for another number of rows than that of the dataset that a loop trains on.

    Raises
    ------
    ConfigurationError
        If the loop trains on the fold's rows of a dataset with another number of rows than ``targets`` or ``data``.
    """
    part: Any = getattr(getattr(made, "train_loader", None), "dataset", None)
    if rows is None or fold is None or type(part) is not Subset or not np.array_equal(part.indices, fold.train):
        return
    if hasattr(part.dataset, "__len__") and len(part.dataset) != rows:
        raise ConfigurationError(
            f"tune got {rows} rows (targets, or y of data), but the dataset in make_loop has {len(part.dataset)}. Pass "
            "a target for each row of the dataset, or leave the rows that no model is to read out of the dataset."
        )


def _targets_of(dataset: Any) -> Any:
    for name in ("targets", "labels", "y"):
        if getattr(dataset, name, None) is not None:
            return getattr(dataset, name)
    if hasattr(dataset, "tensors"):
        return dataset.tensors[-1]
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        inner = _targets_of(dataset.dataset)
        return None if inner is None else rows_of(inner, np.asarray(dataset.indices))
    return None


def is_number(score: float | None) -> bool:
    """Return True if there is a score and it is not NaN."""
    return score is not None and not math.isnan(score)
