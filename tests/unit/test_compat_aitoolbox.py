"""Scripts for AIToolbox: its names, numbers, files and callbacks, against loops written by hand and scikit-learn."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sklearn.metrics
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop.callbacks.base import AbstractCallback
from trainloop.compat.aitoolbox import callbacks as cb
from trainloop.compat.aitoolbox import install, saving
from trainloop.compat.aitoolbox.callbacks import (
    MetricHistoryRename,
    ModelPerformanceEvaluation,
    ModelPerformancePrintReport,
)
from trainloop.compat.aitoolbox.components import MessageHandling, MessageService
from trainloop.compat.aitoolbox.experiments import (
    ModelLoadContinueTraining,
    PyTorchModelPredictor,
    TrainLoopCheckpoint,
    TrainLoopCheckpointEndSave,
)
from trainloop.compat.aitoolbox.loop import TrainLoop
from trainloop.compat.aitoolbox.models import ModelWrap, TTDataParallel
from trainloop.compat.aitoolbox.modules import MODULES
from trainloop.compat.aitoolbox.optim import (
    MultiLoss,
    MultiOptimizer,
    ReduceLROnPlateauMetricScheduler,
    StepLRScheduler,
)
from trainloop.compat.aitoolbox.reports import ModelTrainHistoryFileWriter, ModelTrainHistoryPlot
from trainloop.compat.aitoolbox.results import (
    BinaryClassificationResultPackage,
    ClassificationResultPackage,
    RegressionResultPackage,
)
from trainloop.compat.aitoolbox.saving import PyTorchLocalModelLoader
from trainloop.data.batch_model_feed_defs import AbstractModelFeedDefinition
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel

LR = 0.3


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return criterion(self(x), y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x).argmax(1), y, None


def loader(samples: int, batch_size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(samples)
    rows = torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(*rows), batch_size=batch_size)


def make(kind: Callable[..., Any] = TrainLoop, *args: Any, **kwargs: Any) -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loaders = loader(64), loader(32), loader(48)
    options = {"progress_bar": False, **kwargs}
    return kind(model, *loaders, optimizer, nn.CrossEntropyLoss(), *args, **options)


def mean_loss(model: nn.Module, batches: DataLoader[Any]) -> float:
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in batches]
    return float(torch.stack(losses).double().mean())


def by_hand(epochs: int) -> dict[str, list[float]]:
    """AIToolbox's history of a training written in plain PyTorch; all batches are full, so means are means."""
    model = Net()
    history: dict[str, list[float]] = {"accumulated_loss": [], "loss": [], "val_loss": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(epochs):
        losses = []
        for x, y in loader(64):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history["accumulated_loss"].append(sum(losses) / len(losses))
        history["loss"].append(mean_loss(model, loader(64)))
        history["val_loss"].append(mean_loss(model, loader(32)))
    history["train_end_test_loss"] = [mean_loss(model, loader(48))]
    return history


class Spy(AbstractCallback):
    """The state that a callback can see at each hook."""

    def __init__(self) -> None:
        super().__init__("spy")
        self.seen: list[Any] = []

    def on_train_loop_registration(self) -> None:
        self.train_loop_obj.grad_cb_used = True

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        self.message_service.write_message("batch", loop.iteration)
        accumulated = len(loop.loss_batch_accum)
        self.seen.append(("batch", loop.iteration, loop.should_execute_optimizer_update(), accumulated))

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.seen.append(("gradient", self.train_loop_obj.iteration))

    def on_after_batch_prediction(self, *args: Any) -> None:
        self.seen.append("prediction")

    def on_epoch_end(self) -> None:
        self.seen.append(("epoch", self.train_loop_obj.epoch, self.message_service.read_messages("batch")))

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        self.seen.append(
            ("end", loop.epoch, loop.get_num_training_steps(), self.message_service.read_messages("batch"))
        )


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_name_of_aitoolbox_is_there() -> None:
    for name, names in MODULES.items():
        module = importlib.import_module(name)
        for public in names.split():
            assert getattr(module, public) is not None, (name, public)
    for package, name in (
        ("aitoolbox", "ReduceLROnPlateauScheduler"),
        ("aitoolbox.torchtrain", "BasicDataset"),
        ("aitoolbox.torchtrain.callbacks", "EmailNotification"),
        ("aitoolbox.torchtrain.train_loop", "TrainLoopEndSave"),
        ("aitoolbox.experiment", "RegressionResultPackage"),
    ):
        assert hasattr(importlib.import_module(package), name), (package, name)
    namespace: dict[str, Any] = {}
    exec("from aitoolbox import *\nimport aitoolbox.torchtrain.train_loop as t", namespace)
    assert namespace["TrainLoop"] is TrainLoop is namespace["t"].TrainLoop
    assert "ClassificationResultPackage" in namespace


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match="provides only AIToolbox's torchtrain"):
        importlib.import_module("aitoolbox.nlp")
    with pytest.raises(AttributeError, match="no attribute 'KerasLocalModelSaver'"):
        _ = importlib.import_module("aitoolbox.experiment.local_save.local_model_save").KerasLocalModelSaver


