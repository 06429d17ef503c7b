"""Tables without processes: what columns are, what is refused, targets, metrics, settings, the plan of the snippets."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from kit.tables import kinds_of_columns, mixed
from sklearn import metrics as sk
from sklearn.linear_model import Perceptron

import trainloop.tabular.predictor as predictor_module
import trainloop.tabular.specs as specs_module
import trainloop.tuning.running.local as local_module
from trainloop.errors import CheckpointError, ConfigurationError, ResourceError
from trainloop.resources import ResourceQuota, Resources, plan
from trainloop.tabular import TabularPredictor, get_hyperparameter_config, list_image_models, list_text_presets
from trainloop.tabular.columns import Columns, read_table
from trainloop.tabular.models import Given, GradientBoosting, extra_trees, linear
from trainloop.tabular.specs import parse_hyperparameters
from trainloop.tabular.targets import Target, find_metric
from trainloop.tuning import Trial
from trainloop.tuning.scoring import ensemble_weights

# -- columns ---------------------------------------------------------------------------------------------------------


def test_what_a_column_is() -> None:
    columns = Columns.learn(kinds_of_columns())
    by_kind: dict[str, list[str]] = {}
    for name, kind in columns.kinds.items():
        by_kind.setdefault(kind, []).append(name)
    assert by_kind == {
        "number": ["float", "infinite", "object ints", "texts of numbers", "seconds", "counting up"],
        "boolean": ["nullable", "object flags"],
        "category": ["ints as categories", "postcodes", "of both"],
        "date": ["texts of dates", "dates", "zoned", "months"],
        "text": ["sentences"],
        "picture": ["pictures"],
    }
    assert columns.dropped == {
        "names": "it differs in each row, like an identifier",
        "row_id": "it differs in each row, like an identifier",
        "same": "all its values are the same",
        "missing": "all its values are missing",
    }


def test_a_cleaned_table_has_floats_and_texts() -> None:
    frame = kinds_of_columns()
    clean = Columns.learn(frame).clean(frame)
    assert np.isnan(clean["infinite"]).sum() == 40
    assert clean["seconds"].tolist() == list(range(60))
    assert clean["texts of numbers"].tolist() == pytest.approx([i / 3 for i in range(60)])
    assert clean["nullable"][:2].tolist() == [1, 0]
    assert np.isnan(clean["nullable"][2])
    assert clean["postcodes"][1] == "0001"
    assert clean["of both"][:2].tolist() == ["a", "1"]
    for name in ("texts of dates", "dates"):
        expected = pd.to_datetime(frame[name])
        assert clean[f"{name}.day_of_week"].tolist() == expected.dt.day_of_week.tolist()
        assert clean[f"{name}.seconds"].tolist() == [stamp.timestamp() for stamp in expected]
    # in UTC, an hour before
    assert clean["zoned.day"][0] == 31


def test_a_row_at_a_time_is_cleaned_as_all_are() -> None:
    """Types of a single row differ: an int where the column had gaps and was float, an object where it was a string."""
    frame = kinds_of_columns()
    columns = Columns.learn(frame)
    whole = columns.clean(frame)
    for row in (0, 1, 7):
        alone = pd.DataFrame([dict(frame.iloc[row])])
        assert columns.clean(alone).iloc[0].equals(whole.iloc[row].rename(0)), row
    ints_with_gaps = pd.DataFrame({"c": pd.Series([1.0, 2.0, None, 1.0]), "x": [1.0, 2.0, 3.0, 4.0]})
    columns = Columns({"c": "category"}, {})
    assert columns.clean(ints_with_gaps)["c"].tolist() == ["1", "2", "", "1"]
    assert columns.clean(pd.DataFrame({"c": [2]}))["c"].tolist() == ["2"]


def test_labels_of_rows_may_repeat_and_names_of_columns_be_numbers() -> None:
    frame = mixed().rename(columns={"number": 7})
    frame["when"] = frame["when"].astype(object).where(frame["when"].notna(), None).astype(str)
    columns = Columns.learn(read_table(frame))
    assert columns.kinds["7"] == "number"
    twice = read_table(pd.concat([frame, frame]))
    whole = columns.clean(twice)
    assert whole.index.tolist() == twice.index.tolist()
    assert whole[:120].equals(columns.clean(read_table(frame)))


@pytest.mark.parametrize(
    "data, what",
    [
        (lambda f: f.drop(columns="class"), r"no column 'class', which is the label. It has: 'number', 'count'"),
        (lambda f: f.assign(**{"class": "yes"}), r"label 'class' has only one value, 'yes'"),
        (lambda f: f.assign(**{"class": None}), r"label 'class' is missing in all 120 rows"),
        (lambda f: f.head(0), r"train_data has no rows"),
        (
            lambda f: f.set_axis([*f.columns[:-2], "number", "class"], axis=1),
            r"columns with the same name: 'number'",
        ),
        (lambda f: f[["class", "constant", "key"]], r"no column is left.*'constant': all its values are the same"),
        (lambda f: f.assign(lists=[[i] for i in range(len(f))]), "column 'lists' of train_data has values that are n"),
        (lambda f: f.to_numpy(), r"train_data is a ndarray, but must be a pandas DataFrame"),
        (lambda f: "nowhere.csv", r"train_data='nowhere.csv' can't be read"),
        (lambda f: f[f["class"] == "yes"].head(1), r"has only one value"),
        (lambda f: f.assign(**{"class": f["key"]}), r"label 'class' is different in each of the 120 rows .*'k00000', "),
        (
            lambda f: f.assign(**{"class": pd.to_timedelta(f.index, unit="h")}),
            r"for dates and durations\) for a regress",
        ),
        (lambda f: f.assign(**{"class": [np.inf, *range(119)]}), r"values that are not finite numbers"),
    ],
)
def test_data_that_can_t_be_learnt_from(data: Callable[[pd.DataFrame], Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        TabularPredictor("class").fit(data(mixed()))


def test_a_csv_file_and_a_parquet_file_are_read(tmp_path: Path) -> None:
    frame = mixed()
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    kinds = [Columns.learn(read_table(tmp_path / name)).kinds for name in ("t.csv", "t.parquet")]
    assert kinds[0] == kinds[1] == Columns.learn(frame).kinds


def test_other_columns_at_prediction_are_named() -> None:
    frame = mixed()
    columns = Columns.learn(frame.drop(columns="class"))
    with pytest.raises(ConfigurationError, match="lacks these columns of the training data: 'number', 'colour'"):
        columns.clean(frame.drop(columns=["number", "colour", "key"]))
    with pytest.raises(ConfigurationError, match="column 'number' of data has 'many', but had numbers in training"):
        columns.clean(frame.assign(number="many"))
    assert columns.clean(frame.assign(more=1))["number"].equals(columns.clean(frame)["number"])
    unknown = columns.clean(frame.assign(colour="purple"))
    assert set(unknown["colour"]) == {"purple"}


# -- what is predicted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, problem",
    [
        (["a", "b"] * 20, "binary"),
        ([0, 1] * 20, "binary"),
        ([0.0, 2.5] * 20, "binary"),
        ([True, False] * 20, "binary"),
        (["a", "b", "c"] * 20, "multiclass"),
        ([0, 1, 2] * 20, "multiclass"),
        ([0.0, 1.0, 2.0] * 20, "multiclass"),
        (list(range(60)), "regression"),
        ([0.5, 1.0, 2.0] * 20, "regression"),
        ([*range(70)] * 15, "regression"),
        (pd.Categorical([*range(20)] * 3), "multiclass"),
        ([1e300, 2.0, 3.0] * 20, "multiclass"),
    ],
)
def test_the_problem_is_inferred(values: Any, problem: str) -> None:
    assert Target.learn("y", pd.Series(values), None).problem == problem


def test_classes_come_back_as_they_were() -> None:
    for classes in (["b", "a", "c"], [3, 1, 2], [True, False], ["a", 1]):
        values = pd.Series(classes * 10)
        target = Target.learn("y", values, "multiclass")
        chances = np.eye(len(classes))[target.encode(values)]
        assert target.decode(chances).tolist() == values.tolist()
    with pytest.raises(ConfigurationError, match="label 'y' has the value 'd', which was not a class in training"):
        Target.learn("y", pd.Series(["a", "b"] * 2), None).encode(pd.Series(["a", "d"]))
    with pytest.raises(ConfigurationError, match="not finite numbers"):
        Target.learn("y", pd.Series(["a", "b", "c"]), "regression")
    with pytest.raises(ConfigurationError, match="has 3 classes, but problem_type='binary' needs 2"):
        Target.learn("y", pd.Series(["a", "b", "c"]), "binary")
    with pytest.raises(ConfigurationError, match="problem_type='ranking': must be one of binary"):
        TabularPredictor("y", problem_type="ranking")  # type: ignore[arg-type]


def test_scores_are_those_of_scikit_learn_and_greater_is_better() -> None:
    rng = np.random.default_rng(0)
    truth, chances = rng.integers(0, 3, 90), rng.dirichlet(np.ones(3), 90)
    classes = chances.argmax(1)
    assert find_metric(None, "multiclass")(truth, chances) == sk.accuracy_score(truth, classes)
    assert find_metric("log_loss", "multiclass")(truth, chances) == pytest.approx(-sk.log_loss(truth, chances))
    expected = sk.roc_auc_score(truth, chances, multi_class="ovo")
    assert find_metric("roc_auc", "multiclass")(truth, chances) == pytest.approx(expected)
    assert find_metric("f1_macro", "multiclass")(truth, chances) == sk.f1_score(truth, classes, average="macro")
    two, of_two = truth % 2, chances[:, :2] / chances[:, :2].sum(1, keepdims=True)
    assert find_metric("roc_auc", "binary")(two, of_two) == pytest.approx(sk.roc_auc_score(two, of_two[:, 1]))
    y, found = rng.normal(size=50), rng.normal(size=50)
    assert find_metric("rmse", "regression")(y, found) == -sk.root_mean_squared_error(y, found)
    assert find_metric("r2", "regression")(y, found) == sk.r2_score(y, found)
    assert find_metric(lambda truth, found: float(len(truth)), "regression")(y, found) == 50
    with pytest.raises(ConfigurationError, match=r"'r2': the metrics of a binary problem are accuracy, .*roc_auc"):
        find_metric("r2", "binary")


def test_few_rows_are_scored_without_a_word() -> None:
    truth, chances = np.array([0, 0]), np.array([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1]])
    assert find_metric("accuracy", "multiclass")(truth, chances) == 0.5
    assert find_metric("balanced_accuracy", "multiclass")(truth, chances) == 0.5
    assert np.isnan(find_metric("roc_auc", "multiclass")(truth, chances))
    two_of_three = find_metric("roc_auc", "multiclass")(np.array([0, 0, 2]), np.array([*chances, [0.1, 0.3, 0.6]]))
    assert two_of_three == 1.0
    assert np.isnan(find_metric("r2", "regression")(np.array([1.0]), np.array([2.0])))


def test_an_ensemble_is_never_worse_than_its_best_model() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=200)
    models = [truth + rng.normal(size=200) * scale for scale in (0.5, 0.6, 3.0)]
    metric = find_metric(None, "regression")
    weights = ensemble_weights(models, truth, metric, metric)
    assert sum(weights) == pytest.approx(1)
    mixed_rows = sum(weight * rows for weight, rows in zip(weights, models))
    assert metric(truth, mixed_rows) > max(metric(truth, rows) for rows in models)
    assert weights[2] < 0.05
    assert ensemble_weights([truth], truth, metric, metric) == [1.0]


def test_weights_are_found_in_time_by_fewer_samples() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=60)
    models = [truth + rng.normal(size=60), truth + rng.normal(size=60)]
    metric, calls = find_metric(None, "regression"), []

    def counted(y_true: Any, found: Any) -> float:
        calls.append(1)
        return metric(y_true, found)

    in_time = ensemble_weights(models, truth, counted, bags=50, time_limit_s=0)
    one_sample = len(calls)
    assert in_time == ensemble_weights(models, truth, metric, bags=1)
    assert ensemble_weights(models, truth, counted, bags=3, time_limit_s=600) == ensemble_weights(
        models, truth, metric, bags=3
    )
    assert len(calls) == 4 * one_sample


# -- settings --------------------------------------------------------------------------------------------------------

COLUMNS = Columns({"x": "number", "c": "category"}, {})
TUNED = {"num_trials": 2}


@pytest.mark.parametrize(
    "given, what",
    [
        ({"hyperparameters": {"XGB": {}}}, r"the unknown model 'XGB'. Use one of LR, RF, XT, GBM, NN_TORCH"),
        ({"hyperparameters": {}}, "must map models to settings"),
        ({"hyperparameters": "huge"}, "hyperparameters 'huge' is not known. Choose one of default, light"),
        ({"hyperparameters": {"GBM": 3}}, r"hyperparameters\['GBM'\]=3: must be a dict"),
        ({"hyperparameters": {3: {}}}, "the unknown model 3. Use one of LR"),
        (
            {"hyperparameters": {"NN_TORCH": {"lr": 0.1}}},
            r"\['NN_TORCH'\] has the setting 'lr', but .* hidden, learning_",
        ),
        ({"hyperparameters": {"LR": {"alpha": 1.0}}}, "has the setting 'alpha', but for a binary problem, .* C, "),
        (
            {"hyperparameters": {"RF": {"n_estimator": 9}}},
            r"setting 'n_estimator' \(did you mean 'n_estimators'\?\)",
        ),
        (
            {"hyperparameters": {"LR": {}, "NN_TORCH": {"dropouts": [0.1, 0.2]}}, "hyperparameter_tune_kwargs": TUNED},
            r"did you mean 'dropout'",
        ),
        ({"hyperparameters": {Perceptron: {"depth": 3}}}, r"\[Perceptron\] has the setting 'depth', but"),
        (
            {"hyperparameters": {"GBM": {"num_leaves": [8, 16]}}},
            "has a search space .*num_leaves.*no search is requested",
        ),
        ({"hyperparameters": {"GBM": {"ag_args_fit": {"cpus": 1}}}}, "keys: num_cpus, num_gpus, memory_limit"),
        ({"hyperparameters": {"AG_IMAGE_NN": {}}}, "no model is left .*ImagePredictor: the table has no columns"),
        ({"hyperparameters": {"AG_TEXT_NN": ["huge"]}}, "text preset 'huge' is not known. Choose one of default"),
        ({"hyperparameter_tune_kwargs": {"trials": 2}}, "keys: searcher, .*, num_trials"),
        ({"hyperparameter_tune_kwargs": {"num_trials": 0}}, "num_trials=0: must be an int of 1 or more"),
        ({"hyperparameter_tune_kwargs": {"scheduler": "slurm"}}, r"scheduler \(one of \('local', 'ray'\)\)"),
        ({"presets": "huge"}, "preset 'huge' is not known. Choose one of medium_quality"),
        # Where nothing is searched, too.
        ({"hyperparameters": {"LR": {}}, "hyperparameter_tune_kwargs": "best"}, "searcher='best': must be 'random'"),
        ({"hyperparameters": {"LR": {}}, "hyperparameter_tune_kwargs": {"num_trials": -1}}, "num_trials=-1: must be"),
        ({"verbosity": "loud"}, "verbosity='loud': must be an int of 0 or more"),
        ({"num_bag_folds": -1}, "num_bag_folds=-1"),
        ({"time_limit": 0}, "time_limit=0: must be a number of seconds"),
        ({"num_bag_folds": "two"}, "num_bag_folds='two': must be an int"),
        (
            {"num_bag_folds": 2, "ag_args_ensemble": {"ag_args_fit": {"cpus": 1}}},
            r"ag_args_ensemble\['ag_args_fit'\]=.*keys: ",
        ),
        ({"ag_args_fit": 3}, "ag_args_fit=3: must be a dict .*keys: num_cpus, num_gpus, memory_limit"),
        ({"presets": {"folds": 2}}, "presets=.*'folds'.*keys: hyperparameters, num_bag_folds"),
        ({"hyperparameter_tune_kwargs": 3}, "hyperparameter_tune_kwargs=3: must be a dict .*keys: searcher"),
        ({"ag_args_ensemble": {"folds": 1}}, "ag_args_ensemble=.*keys: ag_args_fit, fold_fitting_strategy"),
        ({"eval_metric": "r2"}, "the metrics of a binary problem are accuracy"),
        ({"eval_metric": ["f1"]}, r"eval_metric=\['f1'\]: the metrics of a binary problem are accuracy"),
        ({"tuning_data": "same", "num_bag_folds": 2}, "tuning_data can't be used with num_bag_folds"),
        ({"num_cpus": 10_000}, "num_cpus=10000 exceeds the number of CPUs"),
        ({"num_cpus": 0}, "num_cpus=0: must be an int of 1 or more"),
        ({"num_gpus": -1}, "num_gpus=-1: must be a finite number"),
        ({"memory_limit": 10_000_000}, "memory=.*this process may use"),
        ({"memory_limit": "much"}, "memory='much': must be a number of bytes"),
        ({"num_cpus": 1, "ag_args_fit": {"num_cpus": 2}}, "per_model num_cpus=2 is more than num_cpus=1"),
    ],
)
@pytest.mark.filterwarnings("ignore:num_gpus=-1. no GPU is visible")
def test_settings_that_can_t_be_are_refused_before_any_process(given: dict[str, Any], what: str) -> None:
    frame = mixed()
    if "AG_TEXT_NN" not in str(given):
        frame = frame.drop(columns="said")
    if given.get("tuning_data") == "same":
        given = {**given, "tuning_data": frame}
    metric = given.pop("eval_metric", None) if "eval_metric" in given else None
    with pytest.raises(ConfigurationError, match=what):
        TabularPredictor("class", eval_metric=metric).fit(frame, **{"verbosity": 0, **given})


def test_settings_become_models_with_names_of_their_own() -> None:
    large = get_hyperparameter_config("multimodal")["GBM"]
    specs, skipped = parse_hyperparameters(
        {"GBM": [*large, {}], Perceptron: {"alpha": 0.1}}, COLUMNS, "binary", searches=False
    )
    assert [spec.name for spec in specs] == ["LightGBM", "LightGBMXT", "LightGBMLarge", "LightGBM_2", "Perceptron"]
    assert not skipped
    nothing: Any = dict.fromkeys(["ag_args", "ag_args_fit", "ag_args_ensemble"])
    assert parse_hyperparameters({"GBM": nothing}, COLUMNS, "binary", searches=False)[0][0].fixed == {}
    specs, _ = parse_hyperparameters(
        {"GBM": {"num_leaves": [4, 8]}, "NN_TORCH": {"dropout": 0.0}}, COLUMNS, "binary", searches=True
    )
    assert specs[0].space == {"num_leaves": [4, 8]}
    assert "dropout" not in specs[1].space
    assert specs[1].fixed == {"dropout": 0.0}


def test_presets_are_plain_settings_to_be_changed() -> None:
    hyperparameters = get_hyperparameter_config("multimodal")
    hyperparameters["AG_TEXT_NN"] = [list_text_presets()[0]]
    assert get_hyperparameter_config("multimodal")["AG_TEXT_NN"] != hyperparameters["AG_TEXT_NN"]
    assert list_text_presets() == [
        "default",
        "medium_quality_faster_train",
        "high_quality",
        "best_quality",
        "multilingual",
    ]
    with pytest.raises(ValueError, match=r"'multi' is not known\. Choose one of default, light, toy, multimodal"):
        get_hyperparameter_config("multi")


def test_pictures_names_are_those_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    stand_in = SimpleNamespace(list_models=lambda pretrained: [f"model{i}" for i in range(20)])
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    assert list_image_models()[:10] == [f"model{i}" for i in range(10)]
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigurationError, match=r"needs timm.*pip install '\.\[multimodal\]'"):
        list_image_models()


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    frame = mixed()
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigurationError, match=r"needs lightgbm: pip install '\.\[tabular\]'"):
        TabularPredictor("class").fit(frame, hyperparameters={"GBM": {}}, verbosity=0)
    for name in [name for name in sys.modules if name.startswith("trainloop.tabular")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pandas", "sklearn"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, name, None)
            with pytest.raises(ConfigurationError, match=rf"needs {name}: pip install '\.\[tabular\]'"):
                importlib.import_module("trainloop.tabular")


# -- the documented calls, on the machine that they are documented for -----------------------------------------------


class Planned(Exception):
    """The arguments of ``tune``."""


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **asked: Any) -> None:
        raise Planned(asked)

    machine = Resources(32, 4, 2**37)
    for module in (specs_module, local_module):
        monkeypatch.setattr(module, "available", lambda: machine)
    monkeypatch.setattr(predictor_module, "applied", lambda quota: nullcontext())
    monkeypatch.setattr(predictor_module, "tune", stop)


@pytest.mark.usefixtures("large_machine")
def test_the_documented_shares_of_32_cpus_and_4_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    predictor, train_data = TabularPredictor(label="class"), mixed()
    with pytest.raises(Planned) as caught:
        predictor.fit(
            train_data,
            num_cpus=32,
            num_gpus=4,
            hyperparameters={"NN_TORCH": {}},
            num_bag_folds=2,
            ag_args_ensemble={"ag_args_fit": {"num_cpus": 10, "num_gpus": 2}},
            ag_args_fit={"num_cpus": 4, "num_gpus": 0.5},
            hyperparameter_tune_kwargs={"searcher": "random", "scheduler": "local", "num_trials": 2},
        )
    asked = caught.value.args[0]
    names = ("total", "num_trials", "num_bag_folds", "per_bag", "per_model")
    p = plan(**{name: asked[name] for name in names})
    assert (p.trials_in_parallel, p.folds_in_parallel, p.cpus_granted, p.gpus_granted) == (2, 2, 20, 4)
    assert (p.cpus_used, p.gpus_used) == (16, 2)
    assert str(p) in capsys.readouterr().out
    assert asked["backend"] == "local"


@pytest.fixture
def asked_of_tune(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What each ``tune`` was asked for, by the models' names; nothing is trained."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def note(make: Any, space: Any, **asked: Any) -> Any:
        calls.append((",".join(spec.name for spec in space["the model"]), asked))
        return SimpleNamespace(trials=[], interrupted=False)

    monkeypatch.setattr(predictor_module, "tune", note)
    return calls


def as_documented(train_data: pd.DataFrame) -> Any:
    with pytest.raises(ConfigurationError, match="no model could be trained"):
        TabularPredictor(label="class").fit(train_data, num_gpus=1)


@pytest.mark.usefixtures("large_machine")
def test_the_documented_gpu_goes_to_those_that_can_use_it(asked_of_tune: list[tuple[str, dict[str, Any]]]) -> None:
    as_documented(mixed())
    shares = {name: (asked["per_model"], asked["num_trials"]) for name, asked in asked_of_tune}
    assert shares == {
        "LinearModel,RandomForest,ExtraTrees": (ResourceQuota(num_gpus=0), 3),
        "NeuralNetTorch,LightGBM": (ResourceQuota(), 2),
    }
    assert all(asked["total"].num_gpus == 1 for _, asked in asked_of_tune)
    # as documented: on the CPU, and on the GPU
    del asked_of_tune[:]
    hyperparameters = {"GBM": [{"ag_args_fit": {"num_gpus": 0}}, {"ag_args_fit": {"num_gpus": 1}}]}
    with pytest.raises(ConfigurationError, match="no model could be trained"):
        TabularPredictor(label="class").fit(mixed(), num_gpus=1, hyperparameters=hyperparameters)
    assert [(name, asked["per_model"].num_gpus) for name, asked in asked_of_tune] == [
        ("LightGBM", 0),
        ("LightGBM_2", 1),
    ]


def test_the_documented_gpu_that_is_not_there_is_one_warning(
    asked_of_tune: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (specs_module, local_module):
        monkeypatch.setattr(module, "available", lambda: Resources(2, 0, 2**33))
    with pytest.warns(
        UserWarning, match="num_gpus=1: no GPU is visible here, so all models train on the CPU"
    ) as caught:
        as_documented(mixed())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [(asked["total"].num_gpus, asked["per_model"].num_gpus) for _, asked in asked_of_tune] == [(0, 0)]


@pytest.mark.filterwarnings("ignore:the score 'r2' is undefined for these .* rows")
def test_a_bag_is_scored_on_all_rows_together_as_the_ensemble_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over folds differs from it, and is NaN if the metric is undefined for the rows of a fold."""
    frame, chances = mixed(), np.random.default_rng(0).dirichlet(np.ones(2), 120)
    frame["class"] = np.where(np.arange(120) == 7, "rare", "other")
    facts: dict[int, Any] = {fold: {"notes": [], "used_gpu": False} for fold in range(2)}

    def trained(make: Any, space: dict[str, Any], **asked: Any) -> Any:
        trial = Trial(0, {"the model": space["the model"][0]}, [0.5, float("nan")], 1.0, "done", facts=facts)
        return SimpleNamespace(
            trials=[trial],
            interrupted=False,
            predictions_of=lambda trial: chances,
            predictor_of=lambda trial, lazy: None,
        )

    monkeypatch.setattr(predictor_module, "tune", trained)
    predictor = TabularPredictor("class", eval_metric="roc_auc")
    predictor.fit(frame, num_bag_folds=2, hyperparameters={"LR": {}}, verbosity=0)
    expected = sk.roc_auc_score(frame["class"] == "rare", chances[:, 1])
    assert predictor.leaderboard()["score_val"].tolist() == pytest.approx([expected] * 2)
    with pytest.raises(ConfigurationError, match="data lacks these columns of the training data: 'colour'"):
        predictor.feature_importance(frame.drop(columns="colour"))
    for name in ("num_shuffle_sets", "subsample_size"):
        with pytest.raises(ConfigurationError, match=f"{name}=0: must be an int of 1 or more"):
            predictor.feature_importance(frame, **{name: 0})
    with pytest.raises(ConfigurationError, match=r"its score \(r2\) is not a number. The validation rows may lack"):
        chances = np.full(frame["count"].notna().sum(), np.nan)
        TabularPredictor("count", eval_metric="r2", problem_type="regression").fit(
            frame, num_bag_folds=2, hyperparameters={"LR": {}}, verbosity=0
        )


