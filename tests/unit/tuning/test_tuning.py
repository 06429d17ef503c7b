"""Searches without processes: spaces, searchers, folds, scores, results, what is refused; and storage."""

from __future__ import annotations

import copy
import functools
import gc
import json
import math
import os
import pkgutil
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.saved_names import NAMES
from kit.tuning_kinds import Scaled, make_scaled, rows
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainloop import TrainLoop, TTBasicModel
from trainloop._support import scratch
from trainloop.errors import CheckpointError, ConfigurationError, ResourceError, UnpicklableError
from trainloop.resources import ResourceQuota, lease, plan
from trainloop.tuning import BaggedPredictor, Choice, EstimatorLoop, Integers, Trial, TuneResult, Uniform, fitting, tune
from trainloop.tuning.folds import Fold, class_targets, described_data, digest, make_folds, own_folds
from trainloop.tuning.result import best_of
from trainloop.tuning.running.trials import Running, View
from trainloop.tuning.scoring import scorer
from trainloop.tuning.space import OptunaSearcher, make_searcher, parse_space
from trainloop.tuning.storage import Storage, dumps, write

Q = ResourceQuota


# -- spaces ----------------------------------------------------------------------------------------------------------


def proposals(searcher: str, space: dict[str, Any], number: int, seed: int = 0) -> list[dict[str, Any] | None]:
    made = make_searcher(searcher, space, seed=seed, mode="min")
    return [made.propose(i) for i in range(number)]


def test_a_grid_is_walked_in_order_the_last_parameter_the_fastest() -> None:
    found = proposals("grid", {"a": [1, 2], "b": ("x", "y"), "c": range(1)}, 5)
    assert found == [
        {"a": 1, "b": "x", "c": 0},
        {"a": 1, "b": "y", "c": 0},
        {"a": 2, "b": "x", "c": 0},
        {"a": 2, "b": "y", "c": 0},
        None,
    ]


def test_a_random_search_of_lists_tries_nothing_twice() -> None:
    space = {"a": range(4), "b": np.array([1.0, 2.0, 3.0])}
    found = proposals("random", space, 13)
    assert found[-1] is None
    assert sorted((p["a"], p["b"]) for p in found[:-1] if p) == [(a, b) for a in range(4) for b in (1.0, 2.0, 3.0)]
    assert found == proposals("random", space, 13)
    assert found != proposals("random", space, 13, seed=1)


def test_a_proposal_depends_on_the_seed_and_the_trial_s_number_alone() -> None:
    space = {"lr": Uniform(1e-4, 1e-1, log=True), "n": Integers(1, 9), "k": ["a", None]}
    searcher = make_searcher("random", space, seed=3, mode="min")
    backwards = [searcher.propose(i) for i in reversed(range(5))]
    searcher.tell(0, {}, 1.0)
    assert proposals("random", space, 5, seed=3) == backwards[::-1]


@given(st.integers(0, 10**6))
def test_samples_are_within_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert 1e-4 <= Uniform(1e-4, 1e-1, log=True).sample(rng) <= 1e-1
    assert -2 <= Uniform(-2, 3).sample(rng) <= 3
    assert Integers(5, 6).sample(rng) in (5, 6)
    assert 1 <= Integers(1, 1000, log=True).sample(rng) <= 1000
    assert Choice(("a", "b")).sample(rng) in ("a", "b")


def test_samples_are_spread_as_they_should() -> None:
    rng = np.random.default_rng(0)
    logs = [Uniform(1e-4, 1.0, log=True).sample(rng) for _ in range(2000)]
    assert 0.45 < np.mean(np.array(logs) < 1e-2) < 0.55
    counts = Counter(Integers(1, 4).sample(rng) for _ in range(2000))
    assert min(counts.values()) > 400
    low = Counter(Integers(1, 100, log=True).sample(rng) <= 10 for _ in range(2000))
    assert low[True] > 700


def test_distributions_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    found = proposals("random", {"lr": stats.uniform(1, 2), "n": stats.randint(3, 5)}, 20)
    assert all(p is not None and 1 <= p["lr"] <= 3 and p["n"] in (3, 4) for p in found)
    assert type(found[0]["n"]) is int  # type: ignore[index]


