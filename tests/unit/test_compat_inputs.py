"""Inputs that scripts for AIToolbox may give to a loop, and attributes of its parts, by its own public names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from trainloop.callbacks.base import AbstractCallback
from trainloop.compat.aitoolbox import saving
from trainloop.compat.aitoolbox.callbacks import (
    FunctionOnTrainLoop,
    GradientStatsPrint,
    GradNormClip,
    ModelPerformanceEvaluation,
)
from trainloop.compat.aitoolbox.components import ModelPredictionStore
from trainloop.compat.aitoolbox.experiments import ModelCheckpoint, ModelLoadContinueTraining, ModelTrainEndSave
from trainloop.compat.aitoolbox.history import TrainingHistory
from trainloop.compat.aitoolbox.loop import TrainLoop
from trainloop.compat.aitoolbox.models import TTDataParallel, TTParallelBase
from trainloop.compat.aitoolbox.optim import (
    MultiLoss,
    MultiOptimizer,
    OwnOptimizer,
    ReduceLROnPlateauMetricScheduler,
    StepLRScheduler,
)
from trainloop.compat.aitoolbox.results import ClassificationResultPackage, TorchMetricsPackage
from trainloop.compat.aitoolbox.saving import (
    FullPyTorchExperimentLocalSaver,
    FullPyTorchExperimentS3Saver,
    LocalResultsSaver,
    PyTorchLocalModelLoader,
    PyTorchLocalModelSaver,
    PyTorchS3ModelSaver,
)
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel


@dataclass
class Pairs:
    """A batch of a script's own kind: no tensor, no tuple, without a length."""

    x: Tensor
    y: Tensor


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self(batch_data.x), batch_data.y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data.x).argmax(1), batch_data.y, {}


class Decaying:
    """An optimizer as papers' code has it: it holds torch's own, and is none itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group in self.inner.param_groups:
            group["lr"] = 0.5 / self.steps
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Kept(Decaying):
    """The same, with what checkpoints and schedulers need."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.inner.load_state_dict(state["inner"])


def batches(count: int) -> list[Pairs]:
    generator = torch.Generator().manual_seed(count)
    return [
        Pairs(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)
    ]