def test_aitoolbox_itself_must_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("aitoolbox")
    real.__file__ = "/site-packages/aitoolbox/__init__.py"
    monkeypatch.setitem(sys.modules, "aitoolbox", real)
    with pytest.raises(ConfigurationError, match=r"already imported, from /site-packages.*before the first import"):
        install()


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_history_epochs_and_a_second_fit_count_as_in_aitoolbox() -> None:
    loop, spy = make(), Spy()
    assert loop.fit(2, callbacks=[spy]) is loop.model
    expected = by_hand(2)
    assert dict(loop.train_history.items()) == {name: pytest.approx(values) for name, values in expected.items()}
    assert (loop.epoch, loop.iteration, loop.total_iteration_idx) == (1, 3, 7)
    one = [("gradient", i) if hook else ("batch", i, True, i + 1) for i in range(4) for hook in (True, False)]
    messages = [0, 1, 2, 3]
    assert spy.seen == [*one, ("epoch", 0, messages), *one, ("epoch", 1, messages), ("end", 1, 8, None)]
    loop.fit(4)  # up to epoch 4, beginning with the last one's number: three more
    assert len(loop.train_history["loss"]) == 5
    assert loop.epoch == 3
    assert loop.train_history["loss"] == pytest.approx(by_hand(5)["loss"])
    with pytest.warns(UserWarning, match="trains up to epoch 1"):
        loop.fit(1)
    assert len(loop.train_history["loss"]) == 5


@pytest.mark.parametrize(("every", "epochs"), [(2, 2), (3, 1), (False, 0), (True, 3)])
def test_end_auto_eval_counts_from_the_first_epoch(every: bool | int, epochs: int) -> None:
    loop = make(end_auto_eval=every)
    loop.fit(3)
    lengths = {name: len(results) for name, results in loop.train_history.items()}
    end = {} if every is False else {"train_end_test_loss": 1}
    assert lengths == {"accumulated_loss": 3, "loss": epochs, "val_loss": epochs, **end}


def test_accumulation_shows_callbacks_every_backward() -> None:
    loop, spy = make(), Spy()
    loop.fit(1, callbacks=[spy], grad_accumulation=3)
    gradients = [entry[1] for entry in spy.seen if entry[0] == "gradient"]
    updates = [entry[2] for entry in spy.seen if entry[0] == "batch"]
    assert gradients == [0, 1, 2, 3]
    assert updates == [False, False, True, True]  # the epoch's last batch is a step too


def test_an_early_stop_ends_the_epoch_first() -> None:
    class Stop(AbstractCallback):
        def on_batch_end(self) -> None:
            self.train_loop_obj.early_stop = self.train_loop_obj.total_iteration_idx == 1

    loop = make()
    loop.fit(3, callbacks=[Stop()])
    assert (loop.epoch, loop.total_iteration_idx, loop.early_stop) == (0, 3, True)


