"""Buffers that get_loss changes: alike on all ranks as in one process, or a warning or an error names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from trainloop import AbstractCallback, TrainLoop, TTBasicModel, TTModel
from trainloop.errors import WorkerFailedError

pytestmark = pytest.mark.long


class Bank(TTModel):
    """Keeps the last output of each sample."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gathers = gathers
        self.body, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("bank", torch.zeros(12, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, index = batch_data
        out = self.body(x)
        loss = (out - self.bank[index]).square().mean() + 0 * self(x).sum()
        if self.training:
            new = (out.detach(), index)
            rows, places = self.all_gather(new, concat=True) if self.gathers else new
            self.bank[places] = rows
            self.steps += 1
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0]), None, {}


def trained(gathers: bool, mode: str, size: int) -> dict[str, Tensor]:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    model = Bank(gathers)
    ranks: dict[str, Any] = {} if mode == "single" else {"accelerator": "cpu", "devices": 2}
    loader = DataLoader(TensorDataset(x, torch.arange(12)), size)
    sgd = optim.SGD(model.parameters(), 0.1)
    TrainLoop(model, loader, optimizer=sgd, gpu_mode=mode, progress_bar=False, **ranks).fit(2)
    return {name: value for name, value in model.state_dict().items() if "norm" not in name}


def test_changes_that_differ_are_warned_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ("ddp", "fsdp"):
        trained(False, mode, 2)
        assert capfd.readouterr().err.count("get_loss has changed bank differently on each rank") == 1


def test_changes_that_are_alike_are_those_of_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    whole = trained(True, "single", 4)
    for mode in ("ddp", "fsdp"):
        torch.testing.assert_close(trained(True, mode, 2), whole)
    assert "get_loss has changed" not in capfd.readouterr().err


class Spiking(TTBasicModel):
    """Keeps a state with a row for each sample of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 1)
        self.register_buffer("state", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.body(x)).detach()
        return self.body(x) + self.state


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_a_buffer_with_another_shape_on_another_rank_is_an_error() -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def loss_in(mode: str, size: int, ignored: Sequence[str] = (), **kwargs: Any) -> list[float]:
        model, ranks = Spiking(), {} if mode == "single" else {"accelerator": "cpu", "devices": 2}
        loop = TrainLoop(
            model, DataLoader(data, size), DataLoader(data, 5), None, optim.SGD(model.parameters(), 0.1),
            nn.MSELoss(), gpu_mode=mode, progress_bar=False, **ranks,
        )  # fmt: skip
        model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        loop.fit(2, **kwargs)  # ranks have evaluated batches of 5 and of 2 samples before the second epoch
        return loop.history["loss"]

    for mode in ("ddp", "fsdp"):
        with pytest.raises(
            WorkerFailedError, match=r"the buffer state has shape \(\d, 1\) on rank 0, but \(\d, 1\) on"
        ):
            loss_in(mode, 2)
    assert loss_in("ddp", 2, ddp_model_args={"broadcast_buffers": False}) == pytest.approx(loss_in("single", 4))
    assert loss_in("ddp", 4, ignored=["state"]) == pytest.approx(loss_in("single", 8))  # a step of 8, and one of 4


class Meter:
    """A plain object that adds up numbers."""

    def __init__(self) -> None:
        self.total, self.numbers, self.generator = 0.0, iter(range(100)), torch.Generator()


class Counting(TTBasicModel):
    """Adds up numbers in attributes: of this rank's samples, and of steps, which are the same on all ranks."""

    carried_state = {"hidden": 0}

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.body = nn.Linear(3, 1)
        self.meter, self.metric, self.seen, self.sum = Meter(), MeanMetric(), {"large": 0}, torch.zeros(())
        self.steps, self.hidden, self.features = 0, torch.zeros(2), None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.features = self.hidden = x.detach()[:, 0]
            values = self.all_gather(x, concat=True) if self.gathers else x
            self.meter.total += float(values.sum())
            if next(self.meter.numbers) % 2:  # as a rank without samples in the last step
                torch.rand(1 + dist.get_rank(), generator=self.meter.generator)
            self.metric.update(values)
            self.seen["large"] += int(values.abs().sum() * 1000)
            self.sum += values.sum()
        return self.body(x)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_attributes_that_come_back_with_one_ranks_values_are_named(mode: str, capfd: Any) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    for gathers in (False, True):
        model = Counting(gathers)
        sgd = optim.SGD(model.parameters(), 0.1)
        loop = cpu_loop(
            model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2), sgd, nn.MSELoss(), gpu_mode=mode, devices=2
        )
        loop.fit(1)
        warned = " ".join(capfd.readouterr().err.split())
        names = "meter.total, seen, sum, metric.mean_value"
        assert f"changed the attributes {names} differently" in warned or gathers
        assert warned.count("of one rank only") == (not gathers)


class Dropping(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.body = nn.Dropout(0.2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.drop(x))


class OnRank0(AbstractCallback):
    """Changes how the model computes, but on rank 0 only; or on all ranks."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__("on rank 0")
        self.everywhere = everywhere

    def on_epoch_begin(self) -> None:
        model = self.train_loop_obj.model
        if self.everywhere or self.train_loop_obj.is_global_zero:
            model.drop.p = 0.1 + model.drop.p
            model.drop.eval()


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_modes_and_settings_of_layers_that_one_rank_changes_are_named(mode: str, capfd: Any) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    for everywhere in (False, True):
        model = Dropping()
        sgd = optim.SGD(model.parameters(), 0.1)
        loop = cpu_loop(
            model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2), sgd, nn.MSELoss(), gpu_mode=mode, devices=2
        )
        loop.fit(2, callbacks=[OnRank0(everywhere)])
        warned = " ".join(capfd.readouterr().err.split())
        assert warned.count("the modules drop (Dropout) are in training mode on some ranks") == (not everywhere)
        assert warned.count("changed the attributes drop.p differently") == (not everywhere)
