"""Give all models one interface, by adapters: from a cleaned table to probabilities of all classes, or numbers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from sklearn import ensemble
from sklearn.compose import ColumnTransformer
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

from trainloop.resources import gpu_or_cpu
from trainloop.tabular.columns import Columns, Rows
from trainloop.tabular.targets import Target
from trainloop.tuning import seconds_left

_TREE_BY_TREE = ("n_estimators", "warm_start")  # attributes of estimators that can add trees to a fitted forest
_LOSS_PARAMETERS = {"objective", "objective_type", "app", "application", "loss", "metric", "metrics", "metric_types"}


@dataclass(frozen=True)
class Given:
    """The arguments that all adapters have in common."""

    columns: Columns
    target: Target
    params: Mapping[str, Any]
    gpu: bool
    """True if a GPU was requested and granted."""


class Adapter:
    """Base of adapters. Predictions have a column for every class, even if the fold's training rows lack the class."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.is_regression = given.target.problem == "regression"
        self.facts: dict[str, Any] = {"notes": [], "used_gpu": False}
        """Facts for the user's process: warnings as ``notes``, and ``used_gpu`` (True if the model used a GPU)."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        """Train the model. ``validation`` is used for early stopping."""
        raise NotImplementedError

    def predict(self, table: pd.DataFrame) -> Rows:
        """Return probabilities of shape (rows, classes), or numbers of shape (rows,)."""
        raise NotImplementedError


def matrix(columns: Columns, *, onehot: bool, scale: bool = False, gaps: bool = False, words: int = 300) -> Any:
    """Return a scikit-learn transformer that converts a cleaned table to a matrix of numbers, categories and words.

    With ``onehot``, categories become one-hot columns; otherwise they become codes, with -1 for unknown
    categories. ``scale`` standardises numbers. With ``gaps``, missing and unknown values stay NaN; otherwise missing
    numbers are imputed. Each text column becomes the TF-IDF of its ``words`` most frequent words. With more than 1000
    words, the matrix may be sparse.
    """
    filled = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    numbers = FunctionTransformer() if gaps else make_pipeline(filled, StandardScaler()) if scale else filled
    unknown = np.nan if gaps else -1
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=unknown, max_categories=1000)
    each = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=100)
    # Punctuation counts as a word, too, so that every text has words.
    tfidf = TfidfVectorizer(max_features=words, sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    parts: list[Any] = [
        ("numbers", numbers, columns.of("number")),
        ("categories", each if onehot else codes, columns.of("category")),
        *((f"text {name}", tfidf, name) for name in columns.of("text")),
    ]
    return ColumnTransformer(parts, sparse_threshold=0.3 if words > 1000 else 0.0)


class Estimator(Adapter):
    """Adapter of a scikit-learn estimator, constructed by ``make(**params)``.

    The estimator's input is a :func:`matrix`.
    """

    def __init__(self, given: Given, make: Callable[..., Any], **matrix_options: Any) -> None:
        super().__init__(given)
        self._estimator = make(**given.params)
        self._matrix = matrix(given.columns, **(matrix_options or {"onehot": True, "scale": True}))

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        x = self._matrix.fit_transform(table)
        if not self.is_regression and len(np.unique(y)) == 1:  # a fold of a bag; linear models need two classes
            self._estimator = DummyClassifier()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*converge")  # a solution near the optimum is good enough
            if seconds_left() is not None and all(hasattr(self._estimator, name) for name in _TREE_BY_TREE):
                self._grow(x, y)
            else:
                self._estimator.fit(x, y)

    def _grow(self, x: Rows, y: Rows) -> None:
        """Fit as many trees as the time limit allows."""
        trees, wanted = 0, self._estimator.n_estimators
        while trees < wanted:
            began, grown = time.monotonic(), min(wanted, max(10, trees * 2))
            self._estimator.set_params(n_estimators=grown, warm_start=True).fit(x, y)
            tree_s, trees = (time.monotonic() - began) / (grown - trees), grown
            wanted = min(wanted, trees + int(0.8 * (seconds_left() or 0.0) / tree_s))

    def predict(self, table: pd.DataFrame) -> Rows:
        x, outputs = self._matrix.transform(table), self.given.target.num_outputs
        if self.is_regression:
            return np.asarray(self._estimator.predict(x), dtype=float).reshape(-1)
        if not hasattr(self._estimator, "predict_proba"):
            return np.eye(outputs)[np.asarray(self._estimator.predict(x), dtype=int)]
        probabilities = np.zeros((len(table), outputs))
        probabilities[:, np.asarray(self._estimator.classes_, dtype=int)] = self._estimator.predict_proba(x)
        return probabilities


def linear_class(problem: str) -> type:
    """Return the class of a ridge regression for numbers, or of a logistic regression for classes."""
    return Ridge if problem == "regression" else LogisticRegression


def linear(given: Given) -> Estimator:
    """Return a logistic regression for classes, or a ridge regression for numbers."""
    make, more = linear_class(given.target.problem), {} if given.target.problem == "regression" else {"max_iter": 300}
    return Estimator(given, partial(make, **more), onehot=True, scale=True, words=5000)


def forest_class(problem: str, kind: str = "RandomForest") -> type:
    """Return scikit-learn's class of a forest."""
    found: type = getattr(ensemble, kind + ("Regressor" if problem == "regression" else "Classifier"))
    return found