def loop(optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> TrainLoop:
    model = Net()
    own = optimizer is not torch.optim.SGD
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parts = batches(5), batches(3), batches(2), optimizer(torch_optimizer) if own else torch_optimizer
    return TrainLoop(model, *parts, nn.CrossEntropyLoss(), progress_bar=False, **options)


def by_hand(epochs: int, optimizer: Callable[..., Any] | None = None) -> Net:
    model, criterion = Net(), nn.CrossEntropyLoss()
    steps: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps = steps if optimizer is None else optimizer(steps)
    for _ in range(epochs):
        for batch in batches(5):
            steps.zero_grad()
            criterion(model(batch.x), batch.y).backward()
            steps.step()
    return model


def same(model: nn.Module, other: nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_list_of_batches_of_any_kind_is_a_loader() -> None:
    tl = loop()
    tl.fit(num_epochs=2)
    same(tl.model, by_hand(2))
    assert len(tl.train_loader) == 5
    assert isinstance(tl.train_loader[0], Pairs)
    _, y_true, _ = tl.predict_on_validation_set()
    torch.testing.assert_close(y_true, torch.cat([batch.y for batch in batches(3)]))
    assert tl.predict_with_model(batches(4))[0].shape == (32,)
    losses = [nn.functional.cross_entropy(tl.model(batch.x), batch.y) for batch in batches(4)]
    torch.testing.assert_close(tl.evaluate_model_loss(batches(4)), torch.stack(losses).double().mean())
    with pytest.raises(ConfigurationError, match="validation_loader=100"):
        TrainLoop(Net(), None, 100, None, None, None)


@pytest.mark.parametrize("kind", [Decaying, Kept])
def test_an_optimizer_of_ones_own_steps(kind: type[Decaying]) -> None:
    tl = loop(kind)
    tl.fit(num_epochs=2)
    same(tl.model, by_hand(2, kind))
    optimizer: Any = tl.optimizer
    assert optimizer.steps == 10  # as its own attribute
    assert "Decaying" in repr(optimizer) or "Kept" in repr(optimizer)


def test_an_optimizer_of_ones_own_is_saved_and_loaded(tmp_path: Path) -> None:
    where = "project", "experiment", str(tmp_path), {}
    tl = loop(Kept)
    tl.fit(num_epochs=1, callbacks=[ModelCheckpoint(*where, cloud_save_mode=None)])
    saved = PyTorchLocalModelLoader(str(tmp_path))
    saved.load_model("project", "experiment", tl.experiment_timestamp, epoch_num=0)
    other = loop(Kept)
    saved.init_model(other.model)
    saved.init_optimizer(other.optimizer)
    other.fit(num_epochs=1)
    same(other.model, by_hand(2, Kept))

    scheduled = loop(Kept)
    scheduler = StepLRScheduler(step_size=1, gamma=0.1)
    scheduled.callbacks_handler.register_callbacks([scheduler])
    assert scheduler.scheduler.optimizer.param_groups is scheduled.optimizer.inner.inner.param_groups

    other.optimizer.load_state_dict(other.optimizer.state_dict())
    assert other.optimizer.state is other.optimizer.inner.inner.state  # anew, where loading has made another
    assert other.optimizer.param_groups is other.optimizer.inner.inner.param_groups

    twin = copy.deepcopy(other.optimizer)
    assert isinstance(twin, OwnOptimizer)
    assert twin.inner is not other.optimizer.inner
    assert twin.param_groups is twin.inner.param_groups


class Heads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        losses = {"fc": self(batch_data.x), "other": self.other(batch_data.x)}
        return MultiLoss({name: criterion(scores, batch_data.y) for name, scores in losses.items()})


def test_several_optimizers_of_ones_own() -> None:
    model, alone = Heads(), Heads()
    kinds = [Decaying, Kept]

    def optimizers(net: Any) -> list[Any]:
        parts = zip(kinds, (net.fc, net.other), strict=True)
        return [kind(torch.optim.SGD(part.parameters(), lr=1.0, momentum=0.5)) for kind, part in parts]

    both = MultiOptimizer(optimizers(model))
    TrainLoop(model, batches(5), None, None, both, nn.CrossEntropyLoss(), progress_bar=False).fit(num_epochs=2)
    steps = optimizers(alone)
    for _ in range(2):
        for batch in batches(5):
            for optimizer, part in zip(steps, (alone.fc, alone.other), strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(part(batch.x), batch.y).backward()
                optimizer.step()
    same(model, alone)

    class Counting:  # it says nothing of parameters
        done = 0

        def step(self) -> None:
            self.done += 1

        zero_grad = step

    counting = MultiOptimizer([Counting(), Counting()])
    counting.step(1, 0, torch.amp.GradScaler("cpu", enabled=False))
    counting.zero_grad(1, 0)
    assert [optimizer.done for optimizer in counting] == [0, 2]
    with pytest.raises(
        ConfigurationError, match=r"optimizer 0 of the MultiOptimizer, .*none of the model's parameters"
    ):
        TrainLoop(model, batches(5), None, None, counting, None)


def test_an_optimizer_without_state_is_no_error_but_for_checkpoints() -> None:
    checkpoint = ModelCheckpoint("project", "experiment", "unused", {}, cloud_save_mode=None)
    with pytest.raises(AttributeError, match=r"Decaying, has no state_dict\(\). Write one"):
        loop(Decaying).callbacks_handler.register_callbacks([checkpoint])
    assert loop(Decaying).optimizer.state_dict() == {}
    with pytest.raises(ConfigurationError, match="must be a torch optimizer"):
        loop(lambda _: object())


def test_a_criterion_that_can_be_moved_is_moved() -> None:
    class Weighted:  # no module
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight
            self.device: Any = None

        def to(self, device: torch.device) -> Weighted:
            moved = Weighted(self.weight.to(device))
            moved.device = device
            return moved

        def __call__(self, scores: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(scores, target, self.weight)

    for use in (lambda tl: tl.fit(num_epochs=1), lambda tl: tl.evaluate_loss_on_test_set()):
        tl = loop(end_auto_eval=False)
        tl.criterion = Weighted(torch.ones(3))
        use(tl)
        assert tl.criterion.device == tl.device


def test_callbacks_that_read_gradients_say_so() -> None:
    def layers(model: Any) -> list[nn.Module]:
        return [model.fc]

    def nothing(tl: Any) -> None:
        tl.called = True

    expected = [
        (GradNormClip(1.0), True),
        (GradientStatsPrint(layers), False),
        (GradientStatsPrint(layers, on_every_grad_update=True), True),
        (FunctionOnTrainLoop(nothing, tl_registration=True, after_optimizer_step=True), True),
        (FunctionOnTrainLoop(nothing, after_gradient_update=True), True),
        (FunctionOnTrainLoop(nothing, epoch_end=True), False),
        (FunctionOnTrainLoop(nothing), False),
    ]
    for callback, reads in expected:
        tl = loop()
        tl.callbacks_handler.register_callbacks([callback])
        assert tl.grad_cb_used is reads


def test_what_writes_files_is_made_at_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saving.PROTOCOLS, "s3", "memory")
    where = "project", "experiment", str(tmp_path), {}
    for mode, model_saver, results_saver in (
        (None, PyTorchLocalModelSaver, FullPyTorchExperimentLocalSaver),
        ("s3", PyTorchS3ModelSaver, FullPyTorchExperimentS3Saver),
    ):
        checkpoint = ModelCheckpoint(*where, cloud_save_mode=mode)
        end = ModelTrainEndSave(*where, ClassificationResultPackage(), cloud_save_mode=mode)
        assert checkpoint.model_checkpointer is end.results_saver is None
        loop(lazy_experiment_save=True).callbacks_handler.register_callbacks([checkpoint, end])
        assert type(checkpoint.model_checkpointer) is model_saver
        assert type(end.results_saver) is results_saver


def test_metrics_of_torchmetrics_are_on_the_loops_device_and_begin_anew() -> None:
    class Watched(torchmetrics.MeanMetric):  # type: ignore[misc]
        moved: Any = None

        def to(self, *args: Any, **kwargs: Any) -> Any:
            self.moved = args[0]
            return super().to(*args, **kwargs)

    package = TorchMetricsPackage(Watched())
    evaluation = ModelPerformanceEvaluation(package, {}, on_each_epoch=False, on_train_data=True)
    tl = loop()
    tl.callbacks_handler.register_callbacks([evaluation])
    metrics = [package.metric, evaluation.train_result_package.metric]
    assert [metric.moved for metric in metrics] == [tl.device] * 2
    for metric in metrics:
        metric.update(3.0)
    evaluation.on_epoch_end()  # it evaluates nothing, and forgets all the same
    assert [float(metric.mean_value) for metric in metrics] == [0.0, 0.0]


def test_a_plateau_of_another_metric_needs_no_validation_set() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parts = batches(4), None, None, optimizer, nn.CrossEntropyLoss()
    tl = TrainLoop(model, *parts, progress_bar=False)
    scheduler = ReduceLROnPlateauMetricScheduler("accumulated_loss", factor=0.1, patience=0, threshold=10.0)
    tl.fit(num_epochs=3, callbacks=[scheduler])
    assert tl.get_schedulers() == [scheduler]
    theirs = torch.optim.SGD(Net().parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.1, patience=0, threshold=10.0)
    for loss in tl.train_history["accumulated_loss"]:
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 0.5


def test_a_script_may_set_history_and_iteration() -> None:
    tl = loop(end_auto_eval=False)
    tl.train_history = TrainingHistory().wrap_pre_prepared_history({"loss": [2.0], "words": []})
    tl.insert_metric_result_into_history("words", 3)
    assert tl.train_history.train_history == {"loss": [2.0], "words": [3]}
    tl.note(grad_accumulation=2)
    due = []
    for index in range(len(tl.train_loader)):
        tl.iteration = index
        assert tl.iteration == index
        due.append(tl.should_execute_optimizer_update())
    assert due == [False, True, False, True, True]  # five batches: the last step has one


def test_the_store_keeps_results_under_short_names() -> None:
    store = ModelPredictionStore(auto_purge=True)
    store.insert_val_predictions("rows", 4)
    store.insert_val_loss(0.5, 4)
    assert store.prediction_store == {"iteration_idx": 4, "val_pred": "rows", "val_loss": 0.5}
    assert store.has_val_predictions(4)
    assert not store.has_val_predictions(5)
    with pytest.raises(ConfigurationError, match="the store has 'val_pred' for iteration 4"):
        store.insert_val_predictions("other", 4)


def test_a_callback_is_registered_once(tmp_path: Path) -> None:
    class Counting(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("counting")
            self.registered: list[Any] = []

        def on_train_loop_registration(self) -> None:
            self.registered.append(self.train_loop_obj)

    early, late = Counting(), Counting()
    tl, other = loop(), loop()
    tl.callbacks_handler.register_callbacks([early])
    for callbacks in ([late], [late], None):
        tl.fit(num_epochs=1, callbacks=callbacks)
    assert early.registered == late.registered == [tl]
    other.fit(num_epochs=1, callbacks=[late])
    assert late.registered == [tl, other]

    where = "project", "experiment", str(tmp_path)
    first = loop()
    first.fit(num_epochs=1, callbacks=[ModelCheckpoint(*where, {}, cloud_save_mode=None)])
    again = loop()
    saved = ModelLoadContinueTraining(first.experiment_timestamp, "checkpoint_model", 0, project_name=where[0])
    saved.experiment_name, saved.local_model_result_folder_path = where[1:]
    saved.cloud_save_mode = "local"
    again.fit(num_epochs=2, callbacks=[saved])
    again.fit(num_epochs=3)  # from the last epoch's number on; the first epoch's weights are not loaded again
    same(again.model, by_hand(4))


def test_parts_are_what_they_are_in_aitoolbox(tmp_path: Path) -> None:
    tl = loop()
    assert isinstance(tl.amp_scaler, torch.cuda.amp.GradScaler)
    assert not tl.amp_scaler.is_enabled()
    with pytest.raises(ConfigurationError, match="the loop creates amp_scaler"):
        tl.amp_scaler = torch.amp.GradScaler("cpu")

    clip, report = GradNormClip(1.0), GradientStatsPrint(lambda model: [model.fc])
    clip.execution_order = 3
    tl.callbacks_handler.register_callbacks([clip, report])
    hooks: list[Any] = [[] for _ in range(10)]
    hooks[1], hooks[6] = [report], [report, clip]
    assert tl.callbacks_handler.registered_cbs == hooks

    for wrapper in (TTParallelBase, TTDataParallel):
        wrapped = wrapper(Net())
        assert isinstance(wrapped, TTParallelBase)
        wrapped.note = "the model's"
        assert wrapped.module.note == "the model's"
        batch = batches(1)[0]
        loss = wrapped.get_loss(batch, nn.functional.cross_entropy, torch.device("cpu"))
        torch.testing.assert_close(loss, nn.functional.cross_entropy(Net()(batch.x), batch.y))
        assert wrapped(batch.x).shape == (8, 3)
    assert not isinstance(Net(), TTParallelBase)

    package = ClassificationResultPackage()
    package.prepare_result_package([1, 0], [1, 1], {"lr": 0.5})
    saver = LocalResultsSaver(str(tmp_path))
    (_, path), *_ = saver.save_experiment_results(package, TrainingHistory(), "p", "e", "t", save_true_pred_labels=True)
    content = pickle.loads(Path(path).read_bytes())
    place = ["experiment_name", "experiment_results_local_path"]
    assert list(content) == ["y_true", "y_predicted", *place, "results", "hyperparameters", "training_history"]


def test_a_script_may_write_its_own_loader_and_savers(tmp_path: Path) -> None:
    """By the base classes of AIToolbox's modules, from which those here come too."""
    local_load = import_module("aitoolbox.experiment.local_load.local_model_load")
    first = loop()
    first.fit(num_epochs=1, callbacks=[ModelCheckpoint("p", "e", str(tmp_path), {}, cloud_save_mode=None)])

    class Halved(local_load.PyTorchLocalModelLoader):  # type: ignore[misc, name-defined]  # as a script sees it
        def init_model(self, model: Any, used_data_parallel: bool = False) -> Any:
            super().init_model(model, used_data_parallel)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            return model

    assert issubclass(Halved, local_load.AbstractLocalModelLoader)
    second = loop()
    where = {"project_name": "p", "experiment_name": "e", "local_model_result_folder_path": str(tmp_path)}
    load = ModelLoadContinueTraining(
        first.experiment_timestamp,
        "checkpoint_model",
        0,
        custom_local_loader_class=Halved,
        cloud_save_mode=None,
        **where,
    )
    load.cloud_save_mode = "local"
    second.callbacks_handler.register_callbacks([load])
    torch.testing.assert_close(second.model.fc.weight, first.model.fc.weight / 2)

    for module, name, other in (
        ("local_save.local_model_save", "AbstractLocalModelSaver", PyTorchLocalModelSaver),
        ("local_save.local_results_save", "AbstractLocalResultsSaver", LocalResultsSaver),
        ("experiment_saver", "AbstractExperimentSaver", FullPyTorchExperimentS3Saver),
    ):
        base = getattr(import_module(f"aitoolbox.experiment.{module}"), name)
        assert issubclass(other, base)
        with pytest.raises(TypeError, match="abstract"):
            base()
    reporting = import_module("aitoolbox.experiment.result_reporting.report_generator")
    history = TrainingHistory().wrap_pre_prepared_history({"loss": [2.0, 1.0]})
    writer = reporting.TrainingHistoryWriter(str(tmp_path))
    _, path = writer.generate_report(history, epoch=1, file_name="results.txt", results_folder_name="reports")
    assert "loss:\t1.0" in Path(path).read_text()
    saver = LocalResultsSaver(str(tmp_path))
    saver.file_format = "yaml"
    with pytest.raises(ConfigurationError, match="file_format='yaml': must be one of pickle, json"):
        saver.save_file({}, "x", str(tmp_path / "x"))