def test_evaluations_are_tensors_kept_until_the_next_step() -> None:
    loop, spy = make(), Spy()
    loop.callbacks_handler.register_callbacks([spy])
    loss = loop.evaluate_loss_on_test_set()
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(mean_loss(loop.model, loader(48)))
    with torch.no_grad():
        loop.model.fc.weight.zero_()
    assert loop.evaluate_loss_on_test_set() is loss
    fresh = loop.evaluate_loss_on_test_set(force_prediction=True, float_dict_format=True)
    assert fresh == pytest.approx(mean_loss(loop.model, loader(48))) != loss.item()
    y_pred, y_true, metadata = loop.predict_on_validation_set()
    assert (len(y_pred), len(y_true), metadata) == (32, 32, {})
    assert not spy.seen
    loop.predict_on_validation_set(force_prediction=True, execute_callbacks=True)
    assert spy.seen == ["prediction"] * 2


def test_a_model_wrap_trains_its_module_and_a_parallel_model_is_unwrapped() -> None:
    class Feed(AbstractModelFeedDefinition):
        def get_loss(self, model: Any, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return criterion(model(batch_data[0]), batch_data[1])

        def get_predictions(self, model: Any, batch_data: Any, device: torch.device) -> Any:
            return model(batch_data[0]).argmax(1), batch_data[1], None

    module = Net().fc
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    wrap = ModelWrap(model=module, batch_model_feed_def=Feed())
    loop = TrainLoop(wrap, loader(64), loader(32), loader(48), optimizer, nn.CrossEntropyLoss(), progress_bar=False)
    assert loop.fit(1) is module
    assert loop.train_history["loss"] == pytest.approx(by_hand(1)["loss"])
    with pytest.raises(TypeError, match="must be an AbstractModelFeedDefinition"):
        ModelWrap(module, None)  # type: ignore[arg-type]
    model = Net()
    parallel = TTDataParallel(model, default_model_methods=("get_loss",), device_ids=["cpu"])
    unwrapped = TrainLoop(parallel, loader(64), None, None, torch.optim.SGD(model.parameters(), LR), None)
    assert (unwrapped.model, unwrapped.gpu_mode) == (model, "dp")


def test_messages_live_as_long_as_they_are_told() -> None:
    board = MessageService()
    assert board.read_messages("nothing") is None
    board.write_message("epoch", 1)
    board.write_message("read", 2, MessageHandling.UNTIL_READ)
    board.write_message("kept", 3, MessageHandling.KEEP_FOREVER)
    board.write_message("kept", 4, msg_handling_settings=[MessageHandling.OVERWRITE, MessageHandling.KEEP_FOREVER])
    assert [board.read_messages("read"), board.read_messages("read")] == [[2], []]
    board.end_of_epoch_trigger()
    assert [board.read_messages(key) for key in ("epoch", "read", "kept")] == [None, None, [4]]
    with pytest.raises(ConfigurationError, match="exclude each other"):
        board.write_message("x", 1, [MessageHandling.UNTIL_READ, MessageHandling.KEEP_FOREVER])
    with pytest.raises(TypeError, match="must be a MessageHandling"):
        board.write_message("x", 1, "keep_forever")  # type: ignore[arg-type]


# -- several losses ----------------------------------------------------------------------------------------------------


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other = nn.Linear(4, 4), nn.Linear(4, 3)

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {name: nn.functional.cross_entropy(head(hidden), y) for name, head in self.heads().items()}

    def heads(self) -> dict[str, nn.Module]:
        return {"a": self.fc, "b": self.other}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        last = [*self.other.parameters(), *self.trunk.parameters()]
        return [torch.optim.SGD(self.fc.parameters(), LR), torch.optim.SGD(last, LR)]

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return Halved(self.losses(*batch_data), {"a": 0, "b": 1})


class Halved(MultiLoss):  # written as scripts write it
    def backward(self, optimizer_idx: int, iteration: int, amp_grad_scaler: Any) -> None:  # type: ignore[override]
        if optimizer_idx == 1:
            self["b"] = self["b"] / 2
        super().backward(optimizer_idx, iteration, amp_grad_scaler)


class EverySecond(MultiOptimizer):
    def __init__(self, optimizer_list: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(optimizer_list)
        self.calls: list[tuple[str, int, int]] = []

    def step(self, optimizer_idx: int, iteration: int, amp_grad_scaler: Any) -> None:  # type: ignore[override]
        self.calls.append(("step", optimizer_idx, iteration))
        if optimizer_idx == 0 or iteration % 2:
            super().step(optimizer_idx, iteration, amp_grad_scaler)

    def zero_grad(self, optimizer_idx: int, iteration: int) -> None:  # type: ignore[override]
        self.calls.append(("zero_grad", optimizer_idx, iteration))
        if optimizer_idx == 0 or iteration % 2:
            super().zero_grad(optimizer_idx, iteration)


def test_overrides_of_multi_loss_and_multi_optimizer_train_as_written() -> None:
    model, reference = TwoHeads(), TwoHeads()
    optimizer = EverySecond(model.optimizers())
    loop = TrainLoop(model, loader(64), loader(32), None, optimizer, None, progress_bar=False)
    spy = Spy()
    loop.fit(2, callbacks=[spy, StepLRScheduler(1, gamma=0.5, optimizer_idx=0)])

    one, two = reference.optimizers()
    accumulated = []
    for epoch in range(2):
        losses = []
        for i, (x, y) in enumerate(loader(64)):
            both = reference.losses(x, y)
            losses.append(both["a"].item())
            both["a"].backward(retain_graph=True)
            one.step()
            one.zero_grad()
            (both["b"] / 2).backward()
            if i % 2:
                two.step()
                two.zero_grad()
        one.param_groups[0]["lr"] = LR * 0.5 ** (epoch + 1)
        accumulated.append(sum(losses) / 4)
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, expected)
    calls = [(name, index, i) for i in range(4) for index in (0, 1) for name in ("step", "zero_grad")]
    assert optimizer.calls == calls * 2
    assert [entry[1] for entry in spy.seen if entry[0] == "gradient"] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert loop.train_history["accumulated_loss_a"] == pytest.approx(accumulated)
    assert set(loop.train_history["val_loss_b"])
    assert not loop.train_history["val_loss"]
    loss = loop.evaluate_loss_on_validation_set()
    assert isinstance(loss, MultiLoss)
    assert loop.evaluate_loss_on_validation_set(float_dict_format=True) == loss.item().get_loss_dict()


def test_a_loss_that_is_no_multi_loss_is_refused() -> None:
    model = TwoHeads()
    loop = TrainLoop(model, loader(64), None, None, MultiOptimizer(model.optimizers()), None, progress_bar=False)
    model.get_loss = lambda batch_data, criterion, device: model.losses(*batch_data)["a"]  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"returned a Tensor. With AIToolbox's MultiOptimizer"):
        loop.fit(1)


