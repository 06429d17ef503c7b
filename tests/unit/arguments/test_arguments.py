"""Arguments that can't work: each is an error that says what was given and what to do, before any process starts."""

from __future__ import annotations

import functools
import inspect
import multiprocessing.process
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from conftest import make_data
from trainloop import AbstractCallback, ModelWrap, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.errors import CheckpointError, ConfigurationError, DeviceError
from trainloop.train_loop.arguments.checks import check_restarts

# The last argument of torch's DDP that is a flag.
NEWEST_FLAG = [
    one.name
    for one in inspect.signature(nn.parallel.DistributedDataParallel).parameters.values()
    if isinstance(one.default, bool)
][-1]


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Detached(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device).detach()


class CarriesOver(Net):
    """Adds a part of an earlier batch's graph."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.total = super().get_loss(batch_data, criterion, device) + getattr(self, "total", 0.0)
        return self.total


class CallsBackward(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        loss.backward()
        return loss


class MadePairs(Net):
    """Returns two where three belong."""

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return tuple(part for part in (self(x), y))


class Calls(Net):
    """Calls the criterion itself."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self(batch_data[0]), batch_data[1])


class Short(Net):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        y_pred, y_true, metadata = super().get_predictions(batch_data, device)
        return y_pred[:3], y_true, metadata


def make(**changed: Any) -> TrainLoop:
    """A loop that works, with these arguments changed."""
    model = changed.pop("model", None) or Net()
    arguments: dict[str, Any] = {
        "train_loader": DataLoader(make_data(), batch_size=16),
        "optimizer": optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else None,
        "criterion": nn.CrossEntropyLoss(),
        "progress_bar": False,
        "accelerator": "cpu",
        **changed,
    }
    return TrainLoop(model, arguments.pop("train_loader"), **arguments)


