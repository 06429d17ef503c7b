"""Predictors with real models: what they predict, under which plan, what is lost, and on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from tables import mixed

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
    assert "dropped   'key': it is different in each row" in shown.out
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
    with pytest.raises(ConfigurationError, match="model='RF': there are LightGBM, LightGBM_2, WeightedEnsemble_L2"):
        predictor.predict(test_data, model="RF")
    # on disk and back
    loaded = TabularPredictor.load(tmp_path / "saved")
    assert loaded.predict_proba(test_data).equals(chances)
    os.chmod(tmp_path / "saved" / "predictor.pkl", 0o666)
    with pytest.raises(ConfigurationError, match="may be written by others"):
        TabularPredictor.load(tmp_path / "saved")
    file = tmp_path / "saved" / "predictor.pkl"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        TabularPredictor.load(tmp_path / "saved", trusted=True)