# -- callbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 2])
def test_early_stopping_waits_as_many_epochs_as_in_aitoolbox(patience: int) -> None:
    loop, stop = make(), cb.EarlyStopping("accumulated_loss", min_delta=100.0, patience=patience)
    loop.fit(9, callbacks=[stop])
    assert (loop.epoch, stop.best_epoch, stop.patience_count) == (patience + 1, 0, -1)


def test_metrics_have_aitoolboxs_names_and_scikit_learns_values(capsys: pytest.CaptureFixture[str]) -> None:
    loop = make()
    package = ClassificationResultPackage()
    callbacks = [
        ModelPerformanceEvaluation(package, {}, on_train_data=True),
        ModelPerformancePrintReport(["train_Accuracy", "val_Accuracy"]),
        MetricHistoryRename("val_Accuracy", "renamed"),
        ReduceLROnPlateauMetricScheduler("accumulated_loss", patience=0, threshold=10.0),
    ]
    loop.fit(2, callbacks=callbacks)
    y_pred, y_true, _ = loop.predict_on_validation_set()
    history = loop.train_history
    assert history["val_Accuracy"][-1] == pytest.approx(sklearn.metrics.accuracy_score(y_true, y_pred))
    assert history["renamed"] == history["val_Accuracy"]
    assert len(history["train_Accuracy"]) == 2
    assert len(history["train_end_val_Accuracy"]) == 1
    assert f"train_end_val_Accuracy: {history['train_end_val_Accuracy'][0]}" in capsys.readouterr().out
    torchs_own = torch.optim.SGD(Net().parameters(), LR)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torchs_own, patience=0, threshold=10.0)
    for loss in history["accumulated_loss"]:
        plateau.step(loss)
    assert loop.optimizer.param_groups[0]["lr"] == torchs_own.param_groups[0]["lr"] < LR
    assert len(loop.get_schedulers()) == 1


