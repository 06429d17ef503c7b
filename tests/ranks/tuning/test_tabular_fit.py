"""Predictors with real models: what they predict, under which plan, what is lost, and on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from kit.places import IMPORTS
from kit.saved_names import NAMES, names_in
from kit.tables import mixed
from sklearn.linear_model import LogisticRegression

from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.tabular import TabularPredictor


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINLOOP_LEASE_DIR", str(tmp_path / "leases"))


class Killed(LogisticRegression):
    """Takes more memory than any quota gives."""

    def fit(self, x: Any, y: Any) -> Any:
        held = []
        while True:
            held.append(np.ones(2**22))


@pytest.mark.long
def test_the_documented_gbm_and_all_that_follows_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = mixed(160)
    train_data, test_data = data[:120], data[120:].set_index(pd.Index(range(500, 540)))
    hyperparameters: Any = {"GBM": [{"ag_args_fit": {"num_gpus": 0}}, {"ag_args_fit": {"num_gpus": 1}}]}
    hyperparameters[Killed] = {}
    with pytest.warns(UserWarning, match="num_gpus=1: no GPU is visible here") as caught:
        predictor = TabularPredictor(label="class", path=tmp_path / "saved").fit(
            train_data, num_gpus=1, hyperparameters=hyperparameters, memory_limit=3
        )
    assert len([each for each in caught if "GPU" in str(each.message)]) == 1
    shown = capsys.readouterr()
    assert "'class' is a binary problem" in shown.out
    assert "dropped   'key': it differs in each row" in shown.out
    assert "Plan for LightGBM, LightGBM_2, Killed" in shown.out
    # one is lost, alone
    assert list(predictor.lost) == ["Killed"]
    assert "MemoryError" in predictor.lost["Killed"]
    assert "without Killed:" in shown.err
    board = predictor.leaderboard(test_data)
    assert set(board["model"]) == {"LightGBM", "LightGBM_2", "WeightedEnsemble_L2"}
    own = board[board["model"] == "LightGBM"].iloc[0]
    share = predictor.fit_summary()["leaderboard"]["cpus"].max()
    assert own["cpus"] == share <= len(os.sched_getaffinity(0))
    assert 0 < own["cpu_seconds"] <= own["fit_time"] * own["cpus"] * 1.1
    # what is predicted
    classes, chances = predictor.predict(test_data), predictor.predict_proba(test_data)
    assert classes.index.tolist() == chances.index.tolist() == list(range(500, 540))
    assert classes.tolist() == chances.idxmax(axis=1).tolist()
    assert chances.sum(axis=1).tolist() == pytest.approx([1.0] * 40)
    right = float((classes == test_data["class"]).mean())
    assert right > 0.75
    assert predictor.evaluate(test_data)["accuracy"] == right
    assert board.set_index("model").loc["WeightedEnsemble_L2", "score_test"] == right
    important = predictor.feature_importance(test_data)
    assert important.index[0] in ("number", "colour")
    assert list(important.columns) == ["importance", "stddev", "n"]
    assert (important["n"] == 5).all()
    assert predictor.class_labels == sorted(test_data["class"].unique())
    with pytest.raises(
        ConfigurationError, match="model='RF': must be one of LightGBM, LightGBM_2, WeightedEnsemble_L2"
    ):
        predictor.predict(test_data, model="RF")
    # on disk and back
    loaded = TabularPredictor.load(tmp_path / "saved")
    assert loaded.predict_proba(test_data).equals(chances)
    os.chmod(tmp_path / "saved" / "predictor.pkl", 0o666)
    with pytest.raises(ConfigurationError, match="is writable by other users"):
        TabularPredictor.load(tmp_path / "saved")
    file = tmp_path / "saved" / "predictor.pkl"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        TabularPredictor.load(tmp_path / "saved", trusted=True)


class Threshold:
    """An estimator of one's own: no chances, no base class."""

    def __init__(self, column: int = 0) -> None:
        self.column = column

    def fit(self, x: Any, y: Any) -> Any:
        self.above = np.median(x[:, self.column])

    def predict(self, x: Any) -> Any:
        return (x[:, self.column] > self.above).astype(int)