def fit(changed: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return make(**(changed or {})).fit(**{"num_epochs": 1, **arguments})


def fit_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        fit()


def fit_in_a_mode() -> None:
    with FlopCounterMode(display=False):
        fit({"gpu_mode": "ddp", "devices": 2})


def fit_in_hooks() -> None:
    with torch.autograd.graph.save_on_cpu():
        fit({"gpu_mode": "fsdp", "devices": 2})


def other_optimizer() -> optim.Optimizer:
    return optim.SGD(Net().parameters(), lr=0.1)


# What is called, and the words that its message must hold: the argument, the value given, the way out.
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    # the loop
    "model is no TTModel": (lambda: make(model=nn.Linear(2, 2)), ["Linear", "ModelWrap"]),
    "model is a class": (lambda: make(model=Net), ["Net"]),
    "model is text": (lambda: make(model="net"), ["'net'"]),
    "train_loader is a dataset": (
        lambda: make(train_loader=make_data()),
        ["train_loader", "TensorDataset", "DataLoader"],
    ),
    "inserted value is text": (
        lambda: make().insert_metric_result_into_history("f1", "0.5"),  # type: ignore[arg-type]
        ["insert_metric_result_into_history('f1', ...): value='0.5'", "must be a number"],
    ),
    "inserted name is no text": (
        lambda: make().insert_metric_result_into_history(3, 0.5),  # type: ignore[arg-type]
        ["insert_metric_result_into_history(3, ...)", "non-empty string"],
    ),
    "end_training without a callback": (
        lambda: make().end_training("enough"),  # type: ignore[arg-type]
        ["tl.end_training('enough', ...)", "tl.early_stop = True"],
    ),
    "dataset_info is no dict": (
        lambda: make().predict_with_model(DataLoader(make_data()), dataset_info="test"),  # type: ignore[arg-type]
        ["predict_with_model: dataset_info='test'", "must be a dict"],
    ),
    "data_loader is a dataset": (
        lambda: make().predict_with_model(make_data()),
        ["data_loader is a TensorDataset", "DataLoader(dataset, batch_size=32)"],
    ),
    "get_predictions returned two": (
        lambda: make(model=MadePairs()).predict_with_model(DataLoader(make_data(), batch_size=16)),
        ["get_predictions returned a tuple of length 2", "Return (y_pred, y_true, metadata)"],
    ),
    "accelerator is a device": (lambda: make(accelerator="cuda:1"), ["Did you mean accelerator='cuda', devices=[1]?"]),
    "accelerator is a torch.device": (
        lambda: make(accelerator=torch.device("cpu")),
        ["accelerator='cpu'?"],
    ),
    "devices is a device": (lambda: make(devices="cpu"), ["devices='cpu'", "Did you mean accelerator='cpu'"]),
    "devices are devices": (
        lambda: make(devices=["cuda:0", "cuda:2"]),
        ["accelerator='cuda', devices=[0, 2]?"],
    ),
    "train_loader is an array": (
        lambda: make(train_loader=np.ones((16, 8))),
        ["train_loader is a ndarray", "DataLoader(dataset"],
    ),
    "train_loader is a set": (lambda: make(train_loader={1, 2}), ["train_loader is a set", "DataLoader(dataset"]),
    "compile with an unknown argument": (
        lambda: make(compile={"mod": "default"}, gpu_mode="ddp"),
        ["compile={'mod': 'default'}", "torch.compile can't use", "'mod'"],
    ),
    "compile with an unknown mode": (
        lambda: make(compile={"mode": "fastest"}, gpu_mode="ddp"),
        ["compile={'mode': 'fastest'}", "torch.compile can't use"],
    ),
    "a dimension of text in dp": (
        lambda: fit({"gpu_mode": "dp", "devices": 2}, dp_model_args={"dim": "rows"}),
        ["dim='rows'", "must be an int"],
    ),
    "train_loader is a list": (lambda: make(train_loader=[1, 2]), ["train_loader is a list with 1,", "DataLoader"]),
    "validation_loader is a number": (lambda: make(validation_loader=3), ["validation_loader", "3"]),
    "test_loader is text": (lambda: make(test_loader="test"), ["test_loader", "'test'"]),
    "optimizer is a class": (lambda: make(optimizer=optim.SGD), ["optimizer", "SGD"]),
    "optimizer is text": (lambda: make(optimizer="sgd"), ["optimizer", "'sgd'"]),
    "criterion is a class": (lambda: make(criterion=nn.CrossEntropyLoss), ["criterion", "CrossEntropyLoss()"]),
    "no criterion": (lambda: fit({"criterion": None}), ["Net.get_loss", "TrainLoop(criterion="]),
    "ranks within a mode": (fit_in_a_mode, ["within _FlopCounterMode", "on_train_begin"]),
    "fit within autocast": (fit_in_autocast, ["within torch.autocast", "use_amp='bf16'"]),
    "a loss of each sample": (
        lambda: fit({"criterion": nn.CrossEntropyLoss(reduction="none")}),
        ["get_loss", "(16,)", ".mean()"],
    ),
    "a graph of an earlier batch": (
        lambda: fit({"model": CarriesOver()}),
        ["graph of an earlier batch", "detach() it"],
    ),
    "backward in get_loss": (lambda: fit({"model": CallsBackward()}), ["get_loss itself has called backward()"]),
    "a loss without a graph": (lambda: fit({"model": Detached()}), ["get_loss", ".detach()"]),
    "fewer predictions than targets": (
        lambda: make(model=Short()).predict_with_model(DataLoader(make_data(), batch_size=16)),
        ["get_predictions", "batch of 16 samples, y_pred has 3 rows, y_true has 16 rows"],
    ),
    "optimizer of another model": (lambda: fit({"optimizer": other_optimizer()}), ["optimizer", "parameters"]),
    "gpu_mode in capitals": (lambda: make(gpu_mode="DDP"), ["gpu_mode='DDP'", "'single', 'dp', 'ddp'"]),
    "gpu_mode is None": (lambda: make(gpu_mode=None), ["gpu_mode=None"]),
    "gpu_mode not offered": (lambda: make(gpu_mode="deepspeed"), ["deepspeed", "gpu_mode='fsdp'"]),
    "gpu_mode of old": (lambda: make(gpu_mode="ddp2"), ["ddp2", "'ddp'"]),
    "accelerator unknown": (lambda: make(accelerator="tpu"), ["tpu", "cpu"]),
    "accelerator is a number": (lambda: make(accelerator=1), ["accelerator", "1"]),
    "devices=0": (lambda: make(gpu_mode="ddp", devices=0), ["0"]),
    "devices negative": (lambda: make(gpu_mode="ddp", devices=-2), ["-2"]),
    "devices is a bool": (lambda: make(gpu_mode="ddp", devices=True), ["True"]),
    "devices is a float": (lambda: make(gpu_mode="ddp", devices=2.0), ["2.0"]),
    "devices is text that is no number": (lambda: make(gpu_mode="ddp", devices="two"), ["two"]),
    "devices a list on the CPU": (lambda: make(gpu_mode="ddp", devices=[0, 1]), ["[0, 1]"]),
    "several devices in single": (lambda: make(gpu_mode="single", devices=2), ["devices=2", "ddp"]),
    "use_amp unknown": (lambda: make(use_amp="fp8"), ["use_amp", "fp8", "bf16"]),
    "use_amp is a number": (lambda: make(use_amp=16), ["use_amp", "16"]),
    "use_amp with a scale of text": (
        lambda: make(use_amp={"init_scale": "a"}),
        ["use_amp: init_scale='a'", "above 0"],
    ),
    "use_amp with no scale": (lambda: make(use_amp={"init_scale": 0.0}), ["use_amp: init_scale=0.0", "above 0"]),
    "use_amp that never grows": (
        lambda: make(use_amp={"growth_factor": 0.5}),
        ["use_amp", "growth factor must be > 1"],
    ),
    "use_amp with an interval of text": (
        lambda: make(use_amp={"growth_interval": "x"}),
        ["use_amp: growth_interval='x'", "int of 1 or more"],
    ),
    "use_amp with an unknown option": (lambda: make(use_amp={"init_scales": 2.0}), ["use_amp", "init_scales"]),
    "end_auto_eval negative": (lambda: make(end_auto_eval=-1), ["end_auto_eval", "-1"]),
    "end_auto_eval is text": (lambda: make(end_auto_eval="yes"), ["end_auto_eval", "'yes'"]),
    "gradient_clip_norm zero": (lambda: make(gradient_clip_norm=0), ["gradient_clip_norm", "0"]),
    "gradient_clip_norm negative": (lambda: make(gradient_clip_norm=-1.0), ["gradient_clip_norm", "-1.0"]),
    "gradient_clip_norm is text": (lambda: make(gradient_clip_norm="1"), ["gradient_clip_norm", "'1'"]),
    "seed is text": (lambda: make(seed="0"), ["seed", "'0'"]),
    "seed is a float": (lambda: make(seed=1.5), ["seed", "1.5"]),
    "seed is a bool": (lambda: make(seed=True), ["seed", "True"]),
    "timeout zero": (lambda: make(timeout=0), ["timeout", "0"]),
    "timeout is text": (lambda: make(timeout="30m"), ["timeout", "'30m'"]),
    "resources is a number": (lambda: make(resources=4), ["resources", "4", "ResourceQuota"]),
    "several validation loaders": (
        lambda: TrainLoop(Net(), [], {"a": DataLoader([1.0]), "b": DataLoader([2.0])}),
        ["validation_loader", "dict of loaders", "tl.evaluate(loader)"],
    ),
    "several training loaders": (
        lambda: TrainLoop(Net(), [DataLoader([1.0]), DataLoader([2.0])]),
        ["train_loader", "list of loaders", "ConcatDataset"],
    ),
    # arguments in another library's order
    "optimizer and criterion fourth and fifth": (
        lambda: TrainLoop(Net(), [], [], other_optimizer(), nn.CrossEntropyLoss()),
        [
            "test_loader=SGD(...)",
            "optimizer=... and criterion=... by name",
            "the fourth argument is test_loader",
        ],
    ),
    "several optimizers fourth": (
        lambda: TrainLoop(Net(), [], [], MultiOptimizer([other_optimizer()])),
        ["test_loader=MultiOptimizer(...)", "by name"],
    ),
    "criterion fourth": (
        lambda: TrainLoop(Net(), [], [], nn.MSELoss()),
        ["test_loader=MSELoss()", "criterion=..."],
    ),
    "a function as the criterion": (
        lambda: TrainLoop(Net(), [], nn.functional.mse_loss),
        ["validation_loader=<function mse_loss", "criterion=..."],
    ),
    "model after the loader": (
        lambda: TrainLoop(DataLoader(make_data()), Net()),
        ["model=<torch", "TrainLoop(model, train_loader"],
    ),
    "model twice": (
        lambda: TrainLoop(Net(), nn.Sequential(Net())),
        ["train_loader=Sequential(...)", "TrainLoop(model"],
    ),
    "criterion and optimizer exchanged": (
        lambda: make(optimizer=nn.Sequential(Net(), Net())),
        ["optimizer=Sequential(...):"],
    ),
    "evaluation of the optimizer": (
        lambda: make().evaluate_model_loss(other_optimizer()),
        ["data_loader=SGD(...): must be a torch DataLoader."],
    ),
    # fit
    "nothing gathered in a mode that does not shard": (lambda: fit(gather=False), ["gather=False", "single", "fsdp"]),
    "neither epochs nor iterations": (lambda: fit(num_epochs=0), ["num_epochs", "num_iterations"]),
    "both epochs and iterations": (lambda: fit(num_iterations=5), ["num_epochs", "num_iterations"]),
    "num_epochs negative": (
        lambda: fit(num_epochs=-1),
        ["num_epochs=-1", "One of num_epochs and num_iterations must be positive"],
    ),
    "callbacks in num_iterations' place": (
        lambda: make().fit(1, [AbstractCallback("one")]),
        ["num_iterations=[", "callbacks=[...]"],
    ),
    "a callback in num_epochs' place": (
        lambda: make().fit(AbstractCallback("one")),
        ["num_epochs=", "callbacks=[...]"],
    ),
    "num_epochs is a float": (lambda: fit(num_epochs=2.5), ["num_epochs", "2.5"]),
    "num_epochs is a bool": (lambda: fit(num_epochs=True), ["num_epochs", "True"]),
    "num_iterations is text": (lambda: fit(num_epochs=0, num_iterations="9"), ["num_iterations", "'9'"]),
    "grad_accumulation zero": (lambda: fit(grad_accumulation=0), ["grad_accumulation", "0"]),
    "grad_accumulation is a float": (lambda: fit(grad_accumulation=2.0), ["grad_accumulation", "2.0"]),
    "callbacks is one callback": (lambda: fit(callbacks=AbstractCallback("one")), ["callbacks", "list"]),
    "callbacks holds a class": (lambda: fit(callbacks=[AbstractCallback]), ["callbacks", "AbstractCallback"]),
    "callbacks holds a scheduler": (
        lambda: fit(callbacks=[optim.lr_scheduler.StepLR(optim.SGD(Net().parameters()), 1)]),
        ["callbacks[0]=", "trainloop.callbacks.LRScheduler(scheduler)"],
    ),
    "optim": (lambda: make(optim=None), ["Did you mean optimizer=, with a MultiOptimizer([...]) for"]),
    "callbacks holds text": (lambda: fit(callbacks=["early stopping"]), ["callbacks", "early stopping"]),
    "fit without train_loader": (lambda: fit({"train_loader": None}), ["train_loader"]),
    "no batch is left for two ranks": (
        lambda: fit(
            {"train_loader": DataLoader(make_data(), len(make_data()), drop_last=True), "gpu_mode": "ddp", "devices": 2}
        ),
        ["train_loader", "drop_last=True", "one global batch takes", "drop_last=False"],
    ),
    "fit without optimizer": (lambda: fit({"optimizer": None}), ["optimizer"]),
    "num_nodes zero": (lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes=0), ["num_nodes", "0"]),
    "num_nodes is text": (lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes="2"), ["num_nodes", "'2'"]),
    "num_nodes is a bool": (lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes=True), ["num_nodes", "True"]),
    "node_rank too large": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes=2, node_rank=2),
        ["node_rank", "2", "num_nodes"],
    ),
    "node_rank negative": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes=2, node_rank=-1),
        ["node_rank", "-1"],
    ),
    "several nodes in single": (lambda: fit(num_nodes=2), ["num_nodes", "ddp"]),
    "several nodes in dp": (lambda: fit({"gpu_mode": "dp", "devices": 2}, num_nodes=2), ["num_nodes", "ddp"]),
    "synchronised BatchNorm in dp": (
        lambda: fit({"gpu_mode": "dp", "devices": 2, "sync_batchnorm": True}),
        ["sync_batchnorm", "ddp"],
    ),
    "several nodes and no rendezvous point": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, num_nodes=2, node_rank=1),
        ["MASTER_ADDR", "init_method"],
    ),
    "num_gpus negative": (lambda: fit({"gpu_mode": "ddp"}, num_gpus=-3), ["num_gpus", "-3"]),
    "num_gpus on the CPU": (
        lambda: fit({"gpu_mode": "ddp"}, num_gpus=2, on_gpu=False),
        ["num_gpus=2", "on_gpu=False", "accelerator='cpu', devices=2"],
    ),
    "on_gpu on the CPU": (
        lambda: fit({"accelerator": "cpu"}, on_gpu=True),
        ["on_gpu=True", "accelerator='cpu'", "leave on_gpu out"],
    ),
    "num_gpus is text": (lambda: fit({"gpu_mode": "ddp"}, num_gpus="two"), ["num_gpus", "two"]),
    "ddp_model_args no mapping": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args=["find_unused_parameters"]),
        ["ddp_model_args", "list"],
    ),
    "ddp_model_args unknown": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args={"find_unused": True}),
        ["ddp_model_args", "find_unused"],
    ),
    "ddp_model_args with a bucket of text": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args={"bucket_cap_mb": "x"}),
        ["ddp_model_args", "bucket_cap_mb='x'", "MiB"],
    ),
    "ddp_model_args with a bucket below nothing": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args={"bucket_cap_mb": -1}),
        ["ddp_model_args", "bucket_cap_mb=-1", "MiB"],
    ),
    "ddp_model_args with a flag of text": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args={"find_unused_parameters": "False"}),
        ["ddp_model_args", "find_unused_parameters='False'", "True or False"],
    ),
    "ddp_model_args with a newer flag of text": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, ddp_model_args={NEWEST_FLAG: "no"}),
        ["ddp_model_args", f"{NEWEST_FLAG}='no'", "True or False"],
    ),
    "dp_model_args unknown": (
        lambda: fit({"gpu_mode": "dp", "devices": 2}, dp_model_args={"dimension": 1}),
        ["dp_model_args", "dimension"],
    ),
    "backend unknown": (lambda: fit({"gpu_mode": "ddp", "devices": 2}, backend="glue"), ["backend", "glue"]),
    "backend of GPUs on the CPU": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, backend="nccl"),
        ["backend='nccl'", "gloo on the CPU"],
    ),
    "backend for GPUs only on the CPU": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, backend="cuda:gloo"),
        ["backend='cuda:gloo'", "ranks on cpu", "Leave backend out"],
    ),
    "backend that this torch lacks": (
        lambda: fit({"gpu_mode": "ddp", "devices": 2}, backend="cpu:mpi,cuda:nccl"),
        ["backend='cpu:mpi,cuda:nccl'", "without mpi", "gloo on the CPU"],
    ),
    "resume_from last without a ModelCheckpoint": (lambda: fit(resume_from="last"), ["resume_from", "ModelCheckpoint"]),
    "resume_from is a number": (lambda: fit(resume_from=3), ["resume_from=3", "'last'", "path"]),
    "resume_from is a bool": (lambda: fit(resume_from=True), ["resume_from=True", "'last'", "path"]),
    "resume_from is a list": (lambda: fit(resume_from=["a"]), ["resume_from=['a']", "'last'", "path"]),
    "resume_from is bytes": (lambda: fit(resume_from=b"x"), ["resume_from=b'x'", "'last'", "path"]),
    "resume_from is empty": (lambda: fit(resume_from=""), ["resume_from=''", "'last'", "path"]),
    "in_process_data_load no callbacks": (lambda: fit(in_process_data_load="x"), ["in_process_data_load"]),
    # prediction and evaluation
    "predict without the loader": (lambda: make().predict_on_test_set(), ["test_loader", "TrainLoop(test_loader="]),
    "evaluate without the loader": (lambda: make().evaluate_loss_on_validation_set(), ["validation_loader"]),
    "evaluate without a criterion's loader": (lambda: make().evaluate_model_loss(3), ["3"]),
}
if TorchVersion(torch.__version__) >= TorchVersion("2.8"):  # an older torch can't be asked for its hooks
    CASES["ranks within hooks"] = (fit_in_hooks, ["within saved_tensors_hooks", "on_train_begin"])


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a process was started before the arguments were checked")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", started)
    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments_are_configuration_errors(case: str, no_process: None) -> None:
    call, words = CASES[case]
    with pytest.raises(ConfigurationError) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert len(message) > 30, message  # long enough to say what to do


