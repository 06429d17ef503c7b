"""Weights & Biases and MLflow. Neither is installed for the tests: stand-ins record what they are told.

What the stand-ins accept was compared with wandb 0.31 (offline) and mlflow 3.17 (file store).
"""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kit.small_loop import STEPS_PER_EPOCH, Raises, make_loop

from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint
from trainloop.callbacks.reports import trackers
from trainloop.callbacks.reports.trackers import MLflowTracking, WandBTracking
from trainloop.errors import ConfigurationError


class Run:
    """A run of wandb."""

    def __init__(self, number: int, arguments: dict[str, Any]) -> None:
        self.id = arguments.get("id") or f"run{number}"
        self.arguments = arguments
        self.logged: list[dict[str, float]] = []
        self.alerts: list[dict[str, Any]] = []
        self.code: list[str] = []
        self.metrics: dict[str, str | None] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        assert self.exit_code is None
        self.logged.append(values)

    def alert(self, title: str, text: str, level: Any = None) -> None:
        self.alerts.append({"title": title, "text": text, "level": level})

    def log_code(self, folder: str) -> None:
        self.code.append(folder)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that were begun, oldest first."""
    begun: list[Run] = []
    module: Any = ModuleType("wandb")
    module.run = None

    def init(**arguments: Any) -> Run:
        begun.append(Run(len(begun), arguments))
        return begun[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return begun


def test_wandb_gets_steps_and_epochs_once(runs: list[Run]) -> None:
    loop = make_loop()
    tracking = WandBTracking(
        batch_log_frequency=3,
        hyperparams={"lr": 0.1},
        tags=["a"],
        source_dirs=["src"],
        project_name="digits",
        mode="offline",
    )
    loop.fit(num_epochs=2, callbacks=[tracking])
    [run] = runs
    assert run.arguments == {
        "project": "digits", "name": None, "config": {"lr": 0.1}, "tags": ["a"], "dir": None, "mode": "offline",
    }  # fmt: skip
    assert run.code == ["src"]
    assert run.metrics == {"global_step": None, "*": "global_step"}
    assert run.exit_code == 0
    steps = [values for values in run.logged if "loss" in values]
    assert [values["global_step"] for values in steps] == [3, 6, 9, 12]
    assert [values["loss"] for values in steps] == [loop.history.steps("loss")[i] for i in (2, 5, 8, 11)]
    epochs = [values for values in run.logged if "epoch/loss" in values]
    assert [values["epoch/val_loss"] for values in epochs] == loop.history["val_loss"]
    assert [(values["epoch"], values["global_step"]) for values in epochs] == [(0, 7), (1, 14)]
    assert len(run.logged) == 6


def test_wandb_goes_on_in_the_same_run(runs: list[Run], tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [WandBTracking(metric_names=["loss"]), ModelCheckpoint(tmp_path)]

    make_loop(seed=0).fit(num_epochs=1, callbacks=callbacks())
    loop, again = make_loop(seed=0), callbacks()
    loop.fit(num_epochs=2, callbacks=again, resume_from="last")
    loop.fit(num_epochs=1, callbacks=again)
    assert [run.id for run in runs] == ["run0", "run0", "run0"]
    assert "resume" not in runs[0].arguments
    assert runs[1].arguments["resume"] == runs[2].arguments["resume"] == "allow"
    logged = [values for run in runs for values in run.logged]
    assert [values["epoch/loss"] for values in logged] == loop.history["loss"]
    assert not any("epoch/val_loss" in values for values in logged)
    make_loop().fit(num_epochs=1, callbacks=again[:1])
    assert runs[-1].id == "run3"  # another training, another run


def test_wandb_run_of_one_s_own(runs: list[Run]) -> None:
    import wandb

    own = Run(9, {})
    wandb.run = own  # type: ignore[attr-defined]
    make_loop().fit(num_epochs=1, callbacks=[WandBTracking(wandb_pre_initialized=True)])
    assert not runs
    assert own.logged
    assert own.exit_code is None  # its owner finishes it


@pytest.mark.usefixtures("starts_processes")
def test_wandb_run_that_failed(runs: list[Run]) -> None:
    with pytest.raises(OSError, match="no more"):
        make_loop().fit(
            num_epochs=1, callbacks=[WandBTracking(), Raises(OSError("no more"), "on_epoch_end", order=1000)]
        )
    assert runs[0].exit_code == 1


@pytest.mark.parametrize(
    "fit, words",
    [
        (
            lambda: make_loop().fit(num_epochs=1, callbacks=[WandBTracking(wandb_pre_initialized=True)]),
            "no W&B run is active. Call wandb.init(...) before fit",
        ),
        (
            lambda: make_loop(gpu_mode="ddp", devices=2).fit(
                num_epochs=1, callbacks=[WandBTracking(wandb_pre_initialized=True)]
            ),
            "does not exist in the ranks. Leave",
        ),
    ],
)
def test_what_cannot_work(fit: Any, words: str, runs: list[Run]) -> None:
    with pytest.raises(ConfigurationError) as error:
        fit()
    assert words in str(error.value)


@pytest.mark.parametrize("callback, extra", [(WandBTracking, "wandb"), (MLflowTracking, "mlflow")])
def test_a_missing_extra_is_named(callback: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigurationError, match=rf"needs {extra}: pip install '\.\[{extra}\]'"):
        make_loop().fit(num_epochs=1, callbacks=[callback()])


class Client:
    """MLflow's client: one server for all of a test."""

    def __init__(self) -> None:
        self.experiments: list[str] = ["Default"]
        self.runs: list[dict[str, Any]] = []

    def get_experiment_by_name(self, name: str) -> Any:
        known = name in self.experiments
        return SimpleNamespace(experiment_id=self.experiments.index(name)) if known else None

    def create_experiment(self, name: str) -> int:
        self.experiments.append(name)
        return len(self.experiments) - 1

    def create_run(self, experiment_id: int, run_name: str | None, tags: Any) -> Any:
        self.runs.append({"in": self.experiments[experiment_id], "name": run_name, "status": "RUNNING"})
        self.runs[-1].update(params={}, metrics=[], tags=tags)
        return SimpleNamespace(info=SimpleNamespace(run_id=len(self.runs) - 1))

    def log_param(self, run_id: int, key: str, value: Any) -> None:
        self.runs[run_id]["params"][key] = value

    def update_run(self, run_id: int, status: str) -> None:
        self.runs[run_id]["status"] = status

    set_terminated = update_run

    def log_batch(self, run_id: int, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        self.runs[run_id]["metrics"] += [(name, step, value) for name, value, _, step in metrics]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    mlflow: Any = ModuleType("mlflow")
    mlflow.MlflowClient = lambda tracking_uri: client
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = namedtuple("Metric", ["key", "value", "timestamp", "step"])
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


def test_mlflow_gets_steps_and_epochs_once(server: Client) -> None:
    loop = make_loop()
    tracking = MLflowTracking("digits", "first", log_every_n_steps=2, hyperparams={"lr": 0.1}, tags={"a": "b"})
    loop.fit(num_epochs=1, callbacks=[tracking])
    loop.fit(num_epochs=1, callbacks=[tracking])
    [run] = server.runs
    assert (run["in"], run["name"], run["params"], run["tags"]) == ("digits", "first", {"lr": 0.1}, {"a": "b"})
    assert run["status"] == "FINISHED"

    def sent(name: str) -> list[tuple[int, float]]:
        return [(step, value) for key, step, value in run["metrics"] if key == name]

    assert sent("loss") == [(step, loop.history.steps("loss")[step - 1]) for step in range(2, 15, 2)]
    for tag, name in (("epoch/loss", "loss"), ("val_loss", "val_loss")):
        ends = [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
        assert sent(tag) == list(zip(ends, loop.history[name], strict=True))


def test_mlflow_goes_on_in_the_same_run(server: Client, tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [MLflowTracking(log_every_n_steps=None), ModelCheckpoint(tmp_path)]

    make_loop(seed=0).fit(num_epochs=1, callbacks=callbacks())
    loop, again = make_loop(seed=0), callbacks()
    loop.fit(num_epochs=2, callbacks=again, resume_from="last")
    [run] = server.runs
    assert [value for key, _, value in run["metrics"] if key == "loss"] == loop.history["loss"]
    make_loop().fit(num_epochs=1, callbacks=again[:1])
    assert len(server.runs) == 2


class LogsOnce(AbstractCallback):
    """Logs a value in an epoch's first step, and fails once in its last one."""

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        step = loop.total_iteration_idx % STEPS_PER_EPOCH
        if step == 0:
            self.log("rare", loop.global_step, on_step=True, on_epoch=True)
        if step == STEPS_PER_EPOCH - 1 and not loop.resumed:
            raise OSError("once")


def test_mlflow_names_epoch_values_alike_after_a_resume(server: Client, tmp_path: Path) -> None:
    def fit() -> None:
        callbacks = [MLflowTracking(log_every_n_steps=2), ModelCheckpoint(tmp_path, every_n_steps=3), LogsOnce("once")]
        make_loop(seed=0).fit(num_epochs=1, callbacks=callbacks, resume_from="last")

    with pytest.raises(OSError, match="once"):
        fit()
    fit()
    names = {name for name, *_ in server.runs[0]["metrics"]}
    assert "epoch/rare" in names
    assert "rare" not in names  # its step is not one of every second


@pytest.mark.parametrize("exception, status", [(OSError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_mlflow_run_that_ended_early(exception: type[BaseException], status: str, server: Client) -> None:
    with pytest.raises(exception):
        make_loop().fit(num_epochs=1, callbacks=[Raises(exception("no more"), "on_train_end"), MLflowTracking()])
    assert server.runs[0]["status"] == status


def test_mlflow_batches_are_small_enough(server: Client) -> None:
    tracking = MLflowTracking(log_every_n_steps=1)
    tracking.on_log([(step, {"a": 1.0, "b": 2.0, "c": 3.0}) for step in range(1, 900)])
    assert len(server.runs[0]["metrics"]) == 2697


class Refused(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


class Logs(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("logs")

    def on_epoch_end(self) -> None:
        self.train_loop_obj.log("acc@1", 0.5)
        self.train_loop_obj.log("refused", 0.5)


def test_mlflow_that_fails_gets_the_values_later(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, calls = Client.log_batch, []

    def log_batch(self: Client, run_id: int, metrics: list[Any]) -> None:
        calls.append(len(metrics))
        if len(calls) in (2, 3):
            raise ConnectionError("502 Bad Gateway")
        if any(name == "refused" or "@" in name for name, *_ in metrics):
            raise Refused("no")
        accept(self, run_id, metrics)

    monkeypatch.setattr(Client, "log_batch", log_batch)
    monkeypatch.setattr(trackers, "_SHARE_OF_TIME", 0)  # a slow machine's pauses last until the end
    loop = make_loop()
    tracking = MLflowTracking(log_every_n_steps=None, hyperparams={1: 2, "a@b": 3, "a#b": 4}, tags={4: "x"})
    with pytest.warns(RuntimeWarning) as warned:
        loop.fit(num_epochs=6, callbacks=[Logs(), tracking])
    [run] = server.runs
    for name, metric in (("loss", "loss"), ("acc_1", "acc@1")):
        assert [value for key, _, value in run["metrics"] if key == name] == loop.history[metric]
    assert (run["params"], run["tags"], run["status"]) == ({"1": 2, "a_b": 3, "a_b_": 4}, {"4": "x"}, "FINISHED")
    texts = [str(one.message) for one in warned]
    [failed] = [text for text in texts if "502 Bad Gateway" in text]
    assert "values are kept, and sent once the service works again" in failed
    assert len([text for text in texts if "'acc@1', so it is sent as 'acc_1'" in text]) == 1
    assert len([text for text in texts if "MLflow refuses values of 'refused'" in text]) == 1
    assert len(texts) == 5


def test_mlflow_that_never_works_again(server: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("refused")

    make_loop().fit(num_epochs=1, callbacks=[MLflowTracking(), ModelCheckpoint(tmp_path)])
    for name in ("log_batch", "update_run", "set_terminated", "get_experiment_by_name"):
        monkeypatch.setattr(Client, name, fails)
    loop = make_loop()
    with pytest.warns(RuntimeWarning) as warned:
        loop.fit(num_epochs=3, callbacks=[MLflowTracking(), ModelCheckpoint(tmp_path)], resume_from="last")
    assert len(loop.history["loss"]) == 3
    assert len(warned) == 3  # the run, the values, and those that are lost:
    assert "could not be sent until the end of the training, and are lost" in str(warned[2].message)
    loop = make_loop()
    with pytest.raises(
        ConfigurationError, match=r"the run can't be opened \(ConnectionError: refused\). Check the add"
    ):
        loop.fit(num_epochs=1, callbacks=[MLflowTracking()])
    assert "loss" not in loop.history  # before the first step


def test_wandb_that_fails_gets_the_values_later(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    log, calls = Run.log, []

    def flaky(self: Run, values: dict[str, float]) -> None:
        calls.append(values)
        if len(calls) == 2:
            raise BrokenPipeError("the service has ended")
        log(self, values)

    def fails(self: Run, *_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(Run, "log", flaky)
    for name in ("log_code", "finish"):
        monkeypatch.setattr(Run, name, fails)
    loop = make_loop()
    tracking = WandBTracking(hyperparams={1: 2}, source_dirs=["src"])
    with pytest.warns(RuntimeWarning) as warned:
        loop.fit(num_epochs=4, callbacks=[tracking])
    assert [values["epoch/loss"] for values in runs[0].logged] == loop.history["loss"]
    assert runs[0].arguments["config"] == {"1": 2}
    assert sorted(str(one.message).partition(": ")[2].partition(" (")[0] for one in warned) == [
        "the code of 'src' could not be stored",
        "the run could not be closed",
        "values could not be sent",
    ]