def forest(given: Given, kind: str = "RandomForest") -> Estimator:
    """Return a random forest."""
    make = forest_class(given.target.problem, kind)
    # -1 uses all CPUs of the process, which may be a different number when the model predicts.
    return Estimator(given, partial(make, n_estimators=300, random_state=0, n_jobs=-1), onehot=False)


def extra_trees(given: Given) -> Estimator:
    """Return extremely randomised trees."""
    return forest(given, "ExtraTrees")


_ROUNDS_OF_DART = 500


class GradientBoosting(Adapter):
    """Adapter of LightGBM, with early stopping. It trains on a GPU if one is granted and the build supports it."""

    _shift = 0.0
    """Offset that is added to predictions."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        import lightgbm

        outputs = self.given.target.num_outputs
        self._matrix = matrix(self.given.columns, onehot=False, gaps=True)
        x = self._matrix.fit_transform(table)
        coded = list(range(x.shape[1])[self._matrix.output_indices_["categories"]])
        if self.is_regression and not self.given.params.keys() & _LOSS_PARAMETERS:
            # LightGBM stores labels in single precision, in which seconds since 1970 have a resolution of two minutes.
            self._shift = float(y.mean())
        # The number of classes includes classes that this fold lacks.
        class_params = {"objective": "binary"} if outputs == 2 else {"objective": "multiclass", "num_class": outputs}
        params: dict[str, Any] = {"learning_rate": 0.05, "verbosity": -1, "seed": 0}
        params |= {**({} if self.is_regression else class_params), **self.given.params}
        patience = params.pop("early_stopping_rounds", 100 if len(table) < 10_000 else 30)

        # DART changes earlier trees, so LightGBM does not stop it early.
        dart = "dart" in [params.get(name) for name in ("boosting", "boosting_type", "boost")]

        def fit(**device: str) -> Any:
            # Created for each device, because a Dataset is bound to its device.
            data = lightgbm.Dataset(x, y - self._shift, categorical_feature=coded)
            held_x, held_y = self._matrix.transform(validation[0]), validation[1] - self._shift
            held_out = lightgbm.Dataset(held_x, held_y, reference=data)
            stop: list[Any] = [_stop_in_time]
            if not dart:
                stop.insert(0, lightgbm.early_stopping(patience, first_metric_only=True, verbose=False))
            # If params contains a number of rounds, under any of its names, it takes precedence.
            rounds = _ROUNDS_OF_DART if dart else 10_000
            return lightgbm.train({**params, **device}, data, rounds, valid_sets=[held_out], callbacks=stop)

        log = _UnknownParameters()
        if not self.given.params.keys() & {"verbosity", "verbose"}:
            params["verbosity"] = 0  # with less, it does not report the names that it does not know
            lightgbm.register_logger(log)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._booster = gpu_or_cpu(lambda: fit(device_type="gpu"), fit) if self.given.gpu else fit()
        self.facts["notes"] = [str(each.message) for each in caught if "on the CPU" in str(each.message)]
        self.facts["used_gpu"] = self.given.gpu and not self.facts["notes"]
        if log.names:
            self.facts["notes"].append(
                f"LightGBM does not know these settings of hyperparameters['GBM'], and ignored them: "
                f"{', '.join(log.names)}. See LightGBM's documentation for the names of its parameters."
            )
        if dart:
            self.facts["notes"].append(
                f"LightGBM's boosting='dart' can't stop early: {self._booster.num_trees()} trees were trained. Set "
                "num_boost_round for another number of rounds."
            )

    def predict(self, table: pd.DataFrame) -> Rows:
        found = np.asarray(self._booster.predict(self._matrix.transform(table))) + self._shift
        return np.stack([1 - found, found], axis=1) if self.given.target.num_outputs == 2 else found


class _UnknownParameters:
    """A logger for LightGBM that keeps only the names of unknown parameters."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def info(self, message: str) -> None:
        _, found, name = message.partition("Unknown parameter: ")
        if found:
            self.names[name.strip()] = None

    warning = info


def _stop_in_time(environment: Any) -> None:
    from lightgbm.callback import EarlyStopException

    if (left := seconds_left()) is not None and left < 0.01:
        raise EarlyStopException(environment.iteration, environment.evaluation_result_list)