@pytest.mark.parametrize("mode", ["single", "dp"])
def test_a_call_of_no_criterion_says_that_there_is_none(mode: str) -> None:
    devices = {"gpu_mode": mode, "devices": 2} if mode == "dp" else {}
    loader = DataLoader(make_data(), batch_size=16)
    loop = make(model=Calls(), criterion=None, **devices)
    for call in (lambda: loop.fit(1), lambda: loop.evaluate_model_loss(loader)):
        with pytest.raises(
            TypeError, match=r"(?s)'NoneType' object is not callable.*criterion=None.*TrainLoop\(criter"
        ):
            call()

    class CallsAnother(Calls):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            nothing: Any = None
            return nothing(batch_data)

    # Other calls of None are not about it.
    with pytest.raises(TypeError, match="not callable") as caught:
        fit({"model": CallsAnother()})
    assert "criterion" not in str(caught.value)


def with_methods(**methods: Any) -> type[Net]:
    return type("Other", (Net,), methods)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("get_loss", lambda self, batch, batch_idx: self(batch[0]).sum()),
        ("get_loss", lambda self, batch: self(batch[0]).sum()),
        ("get_loss", lambda self, model, batch, criterion, device: criterion(model(batch[0]), batch[1])),
        ("get_loss", staticmethod(lambda self, batch, criterion, device: criterion(self(batch[0]), batch[1]))),
        ("get_loss", lambda self, batch, criterion, device, *, scale: scale * criterion(self(batch[0]), batch[1])),
        ("get_loss_eval", lambda self, batch, device: self(batch[0]).sum()),
        ("get_predictions", lambda self, batch, batch_idx, dataloader_idx: (self(batch[0]).exp(), None, {})),
        ("get_predictions", lambda self, batch: (self(batch[0]).exp(), None, {})),
    ],
)
def test_methods_that_can_not_be_called_as_the_loop_does(name: str, wrong: Any, no_process: None) -> None:
    arguments = "batch_data, device" if name == "get_predictions" else "batch_data, criterion, device"
    with pytest.raises(ConfigurationError) as caught:
        make(model=with_methods(**{name: wrong})(), gpu_mode="ddp", devices=2)
    message = str(caught.value)
    assert f"Other.{name} takes (" in message
    assert f"{name}(self, {arguments})" in message


