"""The folder of an experiment: what it was, what came out, and how it goes on."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import TrainLoop, TTBasicModel, checkpoint
from trainloop.callbacks.reports import experiment as tracking
from trainloop.callbacks.reports.experiment import Experiment, ExperimentCheckpoint, ExperimentEndSave, ExperimentRecord
from trainloop.errors import ConfigurationError
from trainloop.result_package import classification


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def tracked(experiment: Experiment, val: Any = None, test: Any = None, **arguments: Any) -> tuple[TrainLoop, Any]:
    """A loop with all that the three tracking loops bring along, and what saves at its end."""
    torch.manual_seed(0)
    model = Net()
    data = DataLoader(make_data(), batch_size=16)
    options = {"validation_loader": data, "test_loader": data, "progress_bar": False, **arguments}
    optimizer = torch.optim.Adam(model.parameters())
    loop = TrainLoop(model, data, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **options)
    end = ExperimentEndSave(experiment, val, test)
    brought = [ExperimentRecord(experiment), ExperimentCheckpoint(experiment), end]
    loop.own_callbacks = lambda: brought  # type: ignore[method-assign]
    return loop, end


def rows(y_pred: Any, y_true: Any, metadata: Any) -> int:
    return len(y_pred)


def test_an_experiment_end_to_end(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    (sources / "deep" / "__pycache__").mkdir(parents=True)
    (sources / "deep" / "a.py").write_text("a = 1")
    (sources / "deep" / "__pycache__" / "a.pyc").write_text("no source")
    hyperparams = {
        "lr": 1e-3, "layers": (8, 3), "path": tmp_path, "net": Net, "scale": np.float32(0.5), "w": torch.ones(2),
        "inf": float("inf"), "nested": {1: None}, "dtype": np.float32,
    }  # fmt: skip
    given = dict(hyperparams)
    experiment = Experiment("digits", "baseline", tmp_path / "results", hyperparams, source_dirs=[sources])
    loop, end = tracked(experiment, val=classification, test=[rows])
    loop.fit(num_epochs=2)

    assert hyperparams == given, "the user's own dict is left alone"
    folder = tmp_path / "results" / "digits" / f"baseline_{experiment.timestamp}"
    assert experiment.folder.location == str(folder)
    assert sorted(os.listdir(folder)) == [
        "checkpoints", "hyperparams.json", "model.pt", "results", "source_code.zip", "test_tracking.py",
    ]  # fmt: skip
    written = json.loads((folder / "hyperparams.json").read_text())
    assert written == {
        "lr": 0.001, "layers": [8, 3], "path": str(tmp_path), "net": f"{__name__}.Net", "scale": 0.5, "w": [1.0, 1.0],
        "inf": "inf", "nested": {"1": None}, "dtype": "numpy.float32", "experiment_file_path": __file__,
    }  # fmt: skip
    assert (folder / "test_tracking.py").read_bytes() == Path(__file__).read_bytes()
    assert zipfile.ZipFile(folder / "source_code.zip").namelist() == ["src/deep/a.py"]
    assert [c.info.epoch for c in checkpoint.checkpoints(folder / "checkpoints") if c.info] == [0, 1]

    report = json.loads((folder / "results" / "report.json").read_text())
    assert report["results"] == end.results
    assert report["results"]["test"] == {"rows": 101.0}
    y_pred, y_true, _ = loop.predict_on_validation_set()
    assert report["results"]["validation"]["accuracy"] == float((y_pred.argmax(1) == y_true).double().mean())
    assert report["history"] == loop.history.to_dict()
    assert (report["project"], report["experiment"], report["epochs"], report["steps"]) == ("digits", "baseline", 2, 14)
    text = (folder / "results" / "report.txt").read_text()
    for line in (
        f"digits: baseline ({experiment.timestamp})",
        "2 epochs, 14 steps",
        "Validation",
        "rows  101",
        "epoch",
    ):
        assert line in text
    saved = checkpoint.load(folder / "model.pt")
    assert torch.equal(saved["model"]["fc.weight"], loop.model.fc.weight)


def test_resuming_goes_on_in_the_folder_of_the_run_before(tmp_path: Path) -> None:
    first = Experiment("p", "e", tmp_path)
    tracked(first)[0].fit(num_epochs=1)
    (tmp_path / "p" / "e_2099-01-01_00-00-00").mkdir()  # began, and was killed before its first checkpoint
    (tmp_path / "p" / "e_of another").mkdir()
    second = Experiment("p", "e", tmp_path)
    assert second.timestamp != first.timestamp
    loop, _ = tracked(second)
    loop.fit(num_epochs=3, resume_from="last")
    assert second.timestamp == first.timestamp
    assert loop.epoch == 3
    assert len(loop.history["loss"]) == 3
    kept = checkpoint.checkpoints(first.folder / "checkpoints")
    assert [c.info.epoch for c in kept if c.info] == [0, 1, 2]
    assert json.loads(first.folder.read_text("results/report.json"))["epochs"] == 3
    assert len(list((tmp_path / "p").iterdir())) == 3


def test_a_fresh_start_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    experiment = Experiment("p", "e", tmp_path)
    loop, _ = tracked(experiment)
    loop.fit(num_epochs=1, resume_from="last")
    assert (loop.epoch, os.listdir(tmp_path / "p")) == (1, [f"e_{experiment.timestamp}"])


def test_experiments_that_were_created_together_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.time, "strftime", lambda *_: "2026-01-02_03-04-05")
    both = [Experiment("p", "e", tmp_path) for _ in range(2)]
    loops = [tracked(experiment)[0] for experiment in both]
    for loop in [*loops, *loops]:  # a second fit keeps the folder
        loop.fit(num_epochs=1)
    assert [experiment.timestamp for experiment in both] == ["2026-01-02_03-04-05", "2026-01-02_03-04-05-2"]
    for loop, experiment in zip(loops, both, strict=True):
        assert torch.equal(
            checkpoint.load(experiment.folder.path("model.pt"))["model"]["fc.weight"], loop.model.fc.weight
        )
        assert len(checkpoint.checkpoints(experiment.folder / "checkpoints")) == 2


def test_a_folder_is_taken_when_fit_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.time, "strftime", lambda *_: "2026-01-02_03-04-05")
    both = [Experiment("p", "e", tmp_path) for _ in range(2)]
    for experiment in both:  # as in two processes, neither of which has started its ranks
        tracked(experiment)[0].register_callback(ExperimentRecord(experiment))
    assert both[0].timestamp != both[1].timestamp
    assert all(experiment.folder.exists() for experiment in both)


def test_two_experiments_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.time, "strftime", lambda *_: "2026-01-02_03-04-05")
    stamps = []
    for _ in range(3):
        experiment = Experiment("p", "e", tmp_path)
        experiment.record()
        stamps.append(experiment.timestamp)
    assert stamps == ["2026-01-02_03-04-05", "2026-01-02_03-04-05-2", "2026-01-02_03-04-05-3"]
    assert Experiment("p", "e", tmp_path).earlier_timestamps() == stamps[::-1]


def test_other_hyperparameters_of_a_resumed_run_stand_beside_the_first(tmp_path: Path) -> None:
    experiment = Experiment("p", "e", tmp_path, {"lr": 1})
    experiment.record()
    experiment.record()
    experiment.hyperparams["lr"] = 2
    experiment.record()
    names = [name for name in experiment.folder.names() if name.endswith("json")]
    assert names == ["hyperparams.json", "hyperparams_2.json"]
    assert [json.loads(experiment.folder.read_text(name))["lr"] for name in names] == [1, 2]


def test_a_named_script_is_kept(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print()")
    experiment = Experiment("p", "e", tmp_path, {"experiment_file_path": str(tmp_path / "other.py")})
    experiment.record()
    assert experiment.folder.read_text("other.py") == "print()"


def test_in_a_notebook_the_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        user_ns = {"In": ["", "x = 1", "tl.fit()"]}

    class IPython:
        get_ipython = staticmethod(Shell)

    monkeypatch.setitem(tracking.sys.modules, "IPython", IPython)  # type: ignore[arg-type]
    namespace: dict[str, Any] = {"__name__": "__main__", "Experiment": Experiment, "where": tmp_path}
    exec(compile("experiment = Experiment('p', 'e', where)", "/tmp/ipykernel_1/2.py", "exec"), namespace)
    namespace["experiment"].record()
    assert namespace["experiment"].folder.read_text("notebook.py") == "# In [1]\nx = 1\n\n# In [2]\ntl.fit()"


def test_a_package_that_fails_costs_a_warning_and_not_the_model(tmp_path: Path) -> None:
    def fails(y_pred: Any, y_true: Any, metadata: Any) -> float:
        raise ValueError("no such class")

    experiment = Experiment("p", "e", tmp_path)
    loop, end = tracked(experiment, val=fails, test=rows)
    with pytest.warns(
        RuntimeWarning, match=r"scoring with the validation result package failed: ValueError: no such class"
    ):
        loop.fit(num_epochs=1)
    assert end.results == {"test": {"rows": 101.0}}
    report = json.loads(experiment.folder.read_text("results/report.json"))
    assert report["problems"] == ["scoring with the validation result package failed: ValueError: no such class"]
    assert "Problems" in experiment.folder.read_text("results/report.txt")
    assert "model.pt" in experiment.folder.names()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"project_name": ""}, r"project_name='': must be the name of a folder, such as 'digits'"),
        ({"experiment_name": "a/b"}, r"experiment_name='a/b': must be the name of a folder"),
        ({"experiment_name": "é" * 150}, r"experiment_name='éé+'\.\.\. has 300 bytes: use at most 200"),
        ({"hyperparams": ["lr"]}, r"hyperparams=\['lr'\]: must be a dict. vars\(args\) converts"),
        ({"source_dirs": ["/no/such"]}, r"source_dirs: /no/such is not a folder. Pass existing folders"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: Any, message: str) -> None:
    given = {"project_name": "p", "experiment_name": "e", "local_model_result_folder_path": tmp_path, **arguments}
    with pytest.raises(ConfigurationError, match=message):
        Experiment(**given)


def test_a_package_without_its_data_is_told_before_training(tmp_path: Path) -> None:
    loop, _ = tracked(Experiment("p", "e", tmp_path), test=rows, test_loader=None)
    with pytest.raises(ConfigurationError, match=r"test_result_package: the loop has no test_loader. Pass"):
        loop.fit(num_epochs=1)
    assert not [path for path in (tmp_path / "p").rglob("*") if path.is_file()]


def test_which_checkpoints_stay_in_aitoolboxs_words(tmp_path: Path) -> None:
    experiment = Experiment("p", "e", tmp_path)
    all_stay = ExperimentCheckpoint(experiment)
    assert (all_stay.keep, all_stay.monitor, all_stay.every_n_epochs) == (None, None, 1)
    best = ExperimentCheckpoint(experiment, rm_subopt_local_models=True, num_best_checkpoints_kept=4)
    assert (best.keep, best.monitor, best._metric and best._metric.minimize) == (4, "loss", True)
    named = ExperimentCheckpoint(experiment, rm_subopt_local_models="val_accuracy")
    assert (named.keep, named.monitor, named._metric and named._metric.minimize) == (2, "val_accuracy", False)
    by_steps = ExperimentCheckpoint(experiment, iteration_save_freq=50, async_save=True)
    assert (by_steps.every_n_epochs, by_steps.every_n_steps, by_steps.async_save) == (None, 50, True)
    with pytest.raises(ConfigurationError, match=r"iteration_save_freq=-1: must be an int of 0 or more"):
        ExperimentCheckpoint(experiment, iteration_save_freq=-1)


def test_an_experiment_in_memory_by_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    try:
        experiment = Experiment("p", "e", "memory://test-tracking")
        tracked(experiment, val=rows)[0].fit(num_epochs=1)
        again = Experiment("p", "e", "memory://test-tracking")
        loop, _ = tracked(again, val=rows)
        loop.fit(num_epochs=2, resume_from="last")
        assert again.timestamp == experiment.timestamp
        assert len(loop.history["loss"]) == 2
        assert json.loads(again.folder.read_text("results/report.json"))["epochs"] == 2
        assert time.strptime(again.timestamp[:19], "%Y-%m-%d_%H-%M-%S")
    finally:
        fsspec.filesystem("memory").rm("/test-tracking", recursive=True)