def test_no_model_begins_once_the_time_is_over(asked_of_tune: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)no model could be trained.*Forest: the time limit was reached before it"
    ):
        TabularPredictor("class").fit(mixed(), time_limit=1e-6, verbosity=0)
    assert not asked_of_tune


def test_limits_of_time_are_numbers() -> None:
    for limit in (0, -1, float("nan"), "60", True):
        with pytest.raises(ConfigurationError, match=re.escape(f"time_limit={limit!r}: must be a number of seconds")):
            TabularPredictor("class").fit(mixed(), time_limit=limit)  # type: ignore[arg-type]


def test_a_folder_that_can_t_be_written_to_is_said_before_the_training(
    tmp_path: Path, asked_of_tune: list[tuple[str, dict[str, Any]]]
) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=re.escape(f"{str(path)!r} can't be written to: ")):
            TabularPredictor("class", path=path).fit(mixed(), verbosity=0)
    assert not asked_of_tune


def test_a_folder_stays_the_same_from_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    predictor = TabularPredictor("class", path="saved")
    monkeypatch.chdir("/")
    assert predictor.path == str(tmp_path / "saved")


def test_lightgbm_learns_times_in_seconds_since_1970() -> None:
    """Single precision tells apart numbers of that size where they are 128 and more apart."""
    x = np.linspace(-1, 1, 300)
    frame = pd.DataFrame({"x": x, "y": 1.7e9 + 100 * x})
    columns, target = Columns.learn(frame[["x"]]), Target.learn("y", frame["y"], None)
    y = target.encode(frame["y"])
    scores = {}
    for far, labels in (("far", y), ("near", y - 1.7e9)):
        model = GradientBoosting(Given(columns, target, {"num_boost_round": 200}, gpu=False))
        model.fit(frame, labels, (frame, labels))
        scores[far] = sk.r2_score(labels, model.predict(frame))
    assert scores["far"] == pytest.approx(scores["near"], abs=1e-3)
    assert scores["near"] > 0.99
    own_loss = GradientBoosting(Given(columns, target, {"num_boost_round": 9, "objective": "poisson"}, gpu=False))
    own_loss.fit(frame, y / 1e9, (frame, y / 1e9))  # which can't be with numbers below 0
    assert (own_loss.predict(frame) > 0).all()


