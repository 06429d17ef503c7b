"""Metrics, held to scikit-learn's, and what evaluate_result_package takes."""

from __future__ import annotations

import functools
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from trainloop import result_package as rp
from trainloop.errors import ConfigurationError
from trainloop.result_package import evaluate_result_package

skm = pytest.importorskip("sklearn.metrics")
N = 211


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_classification_is_that_of_scikit_learn(seed: int, classes: int) -> None:
    scores = rng(seed).normal(size=(N, classes))
    # The last class of many never occurs among the targets, so that one has no rows of its own.
    y_true = rng(seed + 100).integers(0, max(classes - 1, 2), N)
    y_pred = scores.argmax(1)
    macro = {"average": "macro", "zero_division": 0}
    expected = {
        "accuracy": skm.accuracy_score(y_true, y_pred),
        "precision": skm.precision_score(y_true, y_pred, **macro),
        "recall": skm.recall_score(y_true, y_pred, **macro),
        "f1": skm.f1_score(y_true, y_pred, **macro),
    }
    package = rp.classification
    one_hot = np.eye(classes)[y_true]
    for predicted, targets in [
        (scores, y_true),
        (y_pred, y_true),
        (torch.tensor(scores), torch.tensor(y_true)),
        (torch.tensor(y_pred).unsqueeze(1), torch.tensor(y_true)),
        (list(y_pred), list(y_true)),
        ([torch.tensor(row) for row in scores], torch.tensor(y_true)),
        (scores, one_hot),
    ]:
        assert evaluate_result_package(package, predicted, targets) == pytest.approx(expected, abs=1e-12)


def test_classes_may_be_words_or_one_for_each_token() -> None:
    assert rp.accuracy(["a", "b", "c"], ["a", "b", "b"]) == pytest.approx(2 / 3)
    assert rp.f1(["a", "b", "c"], ["a", "b", "b"]) == pytest.approx(
        skm.f1_score(["a", "b", "b"], ["a", "b", "c"], average="macro")
    )
    tokens = torch.tensor([[3, 4, 5], [5, 4, 3]])
    assert rp.accuracy(tokens, torch.tensor([[3, 4, 0], [5, 4, 3]])) == pytest.approx(5 / 6)


