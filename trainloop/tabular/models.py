"""Adapters that give all models one interface: a cleaned table in, probabilities of all classes or numbers out."""

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
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

from trainloop.resources import gpu_or_cpu
from trainloop.tabular.columns import Columns, Rows
from trainloop.tabular.targets import Target
from trainloop.tuning import seconds_left

__all__ = ["Adapter", "Estimator", "Given", "GradientBoosting", "extra_trees", "forest", "linear", "matrix"]

_GROWN = ("n_estimators", "warm_start")  # parameters of estimators that grow tree by tree
_OWN_LOSS = {"objective", "objective_type", "app", "application", "loss", "metric", "metrics", "metric_types"}


@dataclass(frozen=True)
class Given:
    """The inputs that all adapters are constructed from."""

    columns: Columns
    target: Target
    params: Mapping[str, Any]
    gpu: bool
    """True if a GPU was requested and granted."""


class Adapter:
    """One model. It predicts a column for every class, including classes that are missing from its training fold."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.is_regression = given.target.problem == "regression"
        self.facts: dict[str, Any] = {"notes": [], "used_gpu": False}
        """Reported to the user's process: warnings (``notes``), and whether the model used a GPU."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        """Train the model. ``validation`` is for early stopping."""
        raise NotImplementedError

    def predict(self, table: pd.DataFrame) -> Rows:
        """Return probabilities of shape (rows, classes), or numbers of shape (rows,)."""
        raise NotImplementedError