def test_result_packages_join_and_merge() -> None:
    labels, scores = [0, 1, 1, 0], [0.2, 0.7, 0.4, 0.1]
    binary: Any
    binary, regression = BinaryClassificationResultPackage(), RegressionResultPackage()
    binary.prepare_result_package(labels, scores, {})
    regression.prepare_result_package([1.0, 2.0], [1.5, 2.0], {})
    assert binary.get_results() == {
        "Accuracy": pytest.approx(0.75),
        "ROC_AUC": pytest.approx(sklearn.metrics.roc_auc_score(labels, scores)),
        "PrecisionRecall_AUC": pytest.approx(1.0),
        "F1_score": pytest.approx(sklearn.metrics.f1_score(labels, [0, 1, 0, 0])),
    }
    both = binary + regression
    assert {name: list(results) for name, results in both.get_results().items()} == {
        "BinaryClassificationResult": list(binary.get_results()),
        "RegressionResult": ["Mean_squared_error", "Mean_absolute_error"],
    }
    binary += {"own": 1}
    assert "own" in binary
    assert len(binary) == 5
    with pytest.raises(ConfigurationError, match="both packages have results with these names: own"):
        binary += {"own": 2}


def test_anything_can_be_put_into_the_history() -> None:
    class Insert(AbstractCallback):
        def on_epoch_end(self) -> None:
            insert = self.train_loop_obj.insert_metric_result_into_history
            insert(metric_name="nested", metric_result={"a": {"b": 1}})
            insert("text", "fine")

    loop = make()
    loop.fit(2, callbacks=[Insert()])
    assert loop.train_history["text"] == ["fine", "fine"]
    assert loop.train_history.get_train_history_dict(flatten_dict=True)["nested_a_b"] == [1, 1]


# -- files -------------------------------------------------------------------------------------------------------------


def files_in(folder: Path, stamp: str) -> set[str]:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {path.replace(stamp, "T") for path in paths}


def test_experiments_have_aitoolboxs_files_here_and_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_leave: Callable[..., None]
) -> None:
    may_leave("matplotlib")  # it keeps its fonts open
    monkeypatch.setitem(saving.PROTOCOLS, "s3", "memory")  # another file system of fsspec
    package = ClassificationResultPackage()
    where = "project", "experiment", str(tmp_path), {"lr": LR}
    loop = make(
        TrainLoopCheckpointEndSave,
        *where,
        package,
        cloud_save_mode="s3",
        bucket_name="bucket",
        cloud_dir_prefix="some/folder",
        rm_subopt_local_models=True,
    )
    loop.fit(
        3,
        callbacks=[
            ModelTrainHistoryFileWriter(file_format="csv"),
            ModelTrainHistoryPlot(epoch_end=False, train_end=True),
        ],
    )
    stamp = loop.experiment_timestamp
    here = files_in(tmp_path / "project" / f"experiment_{stamp}", stamp)
    assert {
        "checkpoint_model/model_experiment_T_E1.pth",  # the two with the lowest loss
        "checkpoint_model/model_experiment_T_E2.pth",
        "model/model_experiment_T.pth",
        "hyperparams_list.txt",
        "test_compat_aitoolbox.py",
        "results/results.csv",
        "results/results_hyperParams_hist_experiment_T.p",
        "results/plots/accumulated_loss.png",
        "results/train_end_plots_epoch_2/val_loss.png",
    } <= here
    memory = MemoryFileSystem()
    base = f"/bucket/some/folder/project/experiment_{stamp}/"
    uploaded = {path.removeprefix(base).replace(stamp, "T") for path in memory.find(base)}
    assert uploaded == here | {"checkpoint_model/model_experiment_T_E0.pth"}  # only local files are removed
    memory.rm("/bucket", recursive=True)