def test_methods_that_may_be_called() -> None:
    def unpacked(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, batch_data: Any, criterion: Any, device: Any) -> Any:
            return method(self, *batch_data, criterion)

        return wrapper

    class Feed:
        def get_loss(self, model: Any, batch_data: Any, criterion: Any, device: Any) -> Any:
            return criterion(model(batch_data[0]), batch_data[1])

        def get_predictions(self, model: Any, *rest: Any) -> Any:
            return model(rest[0][0]), rest[0][1], {}

    def keeps_defaults(self: Any, batch: Any, criterion: Any = None, device: Any = None, extra: int = 1) -> Any:
        return criterion(self(batch[0]), batch[1]) * extra

    kinds: list[Any] = [
        with_methods(get_loss=unpacked(lambda self, x, y, criterion: criterion(self(x), y)))(),
        with_methods(get_loss=keeps_defaults)(),
        with_methods(get_loss=lambda self, *args: args[1](self(args[0][0]), args[0][1]))(),
        with_methods(get_loss=mock.Mock(side_effect=lambda batch, *_: torch.zeros((), requires_grad=True)))(),
        ModelWrap(Net(), Feed()),
    ]

    bound = Net()
    bound.get_loss = functools.partial(lambda net, batch, criterion, device: criterion(net(batch[0]), batch[1]), bound)
    kinds.append(bound)
    for model in kinds:
        assert fit({"model": model}) is model
    with pytest.raises(
        ConfigurationError, match=r"Feed.get_loss takes .* get_loss\(self, model, batch_data, criterion"
    ):
        feed = type("Feed", (Feed,), {"get_loss": lambda self, batch, criterion, device: criterion(batch)})
        make(model=ModelWrap(Net(), feed()))


