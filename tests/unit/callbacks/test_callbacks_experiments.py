"""Callbacks that save into an experiment's folder."""

from __future__ import annotations

from pathlib import Path

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