def make_net(num_inputs: int, num_outputs: int, width: int = 8) -> Any:
    from torch import nn

    from trainloop import TTBasicModel

    class Net(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(num_inputs, width), nn.BatchNorm1d(width), nn.Linear(width, num_outputs)
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    return Net()


@pytest.mark.slow
def test_all_kinds_of_models_in_bags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = mixed(260)
    data["class"] = np.where(data["number"].fillna(0) > 1, "very", data["class"])
    train_data, test_data = data[:200], data[200:]
    hyperparameters: Any = {"LR": {}, "RF": {"n_estimators": 30}, "XT": {"n_estimators": 30}, "GBM": {}}
    hyperparameters |= {
        "NN_TORCH": {"num_epochs": 30},
        Threshold: {"column": 1},
        make_net: {"width": 6, "num_epochs": 9},
    }
    predictor = TabularPredictor("class", eval_metric="log_loss").fit(
        train_data, hyperparameters=hyperparameters, num_bag_folds=2, verbosity=3
    )
    assert not predictor.lost
    assert len(predictor.model_names) == 8
    board = predictor.leaderboard(test_data).set_index("model")
    assert board.loc["WeightedEnsemble_L2", "score_val"] >= board["score_val"].nlargest(3).iloc[-1]
    for name in ("LinearModel", "RandomForest", "ExtraTrees", "LightGBM", "NeuralNetTorch", "make_net"):
        assert board.loc[f"{name}_BAG_L1", "score_test"] > -1.0, name  # guessing is ln 3
    # what no model has seen, a row at a time
    strange = test_data.assign(colour="purple", said="never before", when=None, count=None)
    chances = predictor.predict_proba(strange)
    assert chances.columns.tolist() == ["no", "very", "yes"]
    assert np.isfinite(chances.to_numpy()).all()
    alone = pd.concat([predictor.predict_proba(test_data[i : i + 1]) for i in range(3)])
    assert np.allclose(alone, predictor.predict_proba(test_data[:3]), atol=1e-5)
    summary = predictor.fit_summary()
    assert summary["weights"].keys() <= set(predictor.model_names)
    loaded = TabularPredictor.load(predictor.save(tmp_path / "p"))
    assert np.allclose(loaded.predict_proba(test_data), predictor.predict_proba(test_data))
    assert names_in(tmp_path / "p" / "predictor.pkl") <= NAMES, "add the names: files of this version refer to them"


@pytest.mark.slow
def test_a_regression_is_searched_for_in_a_second_fit_of_one_predictor() -> None:
    data = mixed(200).drop(columns="class")
    data["value"] = 3 * data["number"].fillna(0) + (data["colour"] == "red") + 7
    predictor = TabularPredictor("value")
    predictor.fit(data[:150], hyperparameters={"LR": {}}, verbosity=0)
    predictor.fit(
        data[:150],
        hyperparameters={"NN_TORCH": {}, "GBM": {"num_leaves": [4, 8, 16], "learning_rate": 0.1}},
        num_bag_folds=2,
        hyperparameter_tune_kwargs={"searcher": "random", "scheduler": "local", "num_trials": 2},
        num_cpus=min(2, len(os.sched_getaffinity(0))),
        ag_args_fit={"num_cpus": 1},
        verbosity=0,
    )
    assert predictor.problem_type == "regression"
    names = {"NeuralNetTorch_BAG_L1/T1", "NeuralNetTorch_BAG_L1/T2", "LightGBM_BAG_L1/T1", "LightGBM_BAG_L1/T2"}
    assert set(predictor.model_names) == {*names, "WeightedEnsemble_L2"}
    assert predictor.evaluate(data[150:])["r2"] > 0.9
    settings = predictor.fit_summary()["settings"]
    assert settings["LightGBM_BAG_L1/T1"]["num_leaves"] != settings["LightGBM_BAG_L1/T2"]["num_leaves"]
    assert predictor.predict(data[150:]).dtype == float
    with pytest.raises(ConfigurationError, match="a regression has no probabilities"):
        predictor.predict_proba(data)


FRESH = """
import sys
import pandas as pd
from trainloop.tabular import TabularPredictor
TabularPredictor.load(sys.argv[1]).predict_proba(pd.read_pickle(sys.argv[2])).to_pickle(sys.argv[3])
"""


@pytest.mark.slow
def test_an_odd_table_is_fitted_twice_and_predicted_in_a_fresh_process(tmp_path: Path) -> None:
    """Names that are ints, labels of rows that repeat, gaps in the label, a class of one row, types of Arrow."""
    data = mixed(200)
    data.columns = range(len(data.columns))
    label = len(data.columns) - 1
    data[label] = data[label].astype(object)
    data.loc[:9, label] = None
    data.loc[10, label] = "alone"
    data[1] = data[1].astype("int64[pyarrow]")
    data[3] = data[3].astype("string[pyarrow]")
    data.index = [i // 2 for i in range(200)]
    predictor = TabularPredictor(label=label)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="only one value"):
        predictor.fit(data[data[label] == "yes"], verbosity=0)
    hyperparameters: Any = {"LR": {}, "RF": {"n_estimators": 20}}
    predictor.fit(data.drop(columns=0), hyperparameters=hyperparameters, verbosity=0)
    before = predictor.predict_proba(data)
    predictor.fit(data, hyperparameters=hyperparameters, verbosity=0, num_bag_folds=2)
    assert not predictor.lost
    assert predictor.model_names == ["LinearModel_BAG_L1", "RandomForest_BAG_L1", "WeightedEnsemble_L2"]
    chances = predictor.predict_proba(data)
    assert not chances.equals(before)
    assert chances.columns.tolist() == ["alone", "no", "yes"]
    assert chances.index.tolist() == data.index.tolist() == predictor.predict(data).index.tolist()
    board = predictor.leaderboard().set_index("model")
    for name in predictor.model_names[:2]:
        trial = board.loc[name]
        assert 0 < trial["cpu_seconds"] <= trial["fit_time"] * trial["cpus"] * 1.1
        assert trial["gpus"] == 0
    data.to_pickle(tmp_path / "data.pkl")
    command = [
        sys.executable,
        "-c",
        FRESH,
        predictor.save(tmp_path / "p"),
        tmp_path / "data.pkl",
        tmp_path / "found.pkl",
    ]
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": IMPORTS},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert np.allclose(pd.read_pickle(tmp_path / "found.pkl"), chances)


@pytest.mark.slow
def test_the_documented_gpu_call_trains_all_on_the_cpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    train_data = mixed(120)
    with pytest.warns(UserWarning, match="no GPU is visible here, so all models train on the CPU") as caught:
        predictor = TabularPredictor(label="class").fit(train_data, num_gpus=1)
    assert len(caught) == 1
    assert not predictor.lost
    assert predictor.leaderboard()["gpus"].tolist() == [0.0] * 6


COUNTED = """
import os, sys, threading, time
import psutil
from kit.tables import mixed
from trainloop.tabular import TabularPredictor

def used():
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
            total += times.user + times.system
            total += (times.children_user + times.children_system) if process.pid != me.pid else 0
        except psutil.Error:
            pass
    # Without this thread, which looks through all processes of the machine ten times a second.
    return total + me.cpu_times().children_user + me.cpu_times().children_system - time.thread_time()

highest, over = 0.0, threading.Event()
def watch():
    global highest
    seen = []
    while not over.wait(0.1):
        seen.append((time.monotonic(), used()))
        while seen[-1][0] - seen[0][0] > 2:
            first = seen.pop(0)
            highest = max(highest, (seen[-1][1] - first[1]) / (seen[-1][0] - first[0]))
thread = threading.Thread(target=watch)
thread.start()
before = os.sched_getaffinity(0)
predictor = TabularPredictor("class").fit(mixed(1500), num_cpus=1, verbosity=0,
    hyperparameters={"LR": {}, "RF": {}, "GBM": {}, "NN_TORCH": {"num_epochs": 20}})
over.set()
thread.join()
assert not predictor.lost, predictor.lost
assert os.sched_getaffinity(0) == before
print(highest)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_one_cpu_is_never_more_than_one_cpu() -> None:
    """CPU time of all processes, counted by the kernel, over any two seconds."""
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    environment = {name: value for name, value in environment.items() if not name.endswith("_NUM_THREADS")}
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    assert 0.1 < float(run.stdout) <= 1.1


class Endless(LogisticRegression):
    def fit(self, x: Any, y: Any) -> Any:
        time.sleep(600)


@pytest.mark.slow
def test_the_time_limit_is_kept() -> None:
    data = mixed(3000)
    hyperparameters: Any = {
        "NN_TORCH": {"num_epochs": 10**6, "patience": 10**6},
        "GBM": {"num_boost_round": 10**6, "early_stopping_rounds": 10**6},
        "RF": {"n_estimators": 100_000},
        Endless: {},
    }
    began = time.monotonic()
    predictor = TabularPredictor("class").fit(data, time_limit=50, hyperparameters=hyperparameters, verbosity=0)
    assert time.monotonic() - began < 55
    assert list(predictor.lost) == ["Endless"]
    assert "time was up" in predictor.lost["Endless"]
    assert predictor.evaluate(data)["accuracy"] > 0.8
    with pytest.raises(ConfigurationError, match=r"no model could be trained.*(?s:.*)Endless: .*time was up"):
        TabularPredictor("class").fit(data, time_limit=3, hyperparameters={Endless: {}}, verbosity=0)


@pytest.mark.long
def test_dart_trains_a_limited_number_of_rounds_and_says_so() -> None:
    pytest.importorskip("lightgbm")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "z": rng.normal(size=60)})
    frame["y"] = (frame["x"] > 0).astype(int)
    predictor = TabularPredictor(label="y")
    with pytest.warns(
        UserWarning, match="boosting='dart' can't stop early: 500 trees were trained. Set num_boost_round"
    ):
        predictor.fit(frame, hyperparameters={"GBM": {"boosting": "dart"}}, num_cpus=1, verbosity=0)
    assert predictor.evaluate(frame)["accuracy"] > 0.9


@pytest.mark.long
def test_a_setting_that_lightgbm_does_not_know_is_a_warning() -> None:
    pytest.importorskip("lightgbm")
    frame = pd.DataFrame({"x": np.arange(60.0), "y": np.arange(60) % 2})
    with pytest.warns(UserWarning, match=r"does not know these settings of hyperparameters\['GBM'\].*: num_leave\."):
        TabularPredictor(label="y").fit(
            frame, hyperparameters={"GBM": {"num_leave": 3, "num_boost_round": 2}}, num_cpus=1, verbosity=0
        )