def test_a_misspelt_argument_is_one_of_the_class_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"TrainLoop\(\) got an unexpected keyword argument 'gpumode'"):
        make(gpumode="ddp")


@pytest.mark.parametrize("devices", [0, -2, True, 2.0, "two", [0, 1]])
def test_wrong_devices_are_device_errors(devices: Any, no_process: None) -> None:
    with pytest.raises(DeviceError):
        make(gpu_mode="ddp", devices=devices)


@pytest.mark.parametrize("mode", ["single", "dp", "ddp"])
def test_on_gpu_where_there_is_none(mode: str, no_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for more in ({}, {"num_gpus": 0}):
        with pytest.raises(DeviceError, match=r"on_gpu=True: no GPU is visible here\. Leave on_gpu out"):
            fit({"gpu_mode": mode, "accelerator": "auto"}, on_gpu=True, **more)


def test_arguments_for_ranks_that_one_process_has_no_use_for() -> None:
    """A script may pass the same in all modes; and a scaler's arguments that can work are taken."""
    for scale in (3, 0.1, 1000.0, 49.0, np.float32(0.7), 2.0**100):
        make(use_amp={"init_scale": scale})
    loop = make(use_amp={"init_scale": 2, "growth_interval": np.int64(5)})
    flags = {"find_unused_parameters": np.True_, "static_graph": 0, "bucket_cap_mb": 0.5, "broadcast_buffers": None}
    loop.fit(1, backend="nccl", ddp_model_args=flags)
    assert loop.global_step == 7


def test_a_checkpoint_that_is_not_there_is_a_checkpoint_error(no_process: None) -> None:
    with pytest.raises(CheckpointError, match="/nowhere/at/all"):
        fit(resume_from="/nowhere/at/all")


@pytest.mark.parametrize("whole", [np.int64, np.uint8, torch.tensor, np.array], ids=lambda kind: kind.__name__)
def test_whole_numbers_of_other_libraries(whole: Any) -> None:
    """Each argument that is an int takes what stands for one, and hands on an int: it goes into checkpoints."""
    loop = make(
        gpu_mode="dp", devices=whole(2), seed=whole(3), end_auto_eval=whole(1), timeout=np.float32(60),
        gradient_clip_norm=np.float32(0.5),
    )  # fmt: skip
    loop.fit(whole(1), whole(0), grad_accumulation=whole(2), num_nodes=whole(1), node_rank=whole(0))
    assert loop.global_step == 4
    loop.fit(num_iterations=whole(2))
    assert loop.global_step == 6
    kept = [loop.seed, loop.end_auto_eval, loop.num_epochs, loop.num_iterations, loop.grad_accumulation]
    kept += [loop.options.devices, loop.run_config.num_nodes, loop.run_config.node_rank]
    restarts = check_restarts(whole(4), whole(7), 1)
    kept += [restarts.most, restarts.every] if restarts is not None else []
    assert kept == [3, 1, 0, 2, 1, 2, 1, 0, 4, 7]
    assert {type(value) for value in kept} == {int}


@pytest.mark.parametrize(
    "wrong", [np.True_, torch.tensor(True), np.float64(1), torch.tensor([1, 2]), torch.tensor(1.0)]
)
def test_what_stands_for_no_int(wrong: Any) -> None:
    for arguments in ({"num_epochs": wrong}, {"grad_accumulation": wrong}, {"node_rank": wrong}, {"num_nodes": wrong}):
        with pytest.raises(ConfigurationError, match=rf"{next(iter(arguments))}=.*must be an int"):
            fit(**arguments)
    with pytest.raises(ConfigurationError, match=r"seed=.*must be an int"):
        make(seed=wrong)


def test_the_loop_that_the_cases_change_works() -> None:
    loop = make()
    assert loop.fit(num_epochs=1) is loop.model


def test_fsdp_on_the_cpu_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cu124"))
    with pytest.raises(ConfigurationError, match=r"^gpu_mode='fsdp' on the CPU: PyTorch 2\.6\.0\+cu124 supports it on"):
        fit({"gpu_mode": "fsdp", "devices": 2, "accelerator": "cpu"})


def test_restarts_over_several_hosts_belong_to_a_launcher() -> None:
    with pytest.raises(ConfigurationError, match=r"max_restarts=1 with num_nodes=2: .* torchrun --max-restarts"):
        check_restarts(1, None, 2)