@pytest.mark.parametrize("make", [linear, extra_trees])
def test_a_fold_may_have_a_single_class(make: Any) -> None:
    """The class of a binary problem has one row, which this fold holds out."""
    frame = mixed()
    columns, target = Columns.learn(frame.drop(columns="class")), Target("class", "binary", ("no", "yes"))
    table, y = columns.clean(frame), np.ones(len(frame), dtype=int)
    model = make(Given(columns, target, {}, gpu=False))
    model.fit(table, y, (table, y))
    assert model.predict(table).tolist() == [[0.0, 1.0]] * len(frame)


def test_a_lightgbm_without_gpus_trains_on_the_cpu_and_says_so_once() -> None:
    frame = mixed()
    columns, target = Columns.learn(frame.drop(columns="class")), Target.learn("class", frame["class"], None)
    table, y = columns.clean(frame), target.encode(frame["class"])
    model = GradientBoosting(Given(columns, target, {"num_boost_round": 5}, gpu=True))
    model.fit(table, y, (table, y))
    assert len(model.facts["notes"]) == 1
    assert "starts again on the CPU, because no GPU" in model.facts["notes"][0]
    assert not model.facts["used_gpu"]
    assert model.predict(table).shape == (120, 2)


@pytest.mark.usefixtures("large_machine")
def test_models_that_can_t_use_a_gpu_get_none() -> None:
    found = []
    for hyperparameters in ({"RF": {}}, {"GBM": {}}, {"NN_TORCH": {}}):
        with pytest.raises(Planned) as caught:
            TabularPredictor("class").fit(mixed(), num_cpus=8, hyperparameters=hyperparameters, verbosity=0)
        found.append(caught.value.args[0]["per_model"])
    assert found == [ResourceQuota(num_gpus=0), ResourceQuota(num_gpus=0), ResourceQuota()]
    with pytest.raises(Planned) as caught:
        TabularPredictor("class").fit(mixed(), num_gpus=1, hyperparameters={"GBM": {}}, verbosity=0)
    assert caught.value.args[0]["per_model"] == ResourceQuota()  # as it was asked for
    with pytest.raises(ResourceError, match=r"num_gpus=5 exceeds the number of visible GPUs .* \(4,"):
        TabularPredictor("class").fit(mixed(), num_gpus=5, verbosity=0)


# -- not trained, not there ------------------------------------------------------------------------------------------


def test_a_predictor_that_is_not_trained_says_so(tmp_path: Path) -> None:
    predictor = TabularPredictor("class")
    for call in (lambda: predictor.predict(mixed()), predictor.leaderboard, predictor.save, predictor.fit_summary):
        with pytest.raises(ConfigurationError, match=re.escape("is not trained. Call fit(train_data) first")):
            call()
    with pytest.raises(CheckpointError, match="no tabular predictor at"):
        TabularPredictor.load(tmp_path)
    assert repr(predictor) == "TabularPredictor(label='class', not trained)"
