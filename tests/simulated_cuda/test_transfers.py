"""What a step makes the host wait for, and copies to and from the device: counted by the simulated runtime."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakegpu
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop._metrics import LateRead
from trainloop.callbacks import GradientStats, LearningRateMonitor, LRScheduler, TensorBoard
from trainloop.train_loop.progress import display

pytestmark = pytest.mark.gpu

KINDS = ("synchronisations", "to device", "to host")
# For statistics of torch's, the first ten steps of DistributedDataParallel wait for the device, and each hundredth.
FIRST, STEPS = 80, 10


class Counts(AbstractCallback):
    """Of ten steps in the midst of an epoch, on rank 0."""

    def __init__(self) -> None:
        super().__init__("counts")
        self.found: dict[str, float] = {}

    def on_batch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.total_iteration_idx % loop.grad_accumulation == 0 and loop.global_step in (FIRST, FIRST + STEPS):
            for kind in KINDS:
                self.found[kind] = fakegpu.count(kind) - self.found.get(kind, 0)


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
        self.head = nn.Linear(3, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        y_pred = self.head(self.layers(x))
        self.log("accuracy", (y_pred.argmax(1) == y).float().mean())
        self.log("norm", x.norm(), prog_bar=True)
        return criterion(y_pred, y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.layers(batch_data[0]).argmax(1), batch_data[1], {}


class Weighted(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device), (batch_data[1] + 1).sum()


class TwoLosses(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        return MultiLoss({"a": loss, "b": 2 * loss}, {"a": 0, "b": 1})


def adam(model: Net) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def sgd(model: Net) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def two(model: Net) -> MultiOptimizer:
    return MultiOptimizer(
        [optim.SGD(model.layers.parameters(), lr=0.1), optim.Adam(model.head.parameters(), fused=True)]
    )


@pytest.mark.parametrize(
    "model_class, optimizer_of, options, accumulation",
    [
        pytest.param(Net, sgd, {}, 1, id="plain"),
        pytest.param(Net, adam, {"use_amp": "bf16", "gradient_clip_norm": 1.0}, 1, id="bf16 and clipping"),
        pytest.param(Weighted, adam, {"gradient_clip_norm": 1.0}, 3, id="weights and accumulation"),
        pytest.param(TwoLosses, two, {}, 1, id="two optimizers"),
        pytest.param(Net, adam, {"gpu_mode": "dp", "devices": 1}, 1, id="dp of one"),
        pytest.param(Net, sgd, {"gpu_mode": "ddp", "devices": 2, "gradient_clip_norm": 1.0}, 1, id="ddp"),
        pytest.param(Weighted, adam, {"gpu_mode": "ddp", "devices": 2, "use_amp": "bf16"}, 2, id="ddp, accumulation"),
        pytest.param(TwoLosses, two, {"gpu_mode": "ddp", "devices": 2}, 1, id="ddp, two optimizers"),
    ],
)
def test_a_step_copies_its_batch_and_waits_for_nothing(
    model_class: type[Net],
    optimizer_of: Callable[[Any], Any],
    options: dict[str, Any],
    accumulation: int,
    tmp_path: Path,
) -> None:
    """With logs, a schedule and TensorBoard between two of its writes: two tensors a batch go there, nothing comes."""
    x, y = make_data().tensors
    data = TensorDataset(x.repeat(70, 1), y.repeat(70))
    model = model_class()
    optimizer = optimizer_of(model)
    loop = TrainLoop(
        model,
        DataLoader(data, 16, pin_memory=True),
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        **{"accelerator": "cuda", "progress_bar": False, **options},
    )
    schedule = LRScheduler(lr_scheduler.ExponentialLR, "step", gamma=0.99, optimizer_idx=0)
    callbacks = [schedule, LearningRateMonitor(), GradientStats(), TensorBoard(tmp_path, 60), counts := Counts()]
    loop.fit(num_epochs=1, callbacks=callbacks, grad_accumulation=accumulation)
    a_step = {kind: found / STEPS for kind, found in counts.found.items()}
    assert a_step == {"synchronisations": 0, "to device": 2 * accumulation, "to host": 0}


def test_the_progress_bar_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is drawn after each step here, with the values of the step before or of an earlier one."""
    monkeypatch.setattr(display, "REDRAW_S", 0.0)
    monkeypatch.setattr(display, "has_screen", lambda: True)
    x, y = make_data().tensors
    model = Net()
    loop = TrainLoop(
        model,
        DataLoader(TensorDataset(x.repeat(20, 1), y.repeat(20)), 16, pin_memory=True),
        optimizer=sgd(model),
        criterion=nn.CrossEntropyLoss(),
        accelerator="cuda",
    )
    loop.fit(num_epochs=1, callbacks=[counts := Counts()])
    # Two numbers arrive in pinned memory.
    assert {kind: found / STEPS for kind, found in counts.found.items() if kind != "to host"} == {
        "synchronisations": 0,
        "to device": 2,
    }
    assert re.search(r"loss=\d.*, norm=\d", capsys.readouterr().err)


def test_numbers_that_are_read_late_are_those_of_an_earlier_call() -> None:
    read, loss = LateRead(), torch.zeros((), device="cuda")
    assert read({"loss": loss, "cpu": torch.tensor(7.0), "number": 2.0}) == {"cpu": 7, "number": 2}
    torch.cuda.synchronize()
    loss.fill_(5)
    assert read({"loss": loss}) == {"loss": 0}
    torch.cuda._sleep(300_000_000)
    torch.cuda.synchronize()
    assert read({"loss": loss}) == {"loss": 5}


class Conversions(TorchDispatchMode):
    """Count conversions of one number to another dtype: each is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        converts = func is torch.ops.aten._to_copy.default and args[0].is_cuda and not args[0].ndim
        self.count += converts and args[0].dtype is torch.float64
        return func(*args, **(kwargs or {}))


def test_the_factor_of_gradients_is_converted_once_a_step() -> None:
    model = Net()
    loop = TrainLoop(
        model,
        DataLoader(TensorDataset(*(t[:96] for t in make_data().tensors)), 16),
        optimizer=sgd(model),
        criterion=nn.CrossEntropyLoss(),
        accelerator="cuda",
        progress_bar=False,
    )
    with Conversions() as found:
        loop.fit(num_epochs=1, grad_accumulation=2)
    steps, micro_batches = 3, 6
    assert found.count <= steps + micro_batches  # for the factor, and for each loss


def test_a_hand_written_step_that_waits_is_counted() -> None:
    """The counter sees what the loop's steps are free of."""
    model, device = Net().cuda(), torch.device("cuda")
    optimizer, before = sgd(model), {kind: fakegpu.count(kind) for kind in KINDS}
    for batch in DataLoader(make_data(), 16, drop_last=True):
        loss: Tensor = model.get_loss([t.to(device) for t in batch], nn.CrossEntropyLoss(), device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    found = {kind: fakegpu.count(kind) - count for kind, count in before.items()}
    assert found == {"synchronisations": 18, "to device": 12, "to host": 6}
