"""Callbacks that save into an experiment's folder."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Counts, make_loop

from trainloop.callbacks import ModelCheckpoint
from trainloop.callbacks.reports.experiment import Experiment, ExperimentEndSave

PROJECT = ("digits", "cnn")


def test_end_save(tmp_path: Path) -> None:
    end = ExperimentEndSave(Experiment(*PROJECT, tmp_path, {"lr": 0.1}, ()), Counts(), None)
    make_loop().fit(num_epochs=1, callbacks=[end])
    [experiment] = (tmp_path / "digits").iterdir()
    assert (experiment / "model.pt").exists()
    assert "rows" in (experiment / "results" / "report.txt").read_text()
    assert end.results["validation"]["rows"] == 33.0


def test_the_name_is_the_package_s_own() -> None:
    from trainloop.callbacks import ModelCheckpoint as public

    assert ModelCheckpoint is public


def recorded(tmp_path: Path, hyperparams: dict[str, Any], *source_dirs: Path) -> Path:
    experiment = Experiment(*PROJECT, tmp_path, hyperparams, source_dirs)
    experiment.record()
    return Path(experiment.folder.location)


def test_hyperparameters_may_be_any_values(tmp_path: Path) -> None:
    odd = {"file": "a\udcff", "sparse": torch.eye(2).to_sparse(), "meta": torch.empty(2, device="meta")}
    values = {**odd, "generator": (i for i in range(2)), "method": [].append}
    written = json.loads((recorded(tmp_path / "a", values) / "hyperparams.json").read_text())
    assert (written["file"], written["method"]) == ("a\udcff", "list.append")
    assert written["generator"].endswith("<genexpr>")
    assert (written["sparse"][:7], written["meta"][:7]) == ("tensor(", "tensor(")
    circle: dict[str, Any] = {"lr": 0.1}
    circle["itself"] = circle
    written = json.loads((recorded(tmp_path / "b", {"lr": 0.1, "circle": circle}) / "hyperparams.json").read_text())
    assert (written["lr"], written["circle"]) == ("0.1", "{'lr': 0.1, 'itself': {...}}")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8")
def test_sources_have_names_of_any_bytes_and_no_earlier_runs(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    for name in (b"train.py", b"b\xff.py", b"digits/model.py"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text("")
    recorded(tmp_path, {}, tmp_path)
    folder = recorded(tmp_path, {"second": True}, tmp_path)
    names = zipfile.ZipFile(folder / "source_code.zip").namelist()
    here = tmp_path.name
    assert sorted(names) == [f"{here}/b\\udcff.py", f"{here}/digits/model.py", f"{here}/train.py"]