def matrix(columns: Columns, *, onehot: bool, scale: bool = False, gaps: bool = False, words: int = 300) -> Any:
    """Return a scikit-learn transformer from a cleaned table to a matrix: numbers, then categories, then words.

    Categories are one-hot columns, or else codes with -1 for unknown ones. ``scale`` standardises numbers. With
    ``gaps``, missing and unknown values stay NaN; otherwise they are filled. Each text column gives the TF-IDF of its
    ``words`` most frequent words; above 1000 words the matrix may be sparse.
    """
    filled = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    numbers = FunctionTransformer() if gaps else make_pipeline(filled, StandardScaler()) if scale else filled
    unknown = np.nan if gaps else -1
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=unknown, max_categories=1000)
    each = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=100)
    # Any run of characters is a word, so that every text has words.
    tfidf = TfidfVectorizer(max_features=words, sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    parts: list[Any] = [
        ("numbers", numbers, columns.of("number")),
        ("categories", each if onehot else codes, columns.of("category")),
        *((f"text {name}", tfidf, name) for name in columns.of("text")),
    ]
    return ColumnTransformer(parts, sparse_threshold=0.3 if words > 1000 else 0.0)


class Estimator(Adapter):
    """A scikit-learn estimator, constructed by ``make(**params)``, on a :func:`matrix` without missing values."""

    def __init__(self, given: Given, make: Callable[..., Any], **of_matrix: Any) -> None:
        super().__init__(given)
        self._estimator = make(**given.params)
        self._matrix = matrix(given.columns, **(of_matrix or {"onehot": True, "scale": True}))

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        x = self._matrix.fit_transform(table)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*converge")  # close to the optimum is good enough
            if seconds_left() is not None and all(hasattr(self._estimator, name) for name in _GROWN):
                self._grow(x, y)
            else:
                self._estimator.fit(x, y)

    def _grow(self, x: Rows, y: Rows) -> None:
        """Fit as many trees as the time allows."""
        trees, wanted = 0, self._estimator.n_estimators
        while trees < wanted:
            began, grown = time.monotonic(), min(wanted, max(10, trees * 2))
            self._estimator.set_params(n_estimators=grown, warm_start=True).fit(x, y)
            a_tree, trees = (time.monotonic() - began) / (grown - trees), grown
            wanted = min(wanted, trees + int(0.8 * (seconds_left() or 0.0) / a_tree))

    def predict(self, table: pd.DataFrame) -> Rows:
        x, outputs = self._matrix.transform(table), self.given.target.num_outputs
        if self.is_regression:
            return np.asarray(self._estimator.predict(x), dtype=float).reshape(-1)
        if not hasattr(self._estimator, "predict_proba"):
            return np.eye(outputs)[np.asarray(self._estimator.predict(x), dtype=int)]
        chances = np.zeros((len(table), outputs))
        chances[:, np.asarray(self._estimator.classes_, dtype=int)] = self._estimator.predict_proba(x)
        return chances


def linear(given: Given) -> Estimator:
    """Return a logistic regression, or a ridge regression."""
    regression = given.target.problem == "regression"
    make = Ridge if regression else partial(LogisticRegression, max_iter=300)
    return Estimator(given, make, onehot=True, scale=True, words=5000)


def forest(given: Given, kind: str = "RandomForest") -> Estimator:
    """Return a random forest."""
    make = getattr(ensemble, kind + ("Regressor" if given.target.problem == "regression" else "Classifier"))
    # The model uses all CPUs of its process; their number may differ when it predicts.
    return Estimator(given, partial(make, n_estimators=300, random_state=0, n_jobs=-1), onehot=False)


def extra_trees(given: Given) -> Estimator:
    """Return extremely randomised trees."""
    return forest(given, "ExtraTrees")


class GradientBoosting(Adapter):
    """LightGBM with early stopping. It trains on a GPU if one is granted and the build supports it."""

    _shift = 0.0
    """Offset that is added to predictions."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        import lightgbm

        outputs = self.given.target.num_outputs
        self._matrix = matrix(self.given.columns, onehot=False, gaps=True)
        x = self._matrix.fit_transform(table)
        coded = list(range(x.shape[1])[self._matrix.output_indices_["categories"]])
        if self.is_regression and not self.given.params.keys() & _OWN_LOSS:
            # LightGBM has labels in single precision: times in seconds since 1970 would be two minutes apart.
            self._shift = float(y.mean())
        # All classes, including those that this fold lacks.
        of_classes = {"objective": "binary"} if outputs == 2 else {"objective": "multiclass", "num_class": outputs}
        params: dict[str, Any] = {"learning_rate": 0.05, "verbosity": -1, "seed": 0}
        params |= {**({} if self.is_regression else of_classes), **self.given.params}
        patience = params.pop("early_stopping_rounds", 100 if len(table) < 10_000 else 30)

        def fit(**device: str) -> Any:
            # Created again if the first device failed: a data set is bound to its device.
            data = lightgbm.Dataset(x, y - self._shift, categorical_feature=coded)
            held_x, held_y = self._matrix.transform(validation[0]), validation[1] - self._shift
            held_out = lightgbm.Dataset(held_x, held_y, reference=data)
            stop: list[Any] = [lightgbm.early_stopping(patience, first_metric_only=True, verbose=False), _stop_in_time]
            # A number of rounds in params, under any of its names, takes precedence over this one.
            return lightgbm.train({**params, **device}, data, 10_000, valid_sets=[held_out], callbacks=stop)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._booster = gpu_or_cpu(lambda: fit(device_type="gpu"), fit) if self.given.gpu else fit()
        self.facts["notes"] = [str(each.message) for each in caught if "on the CPU" in str(each.message)]
        self.facts["used_gpu"] = self.given.gpu and not self.facts["notes"]

    def predict(self, table: pd.DataFrame) -> Rows:
        found = np.asarray(self._booster.predict(self._matrix.transform(table))) + self._shift
        return np.stack([1 - found, found], axis=1) if self.given.target.num_outputs == 2 else found


def _stop_in_time(environment: Any) -> None:
    from lightgbm.callback import EarlyStopException

    if (left := seconds_left()) is not None and left < 0.01:
        raise EarlyStopException(environment.iteration, environment.evaluation_result_list)