@pytest.mark.parametrize(
    "space, what",
    [
        ({"lr": 0.1}, r"space\['lr'\]=0.1: must be a list, a range or a distribution.*write \[0.1\]"),
        ({"lr": "abc"}, r"space\['lr'\]='abc'"),
        ({"lr": None}, r"space\['lr'\]=None"),
        ({"lr": {1, 2}}, "must be a list"),
        ({"lr": Choice(3)}, r"space\['lr'\]=3: must be a list"),
        ({"lr": Choice({1, 2})}, "must be a list"),
        ({"lr": Choice(())}, r"space\['lr'\] is empty"),
        ({"lr": []}, r"space\['lr'\] is empty"),
        ({"lr": range(0)}, r"space\['lr'\] is empty"),
        ({1: [2]}, "the name 1: names of parameters must be strings"),
        ([("lr", [1])], "must map names to lists"),
        (None, "must map names to lists"),
    ],
)
def test_malformed_spaces(space: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        parse_space(space)


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: Uniform(2, 1), "low must not exceed high"),
        (lambda: Uniform(0, math.inf), "finite"),
        (lambda: Uniform("a", 1), "finite"),
        (lambda: Uniform(0, 1, log=True), "must be positive"),
        (lambda: Integers(0, 1, log=True), "must be positive"),
        (lambda: Integers(3, 1), "low must not exceed high"),
        (lambda: Integers(1.5, 3), "must be ints"),  # type: ignore[arg-type]
        (lambda: Integers(True, 3), "must be ints"),
        (lambda: Uniform(0, 1, log="no"), "log='no': must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_malformed_distributions(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make()


def test_bounds_may_be_numbers_of_numpy_and_become_plain_ones() -> None:
    assert repr(Integers(np.int64(1), np.int32(9))) == "Integers(low=1, high=9, log=False)"
    assert repr(Uniform(np.float32(0.5), np.int64(2))) == "Uniform(low=0.5, high=2, log=False)"


@pytest.mark.parametrize("searcher", ["bayes", None, 3, "Random"])
def test_an_unknown_searcher(searcher: object) -> None:
    with pytest.raises(ConfigurationError, match=r"searcher=.*: must be 'random', 'grid', 'optuna'"):
        make_searcher(searcher, {"a": [1]}, seed=0, mode="min")


def test_a_grid_has_no_distributions() -> None:
    with pytest.raises(ConfigurationError, match=r"space\['lr'\]=Uniform.* is not a list.*List its values"):
        make_searcher("grid", {"lr": Uniform(0, 1)}, seed=0, mode="min")


def test_a_searcher_of_one_s_own() -> None:
    own = SimpleNamespace(propose=lambda number: {"a": number}, tell=lambda number, params, score: None)
    assert make_searcher(own, {}, seed=0, mode="min").propose(4) == {"a": 4}


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[optuna\]'"):
        make_searcher("optuna", {"a": [1]}, seed=0, mode="min")


def test_optuna_learns_from_scores_and_goes_on_from_earlier_ones() -> None:
    pytest.importorskip("optuna")
    space = {"x": Uniform(-10, 10), "k": ["far", None], "n": Integers(1, 8, log=True)}

    def score(params: dict[str, Any]) -> float:
        return abs(params["x"] - 3) + (0 if params["k"] is None else 5)

    searcher = make_searcher("optuna", space, seed=1, mode="min")
    told = []
    for number in range(40):
        params = searcher.propose(number)
        assert params is not None
        assert params["k"] in ("far", None)
        told.append((number, params, None if number == 5 else score(params)))
        searcher.tell(*told[-1])
    assert np.mean([score(p) for _, p, _ in told[-10:]]) < np.mean([score(p) for _, p, _ in told[:10]]) / 2
    again = make_searcher("optuna", space, seed=0, mode="min")
    for number, params, value in told:
        again.tell(number, params, value)
    assert np.mean([score(again.propose(100 + i) or {}) for i in range(10)]) < 6.5  # 8 at random


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("finished", [0, 3])
def test_a_resumed_search_with_optuna_repeats_no_proposal(own: bool, finished: int) -> None:
    optuna = pytest.importorskip("optuna")
    space = {"x": Uniform(0, 1), "k": [1, 2, 3]}

    def searcher() -> Any:
        return make_searcher(optuna.samplers.RandomSampler(seed=7) if own else "optuna", space, seed=7, mode="min")

    undisturbed, resumed = searcher(), searcher()
    before = [undisturbed.propose(number) for number in range(6)]
    for number in range(finished):
        resumed.tell(number, before[number], 0.5)
    after = [resumed.propose(number) for number in range(3, 6)]
    assert not [params for params in after if params in before[:3]]
    if not own:  # before there are enough scores to learn from
        assert after == before[3:]


def test_optuna_takes_no_distribution_of_scipy() -> None:
    pytest.importorskip("optuna")
    with pytest.raises(ConfigurationError, match="can't sample a scipy distribution"):
        make_searcher("optuna", {"a": pytest.importorskip("scipy.stats").uniform()}, seed=0, mode="min")


# -- folds -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 60), st.integers(2, 8), st.integers(0, 99), st.booleans())
def test_each_row_is_held_out_once_and_sizes_are_equal(rows_: int, folds: int, seed: int, stratified: bool) -> None:
    classes = np.random.default_rng(seed).integers(0, 3, rows_) if stratified else None
    if rows_ < folds:
        with pytest.raises(ConfigurationError, match=f"num_bag_folds={folds} exceeds the number of rows"):
            make_folds(rows_, folds, seed=seed, classes=classes)
        return
    made = make_folds(rows_, folds, seed=seed, classes=classes)
    held = np.concatenate([fold.validation for fold in made])
    assert sorted(held) == list(range(rows_))
    sizes = [len(fold.validation) for fold in made]
    assert max(sizes) - min(sizes) <= 1
    for fold in made:
        assert sorted([*fold.train, *fold.validation]) == list(range(rows_))
        assert list(fold.validation) == sorted(fold.validation)
        if classes is not None:
            for label in range(3):
                share = (classes == label).sum() / folds
                assert abs((classes[fold.validation] == label).sum() - share) < 1
    again = make_folds(rows_, folds, seed=seed, classes=classes)
    assert all((a.validation == b.validation).all() for a, b in zip(made, again))
    assert repr(made[0]).startswith(f"Fold(0 of {folds}, train=")


@pytest.mark.parametrize(
    "targets, classes",
    [
        ([0, 1, 0, 1], True),
        (torch.tensor([0, 1, 1, 0]), True),
        (np.array([[0], [1], [1], [0]]), True),
        (["b", "a", "a", "b"], True),
        ([True, False, True, False], True),
        (np.array(["x", "y", "x", "y"], dtype=object), True),
        ([0.0, 1.0, 0.0, 1.0], False),
        ([3, 1, 4, 5, 9, 2], False),
        (np.zeros((4, 2), dtype=int), False),
        (None, False),
    ],
    ids=repr,
)
def test_which_targets_are_classes(targets: object, classes: bool) -> None:
    assert (class_targets(targets) is not None) == classes


# -- training one fold, in this process ------------------------------------------------------------------------------


def fold_of(data: Any, index: int = 0, folds: int = 3) -> Fold:
    return make_folds(len(data[1]), folds, seed=0)[index]


def fit(made: Any, **changed: Any) -> fitting.Outcome:
    data = rows()
    options = {"fold": fold_of(data), "data": data, "fit_args": None, "params": {}, "metric": "val_loss"}
    return fitting.fit(made, **{**options, **changed})


@pytest.mark.parametrize("number", [29, 30, 31])
def test_targets_of_another_length_than_the_dataset_are_an_error(number: int) -> None:
    fold = Fold(0, 2, np.arange(20), np.arange(20, 30))
    loader = DataLoader(Subset(TensorDataset(torch.ones(30, 1)), fold.train.tolist()))
    if number == 30:
        fitting.check_rows(SimpleNamespace(train_loader=loader), fold, number)
        return
    with pytest.raises(ConfigurationError, match=f"tune got {number} rows .* the dataset in make_loop has 30"):
        fitting.check_rows(SimpleNamespace(train_loader=loader), fold, number)


def test_an_estimator_trains_on_the_fold_s_rows_and_is_scored_on_the_others() -> None:
    x, y = rows()
    fold = fold_of((x, y))
    outcome = fit(Scaled(1.0), fold=fold, fit_args={"bias": 1.0})
    assert outcome.model.mean == y[fold.train].mean()
    assert outcome.model.bias == 1.0
    assert outcome.predictions.tolist() == (x[fold.validation, 0] + 1).tolist()
    assert outcome.score == pytest.approx(np.square(y[fold.validation] + 1).mean())


def test_a_metric_of_one_s_own() -> None:
    assert fit(Scaled(0.5), metric=lambda truth, predicted: np.abs(truth - predicted).max()).score == 0


def test_an_estimator_of_classes_is_scored_by_its_log_loss_and_by_scorers() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.metrics import log_loss

    x = np.random.default_rng(0).normal(size=(90, 3))
    y = np.array(["no", "yes"])[(x[:, 0] > 0).astype(int)]
    fold = fold_of((x, y))
    outcome = fit(linear_model.LogisticRegression(), data=(x, y), fold=fold)
    chances = outcome.model.predict_proba(x[fold.validation])
    assert outcome.score == pytest.approx(log_loss(y[fold.validation], chances))
    assert outcome.predictions.shape == (30, 2)
    accuracy = fit(linear_model.LogisticRegression(), data=(x, y), fold=fold, metric="accuracy")
    assert accuracy.score == (outcome.model.predict(x[fold.validation]) == y[fold.validation]).mean()


def test_scorers_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.metrics", None)
    with pytest.raises(ConfigurationError, match="metric='r2' of a Scaled needs scikit-learn"):
        fit(Scaled(1.0), metric="r2")


def test_an_estimator_loop_brings_its_own_data_and_training() -> None:
    x, y = rows(9)
    loop = EstimatorLoop(Scaled(1.0), (x, y), (x, y), fit=lambda model, x, y, scale: Scaled(scale))
    outcome = fit(loop, fold=None, data=None, fit_args={"scale": 0.5})
    assert (outcome.score, outcome.model.scale) == (0, 0.5)
    in_place = EstimatorLoop(Scaled(0.5), (x, y), (x, y), fit=lambda model, x, y: model.fit(x, y))
    assert fit(in_place, fold=None, data=None).model.mean == y.mean()


class Made:
    """The methods of a loop that a fold needs."""

    def __init__(
        self, history: dict[str, list[float]], rows: int = 7, trained: bool = True, columns: Any = None
    ) -> None:
        self.history = history
        self.epoch = int(trained)
        self.model = torch.nn.Linear(1, 1)
        self.validation_loader = object() if rows else None
        self.rows = rows
        self.columns = torch.ones(rows, 2, dtype=torch.bfloat16) if columns is None else columns
        self.fits: list[dict[str, Any]] = []

    def fit(self, **arguments: Any) -> None:
        self.fits.append(arguments)

    def predict_on_validation_set(self) -> tuple[Any, Any, Any]:
        return self.columns, torch.zeros(self.rows), {}

    def evaluate_loss_on_validation_set(self) -> float | dict[str, float]:
        return {"a": 1.0, "b": 2.0}


def test_a_loop_is_scored_by_the_last_value_in_its_history() -> None:
    outcome = fit(Made({"val_loss": [3.0, 1.0, 2.0], "f1": [0.1]}))
    assert (outcome.score, outcome.predictions.shape) == (2.0, (7, 2))
    assert fit(Made({"loss": [1.0]})).score == 3.0  # evaluated, and summed over a MultiLoss
    assert fit(Made({"loss": [1.0]}), metric=lambda truth, predicted: predicted.sum()).score == 14


def test_predictions_may_be_a_dict_or_a_tuple_of_columns(tmp_path: Path) -> None:
    folds = make_folds(14, 2, seed=0)
    of_fold = [torch.from_numpy(fold.validation) for fold in folds]
    for fold, rows_ in zip(folds, of_fold):
        columns = {"boxes": (torch.stack([rows_, -rows_], 1), rows_ / 2), "class": rows_ % 3}
        outcome = fit(
            Made({"val_loss": [1.0]}, columns=columns), fold=fold, metric=lambda truth, found: found["class"].sum()
        )
        assert outcome.score == (rows_ % 3).sum()
        write(tmp_path / "trial-0000" / f"fold-{fold.index}" / "predictions.pkl", outcome.predictions)
        write(tmp_path / "trial-0000" / f"fold-{fold.index}" / "result.pkl", {})
    whole = result([trial(0, 1.0, 1.0)], folder=tmp_path, folds=folds).out_of_fold_predictions
    assert whole["class"].tolist() == [row % 3 for row in range(14)]
    assert whole["boxes"][0].tolist() == [[row, -row] for row in range(14)]
    assert whole["boxes"][1].tolist() == [row / 2 for row in range(14)]


def test_an_untrained_loop_is_trained() -> None:
    made = Made({}, trained=False)
    fit(made)
    fit(made, params={"num_epochs": 3})
    fit(made, fit_args={"num_iterations": 5}, params={"num_epochs": 3})
    fit(made, fit_args={"grad_accumulation": 2}, params={"num_epochs": 3})
    assert made.fits == [
        {"num_epochs": 10},
        {"num_epochs": 3},
        {"num_iterations": 5},
        {"grad_accumulation": 2, "num_epochs": 3},
    ]


@pytest.mark.parametrize(
    "made, changed, what",
    [
        (object(), {}, "make_loop returned a object. Return a TrainLoop, or an object with fit and predict"),
        (None, {}, "make_loop returned a NoneType"),
        (Scaled(1.0), {"fold": None}, r"a Scaled without data to train it on\. Pass data=\(x, y\)"),
        (Scaled(1.0), {"data": None}, "a Scaled without data"),
        (Made({"loss": [1.0]}), {"metric": "f1"}, "metric='f1' is not in the loop's history, which has loss"),
        (Made({}, rows=0), {}, "metric='val_loss' is not in the loop's history, which has nothing"),
        (
            Made({"val_loss": [1.0]}, rows=5),
            {},
            r"has 5 rows, but the fold holds out 7.*Subset\(data, fold.validation\)",
        ),
        (Made({"val_loss": [1.0]}, rows=0), {}, "has 0 rows, but the fold holds out 7"),
        (Made({"val_loss": [1.0]}, columns={"a": torch.ones(7), "b": torch.ones(3)}), {}, "has 3 rows, but the fold"),
        (EstimatorLoop(Scaled(1.0), rows()), {"fold": None}, r"EstimatorLoop\(Scaled\) has no validation rows"),
    ],
)
def test_what_a_fold_cannot_train_or_score(made: Any, changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        fit(made, **changed)


def test_rows_of_tables_tensors_and_lists() -> None:
    picked = np.array([2, 0])
    assert fitting.rows_of([5, 6, 7], picked) == [7, 5]
    assert fitting.rows_of(torch.tensor([5, 6, 7]), picked).tolist() == [7, 5]
    sparse = pytest.importorskip("scipy.sparse").coo_matrix([[5], [6], [7]])
    assert fitting.rows_of(sparse, picked).toarray().tolist() == [[7], [5]]
    assert fitting.rows_of(SimpleNamespace(iloc={tuple(picked): "rows"}.get and _Iloc()), picked) == [2, 0]


class _Iloc:
    def __getitem__(self, picked: np.ndarray[Any, Any]) -> list[int]:
        return picked.tolist()  # type: ignore[no-any-return]


def test_predictions_as_rows() -> None:
    ragged = fitting.as_rows([[1], [1, 2]])
    assert (ragged.dtype, len(ragged)) == (object, 2)
    assert fitting.as_rows(["a", "b"]).tolist() == ["a", "b"]
    assert fitting.as_rows(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_rows_that_have_no_order_can_t_be_combined() -> None:
    with pytest.raises(
        ConfigurationError, match=r"can't be combined: '<' not supported .*each model of predictor\.models"
    ):
        fitting.combine([fitting.as_rows([{"boxes": 1}]), fitting.as_rows([{"boxes": 2}])])


def test_floats_are_averaged_and_classes_vote() -> None:
    assert fitting.combine([np.array([0.0, 1.0]), np.array([1.0, 1.0])]).tolist() == [0.5, 1.0]
    assert fitting.combine([np.array([0, 2]), np.array([1, 2]), np.array([1, 0])]).tolist() == [1, 2]
    assert fitting.combine([np.array(["b"]), np.array(["a"])]).tolist() == ["a"]  # the least of equals


@pytest.mark.parametrize(
    "data, expected",
    [
        (TensorDataset(torch.ones(4, 2), torch.arange(4) % 2), (4, [0, 1, 0, 1])),
        (Subset(TensorDataset(torch.ones(6, 2), torch.arange(6) % 2), [1, 3, 0]), (3, [1, 1, 0])),
        ([1, 2, 3], (3, None)),
    ],
)
def test_the_rows_and_targets_that_a_loop_shows(data: Any, expected: tuple[int, Any]) -> None:
    found = fitting.learn_rows(lambda params, fold: loader_of(Subset(data, fold.train.tolist())), {})
    assert (found[0], None if found[1] is None else fitting.as_rows(found[1]).tolist()) == expected


def test_named_targets_are_found() -> None:
    made = SimpleNamespace(train_loader=SimpleNamespace(dataset=Subset(_Named(), [0])))
    assert fitting.learn_rows(lambda params, fold: made, {}) == (4, [1, 2, 1, 2])


class _Named:
    targets = (1, 2, 1, 2)
    targets = list(targets)  # type: ignore[assignment]

    def __len__(self) -> int:
        return 4


# -- results ---------------------------------------------------------------------------------------------------------


def trial(number: int, *scores: float | None, state: str = "done", **params: Any) -> Trial:
    return Trial(number, params, list(scores), 1.5, state, {})  # type: ignore[arg-type]


def result(trials: list[Trial], mode: str = "min", **changed: Any) -> TuneResult:
    options = {"metric": "val_loss", "plan": plan(Q(2, 0)), "folder": Path("nowhere"), "folds": None, **changed}
    return TuneResult(trials, mode=mode, **options)  # type: ignore[arg-type]


def test_the_best_is_the_best_whole_trial() -> None:
    trials = [
        trial(0, 2.0, 4.0),
        trial(1, 0.1, None, state="partial"),
        trial(2, 2.0, 2.0),
        trial(3, 2.0, 2.0),
        trial(4, math.nan, 1.0),
        trial(5, None, None, state="failed"),
    ]
    assert best_of(trials, "min") is trials[2]
    assert best_of(trials, "max") is trials[0]
    assert best_of([trials[5], trials[1]], "min") is trials[1]
    assert best_of([trials[4], trials[5]], "min") is None
    assert (trials[0].score, trials[1].score, trials[5].score) == (3.0, 0.1, None)


def test_a_result_shows_its_trials_best_first() -> None:
    found = result(
        [trial(0, 0.5, 0.7, lr=0.1), trial(1, 0.25, None, state="partial", lr=0.01), trial(2, 0.1, 0.3, lr=1e-3)],
        interrupted=True,
    )
    assert str(found).splitlines() == [
        "trial     lr  val_loss    folds  seconds    state",
        "    2  0.001       0.2  0.1 0.3      1.5     done",
        "    0    0.1       0.6  0.5 0.7      1.5     done",
        "    1   0.01      0.25   0.25 -      1.5  partial",
        "2 of 3 trials done; interrupted",
    ]
    assert repr(found) == "TuneResult(3 trials, best val_loss 0.2 (trial 2), interrupted)"
    html = found._repr_html_()
    assert html.count("<tr>") == 4
    assert "<th>val_loss</th>" in html
    assert (found.best_params, found.best_score) == ({"lr": 1e-3}, pytest.approx(0.2))
    assert found.rows()[0]["folds"] == [0.1, 0.3]
    assert "abcdefghijklmnopqrstu..." in result([trial(0, 1.0, name="abcdefghijklmnopqrstuvwxyz")]).table()


def test_parameters_with_names_of_columns_have_columns_of_their_own() -> None:
    params: dict[str, Any] = {"trial": 7, "seconds": 8, "val_loss": 9, "lr": 10}
    (row,) = result([Trial(0, params, [1.0], 1.5, "done")]).rows()
    assert [row[name] for name in params] == [0, 1.5, 1.0, 10]
    assert [row[f"params.{name}"] for name in ("trial", "seconds", "val_loss")] == [7, 8, 9]


def test_a_result_without_scores_tells_the_first_error() -> None:
    lost = Trial(0, {}, [None], 0.0, "failed", {0: "ValueError: this one"})
    with pytest.raises(ConfigurationError, match=r"None of the 1 trials has a score(?s:.*)ValueError: this one"):
        _ = result([lost]).best_params
    with pytest.raises(ConfigurationError, match="The scores are NaN"):
        _ = result([trial(0, float("nan"))]).best_params
    with pytest.raises(ConfigurationError, match="No trial was started"):
        _ = result([]).best_score
    assert repr(result([lost])) == "TuneResult(1 trials, no score)"
    with pytest.raises(ConfigurationError, match="out-of-fold predictions need folds"):
        _ = result([trial(0, 1.0)]).out_of_fold_predictions


@pytest.mark.long
def test_results_are_plotted_by_trial_and_by_number(tmp_path: Path, may_leave: Callable[..., None]) -> None:
    pytest.importorskip("matplotlib")
    may_leave("matplotlib")  # keeps its fonts open
    found = result([trial(0, 0.5, lr=1e-4, kind="a", deep=True), trial(1, 0.2, lr=1e-1, kind="b", deep=False)])
    figure = found.plot(tmp_path / "plot.png")
    assert [ax.get_xlabel() for ax in figure.axes] == ["trial", "lr"]
    assert figure.axes[1].get_xscale() == "log"
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[plot\]'"):
        result([]).plot()


def test_what_is_shown_while_a_search_runs(capsys: pytest.CaptureFixture[str]) -> None:
    division = plan(Q(4, 1), num_trials=4, num_bag_folds=2)
    first = Running(Trial(0, {}, [1.0, 2.0], 1.0, "done"))
    failed = Running(Trial(1, {}, [0.1, None], 1.0, "partial", {1: "x"}))
    now = Running(Trial(2, {}, [None, None], 0.0, "interrupted"), training={0: 0}, waiting=[1])
    with View(division, "min", progress=True) as view:
        view.show([first, failed, now])
        view.show([first, failed, now])  # nothing new ended, so nothing is said
    now.interrupt()
    view.last([first, failed, now], interrupted=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "tune: 1 of 4 trials done, 1 running, 1 failed; CPUs 1/4, GPUs 0.25/1; best 1.5 (trial 0)",
        "tune was interrupted: 1 of 4 trials done, 0 running, 1 failed, 1 interrupted; CPUs 0/4, GPUs 0/1; "
        "best 1.5 (trial 0)",
    ]
    assert "while this fold trained" in now.trial.errors[0]
    assert "before this fold began" in now.trial.errors[1]


# -- predictors and storage ------------------------------------------------------------------------------------------


def test_a_predictor_survives_the_disk(tmp_path: Path) -> None:
    bag = BaggedPredictor([Scaled(0.5), Scaled(1.5)])
    for model in bag.models:
        model.fit(*rows())
    bag.save(tmp_path / "a" / "bag")
    again = BaggedPredictor.load(tmp_path / "a" / "bag")
    assert again.predict(rows(3)[0]).tolist() == bag.predict(rows(3)[0]).tolist() == [0.0, 1.0, 2.0]
    assert (len(again), repr(again)) == (2, "BaggedPredictor(2 of Scaled)")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["bag"]


class Logarithms(TTBasicModel):
    """Predicts the logarithm of its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)[:, 0]


def test_a_predictor_transforms_rows_as_the_loops_of_its_models_do(tmp_path: Path) -> None:
    data = TensorDataset(torch.rand(12, 3), torch.rand(12))
    units = [lambda batches: torch.cat(batches).exp(), lambda batches: torch.cat(batches).mul(2).exp()]
    loops = []
    for transform in units:
        model, loader = Logarithms(), DataLoader(data, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = TrainLoop(
            model, loader, loader, None, optimizer, torch.nn.MSELoss(), pred_transform_fn=transform, progress_bar=False
        )
        loops.append(loop)
    found = [
        fitting.fit(loop, fold=None, data=None, fit_args={"num_epochs": 1}, params={}, metric="val_loss")
        for loop in loops
    ]
    BaggedPredictor([one.stored for one in found]).save(tmp_path / "bag")
    bag = BaggedPredictor.load(tmp_path / "bag")
    expected = np.mean([loop.predict_on_validation_set()[0].numpy() for loop in loops], axis=0)
    np.testing.assert_array_equal(bag.predict(data), expected)
    assert [type(model) for model in bag.models] == [Logarithms] * 2


@pytest.mark.usefixtures("starts_processes")
def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    from trainloop.tabular import TabularPredictor

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path))
    BaggedPredictor([Scaled(0.5)]).save("~/bag")
    assert (tmp_path / "bag").exists()
    assert len(BaggedPredictor.load("~/bag")) == 1
    result = tune(make_scaled, {"scale": [1.0]}, num_trials=1, storage="~/search", progress=False)
    assert result.folder == tmp_path / "search"
    assert TabularPredictor("y", path="~/table").path == str(tmp_path / "table")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_in_files_of_earlier_versions_exist(name: str) -> None:
    """Saved predictors and searches refer to these names. If you rename one, keep an alias under the old name."""
    for library in ("sklearn", "pandas"):
        pytest.importorskip(library)
    assert pkgutil.resolve_name(name) is not None


def test_a_damaged_or_foreign_predictor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bag"
    with pytest.raises(CheckpointError, match="no bagged predictor at"):
        BaggedPredictor.load(path)
    BaggedPredictor([Scaled(0.5)]).save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its checksum is wrong"):
        BaggedPredictor.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="is not a bagged predictor"):
        BaggedPredictor.load(path)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UnpicklableError, match=r"tune.*make_loop.*guard: lock"):
        dumps({"make_loop": SimpleNamespace(guard=threading.Lock())}, "tune")


IDENTITY = {"space": {"a": "[1]"}, "seed": 3}


def test_a_storage_is_one_search_in_one_process(tmp_path: Path) -> None:
    store = Storage(tmp_path, IDENTITY)
    with pytest.raises(ConfigurationError, match="another process is using this folder"):
        Storage(tmp_path, IDENTITY)
    store.close()
    Storage(tmp_path, IDENTITY).close()
    with pytest.raises(ConfigurationError, match=r"a search with space=\{'a': '\[1\]'\}, but this call has space="):
        Storage(tmp_path, {**IDENTITY, "space": {"a": "[2]"}})
    Storage(tmp_path, IDENTITY).close()  # a refused one lets go


@pytest.mark.parametrize("data", [b"", b"{", b"\xff"])
def test_damaged_files_of_a_storage_are_named(data: bytes, tmp_path: Path) -> None:
    store = Storage(tmp_path, IDENTITY)
    store.begin_trial(0, {})
    store.close()
    for name in ("trial-0000/params.pkl", "search.json"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name}' can't be read .*delete the folder"):
            store.params(0)
            Storage(tmp_path, IDENTITY)
        (tmp_path / "trial-0000" / "params.pkl").unlink(missing_ok=True)


def test_a_search_without_a_seed_keeps_the_one_it_was_begun_with(tmp_path: Path) -> None:
    store = Storage(tmp_path, {**IDENTITY, "seed": None})
    seed = store.identity["seed"]
    store.close()
    store = Storage(tmp_path, {**IDENTITY, "seed": None})
    assert store.identity["seed"] == seed
    store.close()
    with pytest.raises(ConfigurationError, match=f"seed={seed}, but this call has seed=-4"):
        Storage(tmp_path, {**IDENTITY, "seed": -4})


def test_parameters_of_any_type_are_kept_exactly_and_readably(tmp_path: Path) -> None:
    store = Storage(tmp_path, IDENTITY)
    store.begin_trial(2, {"lr": 0.1, "make": max})
    assert store.params(2) == {"lr": 0.1, "make": max}
    assert store.params(1) is None
    store.begin_trial(3, {"kernel": {(3, 3): 1}})
    assert store.params(3) == {"kernel": {(3, 3): 1}}
    assert json.loads((tmp_path / "trial-0002" / "params.json").read_text())["lr"] == 0.1
    store.close()


# -- what tune refuses before any process starts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, error, what",
    [
        ({"make_loop": 3}, ConfigurationError, "make_loop=3: must be callable"),
        ({"make_loop": lambda params: None}, ConfigurationError, r"make_loop\(params, fold\): too many positional"),
        ({"mode": "lowest"}, ConfigurationError, "mode='lowest': must be 'auto', 'min' or 'max'"),
        ({"backend": "dask"}, ConfigurationError, "backend='dask': must be 'local' or 'ray'"),
        ({"searcher": "bayes"}, ConfigurationError, "searcher='bayes'"),
        ({"space": {"a": 1}}, ConfigurationError, r"space\['a'\]=1"),
        ({"data": (1,)}, ConfigurationError, r"data must be \(x, y\)"),
        ({"data": (None, [1])}, ConfigurationError, r"data must be \(x, y\)"),
        ({"data": ([1, 2], [1])}, ConfigurationError, "same number of rows, but they have 2, 1"),
        ({"data": ([1, 2], [1, 2]), "targets": [1]}, ConfigurationError, "same number of rows, but they have 2, 2, 1"),
        ({"targets": 5}, ConfigurationError, "must be arrays, tables or lists"),
        ({"targets": np.array(5)}, ConfigurationError, "must be arrays, tables or lists"),
        ({"storage": 5}, ConfigurationError, "tune: storage=5: must be a path, or None"),
        ({"total": 2}, ConfigurationError, "tune: total=2: must be a ResourceQuota"),
        ({"metric": 3}, ConfigurationError, "tune: metric=3: must be a name, or a function"),
        ({"fit_args": [1]}, ConfigurationError, r"tune: fit_args=\[1\]: must be a dict, or None"),
        ({"parallel_folds": "no"}, ConfigurationError, "tune: parallel_folds='no': must be True or False"),
        ({"lease_timeout_s": "1"}, ConfigurationError, "tune: lease_timeout_s='1': must be a number of 0 or more"),
        ({"preload": 1}, ConfigurationError, "tune: preload=1: must be a list of texts"),
        ({"storage": __file__}, ConfigurationError, "can't be written to: .* is a file"),
        ({"num_trials": 0}, ResourceError, "num_trials=0: must be an int of 1 or more"),
        ({"num_trials": None, "space": {}}, ResourceError, "num_trials=None: must be an int of 1 or more"),
        ({"seed": -1}, ResourceError, "seed=-1: must be an int of 0 or more"),
        ({"num_bag_folds": -1}, ResourceError, "num_bag_folds=-1"),
        ({"total": Q(100000, 0)}, ResourceError, "num_cpus=100000 exceeds the number of CPUs"),
        ({"total": Q(1, 0), "per_model": Q(2)}, ResourceError, "per_model num_cpus=2 is more than num_cpus=1"),
        ({"total": Q(1, 0), "per_model": Q(num_gpus=0.5)}, ResourceError, "no GPU granted"),
        (
            {"num_bag_folds": 30, "targets": [1, 2]},
            ConfigurationError,
            r"num_bag_folds=30 exceeds the number of rows \(2\)",
        ),
    ],
)
def test_arguments_that_cannot_work(
    changed: dict[str, Any], error: type[Exception], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path))
    arguments = {"make_loop": make_scaled, "space": {"scale": [1.0]}, "num_trials": 1, "progress": False, **changed}
    with pytest.raises(error, match=what):
        tune(arguments.pop("make_loop"), arguments.pop("space"), **arguments)
    everything = lease.Request(len(os.sched_getaffinity(0)), [f"cpu-{cpu}" for cpu in sorted(os.sched_getaffinity(0))])
    lease.acquire({"cpu": everything}, timeout_s=0).close()  # not asked for, or given back


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"backend='ray' needs ray: pip install '\.\[ray\]'"):
        tune(make_scaled, {"scale": [1.0]}, num_trials=1, backend="ray")


# -- what runs when, with a backend that starts nothing --------------------------------------------------------------


class Pretended:
    """Ends the fold that began first, one at each look, unless it hangs; remembers how many it had."""

    hangs = False

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.jobs: list[Any] = []
        self.seen: list[list[tuple[int, int]]] = []

    def start(self, job: Any, bag: int) -> None:
        assert (job.trial, job.fold) not in [(other.trial, other.fold) for other in self.running]
        assert not {*job.cpus} & {cpu for other in self.running for cpu in other.cpus}
        self.running.append(job)
        self.jobs.append(job)

    def wait(self, timeout_s: float) -> list[Any]:
        self.seen.append([(job.trial, job.fold) for job in self.running])
        if self.hangs:
            threading.Event().wait(timeout_s)
            return []
        job = self.running.pop(0)
        folder = Path(job.folder)
        write(folder / "model.pkl", Scaled(float(job.trial)))
        write(folder / "predictions.pkl", np.full(len(rows()[0]) // 3, float(job.trial)))
        write(folder / "result.pkl", {"score": float(job.trial), "seconds": 1.0})
        return [job]

    def close(self) -> list[Any]:
        running, self.running = self.running, []
        return running


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretended:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))
    backend = Pretended()
    search = "trainloop.tuning.running.search"
    monkeypatch.setattr(f"{search}.LocalBackend", lambda *_: backend)
    monkeypatch.setattr(f"{search}.lease_total", lambda total, *_: (list(range(total.num_cpus)), []))
    monkeypatch.setattr(f"{search}.machine_total", lambda total: total)
    return backend


def pretend(**changed: Any) -> TuneResult:
    options: dict[str, Any] = {"num_trials": 4, "num_bag_folds": 3, "total": Q(2, 0), "seed": 0, "progress": False}
    return tune(make_scaled, {"scale": [0.0, 1.0, 2.0, 3.0]}, **{"data": rows(), **options, **changed})


@pytest.mark.long
def test_trials_beyond_the_size_of_the_grid_take_no_time_and_no_resources(pretended: Pretended) -> None:
    began = time.time()
    found = pretend(num_trials=100, time_limit_s=1000, searcher="random")
    assert (found.plan.num_trials, len(found.trials)) == (4, 4)
    left = pretended.jobs[0].until - began  # of 6 waves
    assert 140 < left < 160, left
    pretended.jobs.clear()
    own = SimpleNamespace(propose=lambda number: {} if number < 3 else None, tell=lambda number, params, score: None)
    assert len(pretend(num_trials=100, searcher=own).trials) == 3


@pytest.mark.long
def test_three_folds_on_two_cpus_leave_none_idle(pretended: Pretended) -> None:
    found = pretend()
    assert [len(running) for running in pretended.seen] == [2] * 11 + [1]
    assert pretended.seen[2] == [(0, 2), (1, 0)]
    assert found.plan.waves == 8  # of two at once: the search takes six
    assert [trial.state for trial in found.trials] == ["done"] * 4


@pytest.mark.long
def test_folds_one_after_the_other_share_the_cpus_with_other_trials(pretended: Pretended) -> None:
    pretend(parallel_folds=False)
    assert all(len({trial for trial, _ in running}) == len(running) for running in pretended.seen)
    assert max(map(len, pretended.seen)) == 2


@pytest.mark.long
def test_models_of_beaten_trials_are_there_if_asked_for(pretended: Pretended) -> None:
    found = pretend(keep="all")
    assert [found.predictor_of(trial).predict(rows()[0])[1] for trial in found.trials] == [0.0, 1.0, 2.0, 3.0]
    assert [set(found.predictions_of(trial)) for trial in found.trials] == [{0.0}, {1.0}, {2.0}, {3.0}]
    found = pretend()
    assert len(found.predictor_of(found.best_trial)) == 3
    with pytest.raises(ConfigurationError, match=r"trial 1 is not the best trial.*keep='all'"):
        found.predictor_of(found.trials[1])
    with pytest.raises(ConfigurationError, match="keep='some': must be 'best' or 'all'"):
        pretend(keep="some")


@pytest.mark.long
def test_a_copy_of_a_result_whose_folder_was_deleted(pretended: Pretended) -> None:
    found = pretend()
    copied = copy.deepcopy(found)
    assert len(copied.predictor) == 3
    del found
    gc.collect()
    for use in (lambda: copied.predictor, lambda: copied.out_of_fold_predictions):
        with pytest.raises(ConfigurationError, match=r"has been deleted.*storage=folder"):
            use()
    assert len(copied.rows()) == 4


@pytest.mark.long
def test_a_search_ends_when_its_time_is_over(pretended: Pretended) -> None:
    pretended.hangs = True
    began = time.monotonic()
    found = pretend(time_limit_s=0.3)
    assert 0.25 < time.monotonic() - began < 5
    assert found.interrupted
    assert not pretended.running
    assert found.trials[0].errors[0] == "The search's time was up while this fold trained."
    with pytest.raises(ConfigurationError, match="tune: time_limit_s=0: must be a number above 0"):
        pretend(time_limit_s=0)
    with pytest.raises(ConfigurationError, match="make_loop did not return within time_limit_s"):
        pretend(time_limit_s=0.3, data=None)
    assert not pretended.running


def loader_of(data: Any) -> SimpleNamespace:
    return SimpleNamespace(train_loader=DataLoader(data))


def test_the_rows_are_learnt_by_a_call_like_any_other() -> None:
    data = TensorDataset(torch.zeros(9, 2), torch.arange(9) % 3)

    def as_the_guide_has_it(params: dict[str, Any], fold: Fold) -> SimpleNamespace:
        return loader_of(Subset(data, fold.train.tolist()))  # None has no rows

    length, targets = fitting.learn_rows(as_the_guide_has_it, {})
    assert (length, targets.tolist()) == (9, [0, 1, 2] * 3)

    def with_arrays(params: dict[str, Any], fold: Fold) -> SimpleNamespace:
        return loader_of(TensorDataset(*(tensor[fold.train] for tensor in data.tensors)))

    with pytest.raises(ConfigurationError, match=r"does not show how many rows.*Pass targets"):
        fitting.learn_rows(with_arrays, {})
    with pytest.raises(KeyError, match="lr"):
        fitting.learn_rows(lambda params, fold: params["lr"], {})


# -- folds of the user's own -------------------------------------------------------------------------------------------


class Halves:
    """A splitter in scikit-learn's form: holds out the second half, then the first."""

    def split(self, x: Any, y: Any = None, groups: Any = None) -> Any:
        rows = np.arange(len(x))
        half = len(rows) // 2
        yield rows[:half], rows[half:]
        yield rows[half:], rows[:half]


def test_own_folds_are_a_splitter_s_or_pairs_of_rows() -> None:
    x, y = np.zeros((6, 2)), np.arange(6)
    for given_ in (
        Halves(),
        list(Halves().split(x)),
        Halves().split(x),
        [([0, 1, 2], [5, 4, 3]), ([3, 4, 5], [0, 1, 2])],
    ):
        folds = own_folds(given_, x, y)
        assert [(f.index, f.num_folds, f.train.tolist(), f.validation.tolist()) for f in folds] == [
            (0, 2, [0, 1, 2], [3, 4, 5]),
            (1, 2, [3, 4, 5], [0, 1, 2]),
        ]
    assert len(own_folds(Halves(), None, y)[0].train) == 3  # the targets tell the rows
    ordered = own_folds([([2, 0, 0, 1], [5, 4, 3]), ([3, 4, 5], [0, 1, 2])], x, y)[0]
    assert (ordered.train.tolist(), ordered.validation.tolist()) == ([2, 0, 0, 1], [3, 4, 5])
    assert digest(folds) == digest(own_folds(Halves(), x, y)) != digest(folds[::-1])


@pytest.mark.parametrize(
    "given, what",
    [
        (3, "must be an object with split"),
        ([([0], [1])], "at least two pairs"),
        ([([0], [1]), 5], r"folds\[1\]=5: must be a pair"),
        ([([0], [1]), ([0], [])], r"folds\[1\]=\(\[0\], \[\]\): must be a pair"),
        ([([0.5], [1]), ([0], [1])], r"folds\[0\]=.* must be a pair of arrays of row numbers"),
        ([([True, False], [False, True]), ([0], [1])], r"folds\[0\]=.* must be a pair"),
        ([([0], [6]), ([0], [1])], r"folds\[0\] contains row 6, but rows are numbered from 0 to 5"),
        ([([0], [1]), ([-1], [1])], r"folds\[1\] contains row -1"),
        ([([0, 1], [1, 2]), ([0], [1])], r"folds\[0\] trains on row 1 and also holds it out"),
    ],
)
def test_own_folds_that_cannot_be(given: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        own_folds(given, np.zeros((6, 2)), np.arange(6))


def test_a_splitter_needs_the_rows_and_own_folds_have_their_number(pretended: Pretended) -> None:
    with pytest.raises(ConfigurationError, match=r"needs the data to split.*folds=list\(splitter"):
        own_folds(Halves(), None, None)
    splitters = pytest.importorskip("sklearn.model_selection")
    with pytest.raises(
        ConfigurationError, match=r"GroupKFold.* can't split the data: The 'groups' .*split\(x, y, groups"
    ):
        own_folds(splitters.GroupKFold(3), np.zeros((6, 2)), np.arange(6))
    with pytest.raises(ConfigurationError, match=r"num_bag_folds=3 with folds: .*Remove num_bag_folds"):
        pretend(folds=Halves())


@pytest.mark.long
def test_folds_of_a_sparse_matrix(pretended: Pretended) -> None:
    x, y = rows()
    data = pytest.importorskip("scipy.sparse").csr_matrix(x), y
    found = pretend(data=data)
    assert sum(len(fold.validation) for fold in found.folds or ()) == len(y)
    assert len(own_folds(list(Halves().split(x)), *data)) == 2


@pytest.mark.long
def test_a_search_over_scipy_s_distributions_and_functions_is_resumed(pretended: Pretended, tmp_path: Path) -> None:
    """Their reprs have addresses, which differ between processes, and no parameters."""
    from scipy import stats

    def searched(high: int) -> TuneResult:
        options = {
            "num_trials": 1,
            "seed": np.int64(3),
            "num_bag_folds": 2,
            "data": rows(),
            "total": Q(2, 0),
            "progress": False,
        }
        space = {"scale": stats.uniform(1, high), "f": [lambda: None]}
        return tune(lambda params, fold: Scaled(params["scale"]), space, storage=tmp_path / "search", **options)

    assert searched(2).best_params["scale"] == searched(2).best_params["scale"]
    with pytest.raises(ConfigurationError, match="contains a search with space="):
        searched(3)


def test_other_data_is_another_search(pretended: Pretended, tmp_path: Path) -> None:
    x, y = rows()

    def searched(*data: Any) -> None:
        pretend(storage=tmp_path / "s", data=data)

    searched(x, y)
    searched(x.copy(), y.tolist())
    for other in ((x[:-1], y[:-1]), (x + 1, y), (x, y[::-1])):
        with pytest.raises(ConfigurationError, match=r"contains a search with data='\d+ rows, checksum .*, but this"):
            searched(*other)
    pd = pytest.importorskip("pandas")
    texts = pd.DataFrame({"a": ["x", None, "y"], "b": pd.Categorical(["u", "v", "u"])})
    assert described_data(texts) == described_data(texts.copy()) != described_data(texts[::-1])
    assert described_data([[1], [1, 2]]) == described_data([[1], [1, 2]])
    assert described_data([{8, 0}, {2}]) == described_data([{0, 8}, {2}]) != described_data([{1}, {2}])
    large = np.zeros((500_000, 2))
    tracemalloc.start()
    try:
        assert described_data(large) != described_data(large + (np.arange(500_000) == 499_999)[:, None])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        described_data(large)
        assert tracemalloc.get_traced_memory()[1] - before < large.nbytes / 4  # data may fill the memory
    finally:
        tracemalloc.stop()


def test_out_of_fold_classes_are_not_cut_to_the_length_of_the_first_fold(tmp_path: Path) -> None:
    folds = make_folds(4, 2, seed=0)
    for fold, found in zip(folds, (["a", "b"], ["longer", "b"])):
        write(tmp_path / "trial-0000" / f"fold-{fold.index}" / "predictions.pkl", np.array(found))
        write(tmp_path / "trial-0000" / f"fold-{fold.index}" / "result.pkl", {})
    whole = result([trial(0, 1.0, 1.0)], folder=tmp_path, folds=folds).out_of_fold_predictions
    assert sorted(whole.tolist()) == ["a", "b", "b", "longer"]


def accuracy(truth: Any, predicted: Any, *, adjusted: bool) -> float:
    return 0.0


class Distance:
    """A metric with scikit-learn's attribute for the direction, as those of other libraries have it."""

    greater_is_better = False

    def __call__(self, truth: Any, predicted: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("metric", "given", "mode"),
    [
        ("val_loss", "auto", "min"),
        ("val_accuracy", "auto", "max"),
        ("neg_log_loss", "auto", "max"),
        ("explained_variance", "auto", "max"),
        (Distance(), "auto", "min"),
        (scorer("neg_mean_squared_error"), "auto", "max"),
        (scorer(lambda truth, predicted: 0.0), "auto", "max"),
        ("weight", "max", "max"),
        ("val_pearson", "auto", "max"),
        (lambda truth, predicted: 0.0, "auto", "min"),
        (functools.partial(accuracy, adjusted=True), "auto", "max"),
        (functools.partial(scorer("neg_mean_squared_error"), classes=None), "auto", "max"),
    ],
)
def test_the_metric_shows_which_trial_is_best(pretended: Pretended, metric: Any, given: str, mode: str) -> None:
    found = pretend(metric=metric, mode=given)
    scores = [trial.score for trial in found.trials]
    assert found.mode == mode
    assert found.best_score == (min(scores) if mode == "min" else max(scores))


def test_a_metric_whose_name_does_not_show_a_direction_is_warned_of(pretended: Pretended) -> None:
    with pytest.warns(UserWarning, match=r"metric='weight': its name does not show which direction is better"):
        assert pretend(metric="weight").mode == "min"
    assert pretend(metric="weight", mode="min").mode == "min"  # without a warning, which would be an error here


def test_a_mode_that_contradicts_the_metric_is_warned_of(pretended: Pretended) -> None:
    with pytest.warns(UserWarning, match=r"metric='val_accuracy', mode='min': by its name, higher is better"):
        assert pretend(metric="val_accuracy", mode="min").best_score == 0.0


def test_other_arguments_of_fit_are_another_search(pretended: Pretended, tmp_path: Path) -> None:
    pretend(storage=tmp_path / "s", fit_args={"num_epochs": 1, "callbacks": [object()]})
    pretend(storage=tmp_path / "s", fit_args={"num_epochs": 1, "callbacks": [object()]})
    with pytest.raises(ConfigurationError, match=r"contains a search with fit_args={'num_epochs': 1}, but this call"):
        pretend(storage=tmp_path / "s", fit_args={"num_epochs": 20})
    with pytest.raises(
        ConfigurationError, match=r"contains a search with searcher='random', but this call has .*'grid'"
    ):
        pretend(storage=tmp_path / "s", fit_args={"num_epochs": 1}, searcher="grid")


@pytest.mark.filterwarnings("ignore:.*by its name, lower is better")
@pytest.mark.long
def test_own_folds_are_trained_and_rows_outside_of_them_are_missing(pretended: Pretended, tmp_path: Path) -> None:
    third = len(rows()[0]) // 3
    numbers = np.arange(len(rows()[0]))
    given = [  # as for a time series: the first third is never held out
        (numbers[:third], numbers[third : 2 * third]),
        (numbers[: 2 * third], numbers[2 * third :]),
    ]
    options = {"num_bag_folds": 1, "folds": given, "num_trials": 2, "storage": tmp_path / "s", "mode": "max"}
    found = pretend(**options)
    assert [fold.validation.tolist() for fold in found.folds or ()] == [pair[1].tolist() for pair in given]
    assert [trial.scores for trial in found.trials] == [[0.0, 0.0], [1.0, 1.0]]
    held_out = found.out_of_fold_predictions
    assert np.isnan(held_out[:third]).all()
    assert (held_out[third:] == 1.0).all()
    found = pretend(
        **{**options, "storage": None, "folds": [pair[::-1] for pair in given[:1]] * 2}
    )  # not the last third
    assert np.isnan(found.out_of_fold_predictions).tolist() == [False] * third + [True] * 2 * third
    with pytest.raises(ConfigurationError, match="contains a search with folds="):
        pretend(**{**options, "folds": given[::-1]})


@pytest.mark.long
def test_cross_validation_of_one_setting_warns_of_nothing(pretended: Pretended) -> None:
    options: dict[str, Any] = {"num_trials": 1, "total": Q(2, 0), "seed": 0, "progress": False, "data": rows()}
    assert len(tune(make_scaled, {}, num_bag_folds=3, **options).best_trial.scores) == 3  # warnings are errors
    with pytest.warns(UserWarning, match=r"space is empty, so one model is trained.*num_bag_folds=5"):
        tune(make_scaled, {}, **options)


# -- the temporary folder ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_next_search_removes_the_folder_of_one_that_was_killed(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "temporary"
    where.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(where))

    def there() -> set[Path]:
        return set(where.glob("trainloop-tmp-*"))

    first = pretend()
    (alive,) = there()
    killed = scratch.temporary_folder()
    (Path(killed.path) / "model.pkl").write_bytes(b"x")
    os.close(killed.lock_fd)  # as the system does when a process ends, in whatever way
    second = pretend()
    assert not Path(killed.path).exists()
    assert alive in there()
    assert len(there()) == 2
    assert first.predictor is not None
    del first, second
    gc.collect()
    assert not there()


class Point:
    """A choice that is equal to itself only."""

    def __init__(self, x: int) -> None:
        self.x = x


IDENTITIES: dict[str, list[Any]] = {
    "lambdas": [lambda x: x, lambda x: -x],
    "objects": [Point(1), Point(2)],
    "arrays": [np.zeros(2), np.ones(2)],
    "nan": [math.nan, 1.0],
    "equal": [True, 1, 1.0],
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_choices_of_a_resumed_search_are_known_by_their_place(name: str) -> None:
    pytest.importorskip("optuna")
    space = {"h": IDENTITIES[name]}
    first = make_searcher("optuna", space, seed=0, mode="min")
    proposed = [first.propose(number) for number in range(4)]
    assert isinstance(first, OptunaSearcher)
    again = make_searcher("optuna", space, seed=0, mode="min")
    assert isinstance(again, OptunaSearcher)
    for number, params in enumerate(proposed):
        assert params is not None
        assert space["h"][first.choices(number)["h"]] is params["h"]
        again.restore(number, first.choices(number))
        again.tell(number, {"h": cloudpickle.loads(cloudpickle.dumps(params["h"]))}, float(number))
    told = [trial.params["h"] for trial in again._study.trials]
    assert told == [first.choices(number)["h"] for number in range(4)]
    older = make_searcher("optuna", space, seed=0, mode="min")  # a search that was stored without places
    older.tell(0, {"h": cloudpickle.loads(cloudpickle.dumps(space["h"][1]))}, 0.0)
    assert len(older._study.trials) == (name in ("nan", "equal"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("labels", [np.array([0.0, 1.0, 2.0]), np.array(["a", "b", "c"]), np.array([0, 1, 2])], ids=str)
def test_classifiers_without_probabilities_vote(labels: Any) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)), labels[np.arange(60) % 3]
    models = [linear.RidgeClassifier().fit(x[i:], y[i:]) for i in (0, 20, 40)]
    bag = BaggedPredictor(models).predict(x)
    each = np.stack([model.predict(x) for model in models])
    assert set(bag) <= set(labels)
    for i in range(60):
        values, counts = np.unique(each[:, i], return_counts=True)
        assert bag[i] == values[counts.argmax()]
    fold = Fold(0, 2, np.arange(30), np.arange(30, 60))
    found = fitting.fit(linear.RidgeClassifier(), fold=fold, data=(x, y), fit_args=None, params={}, metric="val_loss")
    expected = linear.RidgeClassifier().fit(x[:30], y[:30]).predict(x[30:])
    assert found.score == pytest.approx((expected != y[30:]).mean())
    numbers = [linear.Ridge().fit(x[i:], np.arange(60.0)[i:]) for i in (0, 20)]
    mean = np.mean([model.predict(x) for model in numbers], axis=0)
    assert BaggedPredictor(numbers).predict(x) == pytest.approx(mean)


def test_classifiers_of_several_targets() -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    y = np.stack([x[:, 0] > 0, x[:, 1] > 0], 1).astype(float)
    fold = Fold(0, 2, np.arange(20), np.arange(20, 40))

    def right(truth: Any, predicted: Any) -> float:
        return float((truth == predicted).mean())

    forest = ensemble.RandomForestClassifier(5, random_state=0)
    found = fitting.fit(forest, fold=fold, data=(x, y), fit_args=None, params={}, metric=right)
    assert found.predictions.shape == (20, 2)
    assert found.score == right(y[20:], found.model.predict(x[20:]))
    assert set(np.unique(BaggedPredictor([found.model, found.model]).predict(x))) == {0.0, 1.0}
    with pytest.raises(ConfigurationError, match="a single target for each row"):
        fitting.fit(forest, fold=fold, data=(x, y), fit_args=None, params={}, metric="val_loss")


def test_a_metric_that_returns_no_number_is_named() -> None:
    for value in (None, {"f1": 0.5}, "good", [1, 2]):
        with pytest.raises(ConfigurationError, match=r"metric rates\(y_true, y_pred\) returned .*, but must return a"):
            fitting._score(named(value), None, None)
    assert fitting._score(named(np.float32(0.5)), None, None) == 0.5


def named(value: Any) -> Any:
    def rates(y_true: Any, y_pred: Any) -> Any:
        return value

    return rates
