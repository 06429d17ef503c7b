"""Callbacks that write into an experiment's folder: whence they have its names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainloop.callbacks import AbstractExperimentCallback
from trainloop.errors import ConfigurationError


def registered(loop: Any, **given: Any) -> AbstractExperimentCallback:
    callback = AbstractExperimentCallback("of a test", **given)
    callback.train_loop_obj = loop
    callback.try_infer_experiment_details()
    return callback


def test_names_that_are_not_given_are_the_loop_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    loop = SimpleNamespace(project_name="p", experiment_name="e", local_model_result_folder_path="~/results")
    found = registered(loop)
    assert (found.project_name, found.experiment_name) == ("p", "e")
    assert found.local_model_result_folder_path == str(tmp_path / "results")
    given = registered(loop, experiment_name="~own", local_model_result_folder_path="~/here")
    assert (given.project_name, given.experiment_name) == ("p", "~own")
    assert given.local_model_result_folder_path == str(tmp_path / "here")


def test_a_plain_loop_has_no_names() -> None:
    with pytest.raises(ConfigurationError, match="has no experiment_name, and neither has the SimpleNamespace"):
        registered(SimpleNamespace(), project_name="p")
