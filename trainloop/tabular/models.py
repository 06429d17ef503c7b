"""Thin adapters: each takes a cleaned table and gives chances of all classes, or numbers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainloop.errors import ConfigurationError
from trainloop.resources import gpu_or_cpu
from trainloop.tabular.columns import Columns
from trainloop.tabular.targets import Target

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Adapter", "Given", "GradientBoosting", "Linear", "OwnEstimator", "Trees", "matrix"]

Rows = np.ndarray[Any, Any]

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
        self.notes: list[str] = []
        """What the user should hear of; the model's process has no screen."""
        self.used_gpu = False
        self._began = time.monotonic()

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        """Train; ``validation`` tells when to stop."""
        raise NotImplementedError

    def predict(self, table: pd.DataFrame) -> Rows:
        """Chances, of shape (rows, classes), or numbers."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        """What the fit should know without the model itself, which may be large."""
        return {"notes": self.notes, "used_gpu": self.used_gpu}

    def seconds_left(self) -> float | None:
        """Of the model's time; None where it has no end."""
        if self.given.seconds is None or self.given.until is None:
            return None
        return min(self._began + self.given.seconds - time.monotonic(), self.given.until - time.time())

    def in_all_classes(self, chances: Rows, classes: Any) -> Rows:
        """Chances of the classes that a fold had, among all."""
        whole = np.zeros((len(chances), self.given.target.num_outputs))
        whole[:, np.asarray(classes, dtype=int)] = chances
        return whole

    @property
    def is_regression(self) -> bool:
        return self.given.target.problem == "regression"