def test_no_file_system_for_the_cloud_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(saving.PROTOCOLS, "s3", "nosuchstore")
    loop = make(TrainLoopCheckpoint, "project", "experiment", str(tmp_path), {})
    with pytest.raises(ConfigurationError, match=r"cloud_save_mode='s3': .*pass cloud_save_mode=None"):
        loop.fit(1)
    assert loop.total_iteration_idx == -1


def test_training_goes_on_from_a_checkpoint_of_aitoolbox(tmp_path: Path) -> None:
    where = "project", "experiment", str(tmp_path), {"lr": LR}
    first = make(TrainLoopCheckpoint, *where, cloud_save_mode=None)
    first.fit(2, callbacks=[StepLRScheduler(1, gamma=0.5)])
    stamp = first.experiment_timestamp
    state = PyTorchLocalModelLoader(str(tmp_path)).load_model("project", "experiment", stamp, epoch_num=0)
    assert (state["epoch"], state["iteration_idx"], state["hyperparams"]["lr"]) == (0, 3, LR)
    assert {"model_state_dict", "optimizer_state_dict", "schedulers_state_dict"} <= set(state)
    second = make(TrainLoopCheckpoint, *where, cloud_save_mode=None)
    second.fit(2, callbacks=[ModelLoadContinueTraining(stamp, epoch_num=0), StepLRScheduler(1, gamma=0.5)])
    assert (second.epoch, second.total_iteration_idx) == (1, 3)
    assert torch.equal(second.model.fc.weight, first.model.fc.weight)
    third = make(TrainLoopCheckpoint, *where, cloud_save_mode=None)
    with pytest.raises(ConfigurationError, match="is 1 in the saved model, but 0 in the loop"):
        third.fit(2, callbacks=[ModelLoadContinueTraining(stamp, epoch_num=0)])


def test_a_predictor_evaluates_without_training(tmp_path: Path) -> None:
    model = Net()
    predictor = PyTorchModelPredictor(model, loader(48))
    y_pred, y_true, _ = predictor.model_predict()
    assert predictor.model_get_loss(nn.CrossEntropyLoss()).item() == pytest.approx(mean_loss(model, loader(48)))
    results = predictor.evaluate_result_package(ClassificationResultPackage(), return_result_package=False)
    assert results == {"Accuracy": pytest.approx(sklearn.metrics.accuracy_score(y_true, y_pred))}
    predictor.evaluate_model(ClassificationResultPackage(), "p", "e", str(tmp_path), cloud_save_mode=None)
    stamp = predictor.train_loop.experiment_timestamp
    assert "p/e_T/results/results_hyperParams_hist_e_T.p" in files_in(tmp_path, stamp)


def test_arguments_that_cannot_work_are_errors_at_once(tmp_path: Path) -> None:
    where: tuple[Any, ...] = ("project", "experiment", str(tmp_path), {})
    with pytest.raises(ConfigurationError, match="iteration_save_freq=-1"):
        make(TrainLoopCheckpoint, *where, iteration_save_freq=-1)
    with pytest.raises(ConfigurationError, match="both None"):
        make(TrainLoopCheckpointEndSave, *where)
    with pytest.raises(ConfigurationError, match="end_auto_eval='always'"):
        make(end_auto_eval="always")
    with pytest.raises(AttributeError, match="no project_name"):
        make().fit(1, callbacks=[ModelTrainHistoryFileWriter()])
    with pytest.raises(TypeError, match="does not inherit from AbstractCallback"):
        make().callbacks_handler.register_callbacks([object()])