def test_several_labels_a_row_are_not_scored_as_classes() -> None:
    """Scores of each label, each of which would count as a class that is always wrong; and rows of unequal length."""
    labels = torch.from_numpy(rng(0).integers(0, 2, (20, 5)))
    with pytest.raises(ConfigurationError, match="For several labels per row"):
        rp.f1(torch.from_numpy(rng(1).normal(size=(20, 5))), labels)
    assert rp.accuracy(labels.float(), labels) == 1.0  # classes of elements
    with pytest.raises(ConfigurationError, match="unequal length"):
        rp.accuracy([torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(3)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_binary_is_that_of_scikit_learn(seed: int, ties: bool) -> None:
    scores = rng(seed).random(N)
    if ties:
        scores = scores.round(1)
    y_true = (rng(seed + 100).random(N) < scores).astype(int)
    chosen = scores >= 0.5
    precisions, recalls, _ = skm.precision_recall_curve(y_true, scores)
    expected = {
        "accuracy": skm.accuracy_score(y_true, chosen),
        "precision": skm.precision_score(y_true, chosen),
        "recall": skm.recall_score(y_true, chosen),
        "f1": skm.f1_score(y_true, chosen),
        "roc_auc": skm.roc_auc_score(y_true, scores),
        "pr_auc": skm.auc(recalls, precisions),
    }
    both = np.stack([1 - scores, scores], axis=1)
    for predicted in (scores, scores[:, None], torch.tensor(both), list(scores)):
        found = evaluate_result_package(rp.binary_classification, predicted, y_true)
        assert found == pytest.approx(expected, abs=1e-12)
    logits = np.log(scores.clip(1e-9) / (1 - scores).clip(1e-9))
    by_logits = evaluate_result_package(partial(rp.binary_classification, threshold=0.0), logits, y_true)
    assert by_logits == pytest.approx(expected, abs=1e-12)


def test_two_columns_of_logits_are_ranked_by_their_difference() -> None:
    y_true, logits = rng(0).integers(0, 2, N), rng(1).normal(size=(N, 2))
    chances = torch.softmax(torch.from_numpy(logits), 1)
    for signs in (y_true, 2 * y_true - 1, np.eye(2)[y_true]):
        assert rp.roc_auc(logits, signs) == pytest.approx(skm.roc_auc_score(y_true, chances[:, 1]))
        assert rp.pr_auc(chances.log(), signs) == pytest.approx(rp.pr_auc(chances, y_true))
    assert rp.binary_classification(np.full((N, 2), np.nan), y_true)["recall"] == 0  # diverged
    assert rp.binary_classification(2 * y_true - 1, y_true)["accuracy"] == 1


@pytest.mark.parametrize(
    ("metric", "y_pred", "y_true", "what"),
    [
        (rp.accuracy, [0.9, 0.2], [1, 0], r"numbers, of which each would count as a class.*use binary_classification"),
        (rp.f1, torch.tensor([[0.9], [0.2]]), torch.tensor([[1], [0]]), "use binary_classification or roc_auc"),
        (rp.roc_auc, [0.9, 0.2], [2, 1], r"targets must be 0 or 1 \(or -1 and 1\).* but are \[1, 2\]"),
        (rp.pr_auc, [0.9, 0.2], ["yes", "no"], r"but are \['no', 'yes'\]"),
        (rp.roc_auc, [0.9, 0.2, 0.1], [0, 1, 2], "for more than two classes, use 'classification'"),
        (rp.roc_auc, np.ones((4, 3)), [0, 1, 0, 1], r"predictions have shape \(4, 3\), but scores of two classes have"),
        (rp.binary_classification, [[2.0, 1.0], [0.1, 3.0]], [0, 1], "two columns that are not probabilities"),
        (rp.mse, np.ones((2, 3)), np.ones((3, 2)), r"shape \(2, 3\), but targets have shape \(3, 2\)"),
        (rp.binary_classification, [-2.0, 0.3, 0.4], [0, 1, 1], r"from -2 to 0.4, .*partial\(.*threshold=0.0\)"),
        (rp.mse, np.ones((4, 3, 2, 2)), np.ones((4, 2, 2, 3)), r"shape \(4, 3, 2, 2\), but targets have shape"),
        (rp.accuracy, np.ones((4, 3, 2), int), np.ones((4, 2, 3), int), "Pass one prediction for each target"),
        (rp.accuracy, 2.5 * np.eye(3), [1, 2, 3], "score for each of the classes 0 to 2, which are never equal to 3"),
        (rp.f1, np.eye(2), ["a", "b"], "never equal to 'a'"),
        (rp.accuracy, [True, False], [1, -1], "predictions are True or False, which are never equal to -1"),
        (rp.accuracy, [1, -1], [True, False], "targets are True or False, which are never equal to -1"),
        (rp.accuracy, [[0, 1], [1, 0]], [[0, 1], [1, -100]], "targets contain -100, which nn.CrossEntropyLoss ignores"),
        (rp.recall, [0, 1, 2], [[0, 7], [1, 3], [2, 9]], r"targets have shape \(3, 2\), but are not one-hot"),
    ],
)
def test_scores_that_would_be_taken_for_something_else(metric: Any, y_pred: Any, y_true: Any, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        metric(y_pred, y_true)


def test_one_class_alone_has_no_area() -> None:
    found = evaluate_result_package(rp.binary_classification, [0.1, 0.2], [0, 0])
    assert np.isnan(found["roc_auc"])
    assert np.isnan(found["pr_auc"])
    assert (found["accuracy"], found["precision"], found["recall"], found["f1"]) == (1.0, 0.0, 0.0, 0.0)


def test_regression_is_that_of_scikit_learn() -> None:
    y_true, y_pred = rng(0).normal(size=(2, N))
    expected = {
        "mse": skm.mean_squared_error(y_true, y_pred),
        "rmse": skm.mean_squared_error(y_true, y_pred) ** 0.5,
        "mae": skm.mean_absolute_error(y_true, y_pred),
        "r2": skm.r2_score(y_true, y_pred),
    }
    package = rp.regression
    assert evaluate_result_package(package, y_pred, y_true) == pytest.approx(expected, abs=1e-12)
    # (n, 1) against (n,) is no (n, n)
    assert evaluate_result_package(package, torch.tensor(y_pred)[:, None], y_true) == pytest.approx(expected, abs=1e-12)
    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert rp.mse(half, [1.0, 4.0]) == 2.0
    assert np.isnan(rp.r2([1.0, 2.0], [3.0, 3.0]))
    images = rng(1).random((4, 1, 3, 2))
    assert rp.mse(images.reshape(4, 6), images) == rp.mse(images[:, 0], images) == 0


@pytest.mark.parametrize("metric", [rp.mse, rp.accuracy])
def test_unequal_lengths_are_told(metric: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"predictions have shape \(3,\), but targets have shape \(2,\)\. Pass one prediction for each",
    ):
        metric([1, 2, 3], [1, 2])


def test_functions_lists_and_dicts() -> None:
    def rows(y_pred: Any, y_true: Any, metadata: Any) -> int:
        return len(y_pred) + metadata["more"]

    def two(y_pred: Any, y_true: Any, metadata: Any) -> dict[str, Any]:
        return {"a": torch.tensor(1.5), "b": np.float32(2)}

    data = ([0, 1], [0, 0], {"more": 5})
    assert evaluate_result_package(rows, *data) == {"rows": 7.0}
    assert evaluate_result_package([rows, two], *data) == {"rows": 7.0, "a": 1.5, "b": 2.0}
    assert evaluate_result_package({"n": rows, "x": two}, *data) == {"n": 7.0, "x_a": 1.5, "x_b": 2.0}
    assert evaluate_result_package([rows, "accuracy"], *data) == {"rows": 7.0, "accuracy": 0.5}
    assert all(type(v) is float for v in evaluate_result_package(two, *data).values())


@pytest.mark.parametrize("name", rp._REMOVED)
def test_classes_of_earlier_versions_say_what_replaces_them(name: str) -> None:
    with pytest.raises(ImportError, match=f"has no {name}: use .* instead"):
        getattr(rp, name)


@pytest.mark.parametrize(
    "package, message",
    [
        (3, r"3 can't score predictions. Pass a function of \(y_pred, y_true, metadata\), the name of a function"),
        ("acuracy", r"no metric has the name 'acuracy'. Names are accuracy, "),
        (dict, r"can't score predictions. It is a class: pass an instance"),
        (lambda *_: np.zeros(3), r"metric '<lambda>' returned a ndarray of shape \(3,\), but must return one number"),
        (lambda *_: {"x": None}, r"metric 'x' returned a NoneType, but must return one number, or a dict of numbers"),
    ],
)
def test_what_can_not_score_is_told(package: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evaluate_result_package(package, [1, 2, 3], [1, 2, 3])


@pytest.mark.long
def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    scores = torch.tensor(rng(0).normal(size=(N, 3)))
    y_true = torch.tensor(rng(1).integers(0, 3, N))
    kind = {"task": "multiclass", "num_classes": 3}
    single = torchmetrics.Accuracy(**kind, average="micro")
    expected = float((scores.argmax(1) == y_true).double().mean())
    for rows in ((scores, y_true), (scores.numpy(), y_true.tolist())):
        assert evaluate_result_package(single, *rows) == {"MulticlassAccuracy": pytest.approx(expected)}
    assert single.sync_on_compute
    both = torchmetrics.MetricCollection(
        {"acc": torchmetrics.Accuracy(**kind, average="micro"), "f1": torchmetrics.F1Score(**kind)}
    )
    found = evaluate_result_package(both, scores, y_true)
    assert found["acc"] == pytest.approx(expected)
    assert set(found) == {"acc", "f1"}
    again = evaluate_result_package({"a": single, "b": both}, scores, y_true)
    assert set(again) == {"a", "b_acc", "b_f1"}


def test_without_scikit_learn_packages_are_refused_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = r"A metric of classes, or r2, needs scikit-learn: pip install '\.\[metrics\]'"
    monkeypatch.setattr(rp, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    for package in (rp.classification, "binary_classification", ["mse", "regression"]):
        with pytest.raises(ConfigurationError, match=hidden):
            rp.check_metric_functions(package, "mine")
    rp.check_metric_functions(["mse", rp.mae], "mine")
    for metric in (rp.accuracy, rp.f1, rp.roc_auc, rp.r2):
        with pytest.raises(ConfigurationError, match=hidden):
            metric([0, 1], [1, 0])
    assert rp.mse([0, 1], [1, 0]) == rp.mae([0, 1], [1, 0]) == 1


def test_a_model_that_diverges_scores_nan_and_trains_on() -> None:
    scores = [0.1, float("nan"), 0.3]
    assert np.isnan(rp.roc_auc(scores, [0, 1, 0]))
    assert np.isnan(rp.pr_auc(scores, [0, 1, 0]))
    found = evaluate_result_package(rp.regression, scores, [0.0, 1.0, 2.0])
    assert all(np.isnan(value) for value in found.values())
    assert np.isnan(rp.accuracy([], []))


def test_a_partial_has_the_name_of_its_function() -> None:
    def errors(y_pred: Any, y_true: Any, metadata: Any, most: float) -> float:
        return min(rp.mae(y_pred, y_true), most)

    assert evaluate_result_package(functools.partial(errors, most=0.25), [0, 1], [1, 1]) == {"errors": 0.25}


def test_two_metrics_of_one_name_are_one_only_if_they_are_equal() -> None:
    def accuracy(y_pred: Any, y_true: Any, metadata: Any) -> float:
        return 0.0

    assert evaluate_result_package(["accuracy", rp.accuracy], [0, 1], [0, 1]) == {"accuracy": 1.0}
    with pytest.raises(ConfigurationError, match="two metrics have the name 'accuracy', with the values 1 and 0"):
        evaluate_result_package(["accuracy", accuracy], [0, 1], [0, 1])