def num_threads() -> int:
    """CPUs that this process may use: the plan's share, set by whoever started it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matrix(columns: Columns, *, categories: str, impute: bool = True, scale: bool = False, words: int = 300) -> Any:
    """scikit-learn's transformers from a cleaned table to numbers: first numbers, then categories, then texts.

    Parameters
    ----------
    categories : {'onehot', 'codes', 'codes or nan'}
        With codes, a category that training had not is -1 or NaN.
    impute : bool
        False leaves NaN where a number is missing.
    scale : bool
        Whether numbers get mean 0 and variance 1.
    words : int
        Of each text column, by TF-IDF.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

    steps: list[Any] = []
    if impute:
        steps.append(SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True))
    if scale:
        steps.append(StandardScaler())
    if categories == "onehot":
        encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=100)
    else:
        unknown = -1 if categories == "codes" else np.nan
        encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=unknown, max_categories=1000)
    parts: list[tuple[str, Any, Any]] = [
        ("numbers", make_pipeline(*steps) if steps else FunctionTransformer(), columns.of("number")),
        ("categories", encoder, columns.of("category")),
    ]
    for name in columns.of("text"):
        # Any run of signs is a word too, so that no text is without words.
        tfidf = TfidfVectorizer(max_features=words, sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
        parts.append((f"text {name}", tfidf, name))
    return ColumnTransformer(parts, sparse_threshold=0.3 if categories == "onehot" and not scale else 0.0)


class _Estimator(Adapter):
    """A scikit-learn estimator behind a matrix."""

    _pipeline: Any
    _estimator: Any

    def predict(self, table: pd.DataFrame) -> Rows:
        return self._chances(self._estimator, self._pipeline.transform(table))

    def _chances(self, estimator: Any, x: Any) -> Rows:
        if self.is_regression:
            return np.asarray(estimator.predict(x), dtype=float).reshape(len(x) if isinstance(x, np.ndarray) else -1)
        if hasattr(estimator, "predict_proba"):
            return self.in_all_classes(estimator.predict_proba(x), estimator.classes_)
        found = np.asarray(estimator.predict(x), dtype=int)
        return np.eye(self.given.target.num_outputs)[found]


class Linear(_Estimator):
    """Logistic regression, or ridge regression."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression, Ridge

        self._pipeline = matrix(self.given.columns, categories="onehot", scale=True, words=5000)
        defaults: dict[str, Any] = {"alpha": 1.0} if self.is_regression else {"C": 1.0, "max_iter": 300}
        make = Ridge if self.is_regression else LogisticRegression
        self._estimator = make(**{**defaults, **self.given.params})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # near the optimum is as good
            self._estimator.fit(self._pipeline.fit_transform(table), y)


class Trees(_Estimator):
    """A random forest, or extremely randomised trees; in time that is short, with fewer trees."""

    def __init__(self, given: Given, *, extra: bool) -> None:
        super().__init__(given)
        self._extra = extra

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        from sklearn import ensemble

        kind = ("ExtraTrees" if self._extra else "RandomForest") + ("Regressor" if self.is_regression else "Classifier")
        params = {"n_estimators": 300, "random_state": 0, "n_jobs": num_threads(), **self.given.params}
        self._pipeline = matrix(self.given.columns, categories="codes")
        x = self._pipeline.fit_transform(table)
        if self.given.seconds is None:
            self._estimator = getattr(ensemble, kind)(**params).fit(x, y)
            return
        wanted, trees = params.pop("n_estimators"), 0
        self._estimator = getattr(ensemble, kind)(n_estimators=1, warm_start=True, **params)
        while trees < wanted:
            began = time.monotonic()
            grown = min(wanted, max(trees + 10, trees * 2))
            self._estimator.set_params(n_estimators=grown).fit(x, y)
            a_tree = (time.monotonic() - began) / (grown - trees)
            trees = grown
            # Twice as many again, or as many as there is time for.
            wanted = min(wanted, trees + int(0.8 * max(0.0, self.seconds_left() or 0.0) / a_tree))


class GradientBoosting(_Estimator):
    """LightGBM, stopped where the validation rows say so; on the GPU where it was asked for and can be used."""

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        import lightgbm

        columns = self.given.columns
        self._pipeline = matrix(columns, categories="codes or nan", impute=False)
        x = self._pipeline.fit_transform(table)
        first = len(columns.of("number"))
        coded = list(range(first, first + len(columns.of("category"))))
        outputs = self.given.target.num_outputs
        params = {
            "learning_rate": 0.05,
            "verbosity": -1,
            "seed": 0,
            "num_threads": num_threads(),
            # All classes, also those that this fold lacks.
            **({"objective": "multiclass", "num_class": outputs} if outputs > 2 else {}),
            **({"objective": "binary"} if outputs == 2 else {}),
            **self.given.params,
        }
        rounds = next((params.pop(name) for name in _ROUNDS if name in params), 10_000)
        patience = params.pop("early_stopping_rounds", 100 if len(table) < 10_000 else 30)

        def fit(**device: str) -> Any:
            # Made again where the first device was none: a data set is bound to its device.
            data = lightgbm.Dataset(x, y, categorical_feature=coded)
            held_out = lightgbm.Dataset(self._pipeline.transform(validation[0]), validation[1], reference=data)
            callbacks: list[Any] = [lightgbm.early_stopping(patience, first_metric_only=True, verbose=False)]
            if self.given.seconds is not None:
                callbacks.append(self._in_time)
            asked = {**params, **device}
            return lightgbm.train(asked, data, num_boost_round=rounds, valid_sets=[held_out], callbacks=callbacks)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._estimator = gpu_or_cpu(lambda: fit(device_type="gpu"), fit) if self.given.gpu else fit()
        self.notes += [str(each.message) for each in caught if "on the CPU" in str(each.message)]
        self.used_gpu = self.given.gpu and not self.notes

    def _in_time(self, environment: Any) -> None:
        from lightgbm.callback import EarlyStopException

        left = self.seconds_left()
        if left is not None and left <= 0:
            raise EarlyStopException(environment.iteration, environment.evaluation_result_list)

    def predict(self, table: pd.DataFrame) -> Rows:
        # Not the threads of the process that it was trained in.
        found = np.asarray(self._estimator.predict(self._pipeline.transform(table), num_threads=num_threads()))
        return np.stack([1 - found, found], axis=1) if self.given.target.num_outputs == 2 else found


class OwnEstimator(_Estimator):
    """A class of the user's, with ``fit`` and ``predict``, on a matrix of numbers without gaps."""

    def __init__(self, given: Given, *, made_by: Callable[..., Any]) -> None:
        super().__init__(given)
        self._made_by = made_by

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        self._pipeline = matrix(self.given.columns, categories="onehot", scale=True)
        x = self._pipeline.fit_transform(table)
        estimator = self._made_by(**self.given.params)
        trained = estimator.fit(x.toarray() if hasattr(x, "toarray") else x, y)
        self._estimator = estimator if trained is None else trained


def check_installed(module: str, extra: str, wanted_by: str) -> None:
    """See that a module can be imported where it is used.

    Raises
    ------
    ConfigurationError
        That names the extra.
    """
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise ConfigurationError(f"{wanted_by} needs {module}: pip install 'trainloop[{extra}]', or leave it out.")
