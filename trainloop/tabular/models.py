"""Thin adapters: each takes a cleaned table and gives chances of all classes, or numbers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from trainloop.resources import gpu_or_cpu
from trainloop.tabular.columns import Columns, Rows
from trainloop.tabular.targets import Target

__all__ = ["Adapter", "Estimator", "Given", "GradientBoosting", "extra_trees", "forest", "linear", "matrix"]

_ROUNDS = ("num_boost_round", "n_estimators", "num_iterations", "num_rounds")


@dataclass(frozen=True)
class Given:
    """What a model may use."""

    columns: Columns
    target: Target
    params: Mapping[str, Any]
    seconds: float | None
    """From its start on, after which it should come to an end by itself."""
    until: float | None
    """``time.time()`` at which it should have ended, whenever it began."""
    gpu: bool
    """Whether a GPU was asked for and granted."""


class Adapter:
    """One model; ``fit`` and ``predict`` take cleaned tables.

    Classes are positions in ``Target.classes``; a fold may lack some of them, and its model still gives all columns.
    """

    def __init__(self, given: Given) -> None:
        self.given = given
        self.is_regression = given.target.problem == "regression"
        self.facts: dict[str, Any] = {"notes": [], "used_gpu": False}
        """What the user should hear of, since the model's process has no screen; and whether it had a GPU."""
        self._began = time.monotonic()

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        """Train; ``validation`` tells when to stop."""
        raise NotImplementedError

    def predict(self, table: pd.DataFrame) -> Rows:
        """Chances, of shape (rows, classes), or numbers."""
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """Of the model's time; None where it has no end."""
        if self.given.seconds is None or self.given.until is None:
            return None
        return min(self._began + self.given.seconds - time.monotonic(), self.given.until - time.time())


def num_threads() -> int:
    """CPUs that this process may use: the plan's share, set by whoever started it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matrix(columns: Columns, *, onehot: bool, scale: bool = False, gaps: bool = False, words: int = 300) -> Any:
    """scikit-learn's transformers from a cleaned table to numbers: first numbers, then categories, then texts.

    Parameters
    ----------
    onehot : bool
        A column for each category; else codes, where one that training had not is -1.
    scale : bool
        Whether numbers get mean 0 and variance 1.
    gaps : bool
        Whether missing numbers and unknown categories stay NaN.
    words : int
        Of each text column, by TF-IDF; of more than 1000 the matrix may be sparse.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

    numbers = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    if gaps or scale:
        numbers = FunctionTransformer() if gaps else make_pipeline(numbers, StandardScaler())
    if onehot:
        encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=100)
    else:
        unknown = np.nan if gaps else -1
        encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=unknown, max_categories=1000)
    # Any run of signs is a word too, so that no text is without words.
    tfidf = TfidfVectorizer(max_features=words, sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    parts: list[Any] = [("numbers", numbers, columns.of("number")), ("categories", encoder, columns.of("category"))]
    parts += [(f"text {name}", tfidf, name) for name in columns.of("text")]
    return ColumnTransformer(parts, sparse_threshold=0.3 if words > 1000 else 0.0)


class Estimator(Adapter):
    """An estimator of scikit-learn's form behind a matrix of numbers without gaps.

    Parameters
    ----------
    make : callable
        Gives the estimator of the model's settings.
    """

    def __init__(self, given: Given, make: Callable[..., Any], **of_matrix: Any) -> None:
        super().__init__(given)
        self._estimator = make(**given.params)
        self._matrix = matrix(given.columns, **(of_matrix or {"onehot": True, "scale": True}))

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        x = self._matrix.fit_transform(table)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*converge")  # near the optimum is as good
            grows = all(hasattr(self._estimator, name) for name in ("n_estimators", "warm_start"))
            if grows and self.given.seconds is not None:
                self._grow(x, y)
            else:
                trained = self._estimator.fit(x, y)
                self._estimator = self._estimator if trained is None else trained

    def _grow(self, x: Rows, y: Rows) -> None:
        """As many trees as there is time for."""
        trees, wanted = 0, self._estimator.n_estimators
        while trees < wanted:
            began, grown = time.monotonic(), min(wanted, max(10, trees * 2))
            self._estimator.set_params(n_estimators=grown, warm_start=True).fit(x, y)
            a_tree, trees = (time.monotonic() - began) / (grown - trees), grown
            wanted = min(wanted, trees + int(0.8 * max(0.0, self.seconds_left() or 0.0) / a_tree))

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
    """Logistic regression, or ridge regression."""
    from sklearn.linear_model import LogisticRegression, Ridge

    regression = given.target.problem == "regression"
    make = Ridge if regression else partial(LogisticRegression, max_iter=300)
    return Estimator(given, make, onehot=True, scale=True, words=5000)


def forest(given: Given, kind: str = "RandomForest") -> Estimator:
    """A random forest."""
    from sklearn import ensemble

    make = getattr(ensemble, kind + ("Regressor" if given.target.problem == "regression" else "Classifier"))
    return Estimator(given, partial(make, n_estimators=300, random_state=0, n_jobs=num_threads()), onehot=False)


def extra_trees(given: Given) -> Estimator:
    """Extremely randomised trees."""
    return forest(given, "ExtraTrees")


class GradientBoosting(Adapter):
    """LightGBM, stopped where the validation rows say so; on the GPU where it was asked for and can be used."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        import lightgbm

        columns, outputs = self.given.columns, self.given.target.num_outputs
        self._matrix = matrix(columns, onehot=False, gaps=True)
        x = self._matrix.fit_transform(table)
        first = len(columns.of("number"))
        coded = list(range(first, first + len(columns.of("category"))))
        # All classes, also those that this fold lacks.
        of_classes = {"objective": "binary"} if outputs == 2 else {"objective": "multiclass", "num_class": outputs}
        params: dict[str, Any] = {"learning_rate": 0.05, "verbosity": -1, "seed": 0, "num_threads": num_threads()}
        params |= {**({} if self.is_regression else of_classes), **self.given.params}
        rounds = next((params.pop(name) for name in _ROUNDS if name in params), 10_000)
        patience = params.pop("early_stopping_rounds", 100 if len(table) < 10_000 else 30)

        def fit(**device: str) -> Any:
            # Made again where the first device was none: a data set is bound to its device.
            data = lightgbm.Dataset(x, y, categorical_feature=coded)
            held_out = lightgbm.Dataset(self._matrix.transform(validation[0]), validation[1], reference=data)
            stop = lightgbm.early_stopping(patience, first_metric_only=True, verbose=False)
            return lightgbm.train(
                {**params, **device}, data, rounds, valid_sets=[held_out], callbacks=[stop, self._in_time]
            )

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._booster = gpu_or_cpu(lambda: fit(device_type="gpu"), fit) if self.given.gpu else fit()
        self.facts["notes"] = [str(each.message) for each in caught if "on the CPU" in str(each.message)]
        self.facts["used_gpu"] = self.given.gpu and not self.facts["notes"]

    def _in_time(self, environment: Any) -> None:
        from lightgbm.callback import EarlyStopException

        left = self.seconds_left()
        if left is not None and left <= 0:
            raise EarlyStopException(environment.iteration, environment.evaluation_result_list)

    def predict(self, table: pd.DataFrame) -> Rows:
        # Not the threads of the process that it was trained in.
        found = np.asarray(self._booster.predict(self._matrix.transform(table), num_threads=num_threads()))
        return np.stack([1 - found, found], axis=1) if self.given.target.num_outputs == 2 else found
