"""Optimizers, schedules and averages that are more than SGD and Adam, and compiled models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import TensorDataset
from torchao.optim import AdamW8bit
from world import Entry, Parts, in_all_modes, loaders, plain, randint, randn, steps

from trainloop import MultiOptimizer, TTBasicModel, TTModel
from trainloop.callbacks import AbstractCallback, ExponentialMovingAverage, LRScheduler

TRAIN, HELD_OUT = 37, 11

pytestmark = pytest.mark.filterwarnings("ignore:LRScheduler. the schedule ends after")


class Net(TTBasicModel):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(dtype: torch.dtype = torch.float64) -> tuple[TensorDataset, TensorDataset]:
    return tuple(TensorDataset(randn(n, 8, seed=n, dtype=dtype), randint(3, n, seed=n)) for n in (TRAIN, HELD_OUT))  # type: ignore[return-value]


def net_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def parts_of(
    model: Any, make_optimizer: Callable[..., Any], batch: int, shuffle: bool, *callbacks: AbstractCallback
) -> Parts:
    dtype = next(p.dtype for p in model.parameters())
    return Parts(
        model,
        optimizer=make_optimizer(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        callbacks=list(callbacks),
        **loaders(*data(dtype), batch, shuffle),
    )


momentum = partial(optim.SGD, lr=0.1, momentum=0.9)

# -- sparse embeddings -------------------------------------------------------------------------------------------------


class Bag(TTModel):
    """A sparse embedding with an optimizer of its own, and dense layers with another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))

    get_loss = Net.get_loss
    get_predictions = Net.get_predictions


def make_sparse(batch: int, shuffle: bool) -> Parts:
    model = Bag().double()
    optimizer = MultiOptimizer(
        [optim.SparseAdam(model.embedding.parameters(), lr=0.01), optim.Adam(model.head.parameters(), lr=0.01)]
    )
    words, held_out = (TensorDataset(randint(50, n, 4), randint(3, n)) for n in (TRAIN, HELD_OUT))
    return Parts(
        model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **loaders(words, held_out, batch, shuffle)
    )


def sparse_by_hand(parts: Parts, epochs: int) -> None:
    for x, y in steps(parts, epochs):
        F.cross_entropy(parts.model(x), y).backward()
        for optimizer in parts.optimizer:
            optimizer.step()
            optimizer.zero_grad()


# -- schedules ---------------------------------------------------------------------------------------------------------


def make_one_cycle(batch: int, shuffle: bool) -> Parts:
    schedule = LRScheduler(lr_scheduler.OneCycleLR, interval="step", max_lr=0.1, total_steps=12)
    return parts_of(Net().double(), momentum, batch, shuffle, schedule)


def one_cycle_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = lr_scheduler.OneCycleLR(parts.optimizer, max_lr=0.1, total_steps=12)
    for batch in steps(parts, epochs):
        parts.optimizer.zero_grad()
        net_loss(parts.model, batch).backward()
        parts.optimizer.step()
        scheduler.step()


def sequence(optimizer: optim.Optimizer) -> lr_scheduler.SequentialLR:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)],
        milestones=[3],
    )


def make_sequential(batch: int, shuffle: bool) -> Parts:
    return parts_of(Net().double(), momentum, batch, shuffle, LRScheduler(sequence, interval="step"))


def sequential_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = sequence(parts.optimizer)
    for batch in steps(parts, epochs):
        parts.optimizer.zero_grad()
        net_loss(parts.model, batch).backward()
        parts.optimizer.step()
        scheduler.step()


def make_plateau(batch: int, shuffle: bool) -> Parts:
    """By the training loss; with so large a threshold, a step's rate is cut each epoch but the first."""
    schedule = LRScheduler(lr_scheduler.ReduceLROnPlateau, monitor="loss", patience=0, threshold=0.9)
    return parts_of(Net().double(), momentum, batch, shuffle, schedule)


def plateau_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(parts.optimizer, patience=0, threshold=0.9)
    for _ in range(epochs):
        parts.model.train()
        total = 0.0
        for batch in parts.train:
            parts.optimizer.zero_grad()
            loss = net_loss(parts.model, batch)
            loss.backward()
            parts.optimizer.step()
            total += loss.item() * len(batch[0])
        scheduler.step(total / TRAIN)


# -- averages ----------------------------------------------------------------------------------------------------------


def make_ema(batch: int, shuffle: bool) -> Parts:
    return parts_of(Net().double(), momentum, batch, shuffle, ExponentialMovingAverage(decay=0.9))


def ema_by_hand(parts: Parts, epochs: int) -> None:
    average = swa_utils.AveragedModel(parts.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in steps(parts, epochs):
        parts.optimizer.zero_grad()
        net_loss(parts.model, batch).backward()
        parts.optimizer.step()
        average.update_parameters(parts.model)
    parts.model.load_state_dict(average.module.state_dict())


class Swa(AbstractCallback):
    """The recipe of torch.optim.swa_utils: the average and its schedule from the second epoch on; used at the end."""

    def __init__(self) -> None:
        super().__init__("Swa")
        self.average: Any = None
        self.schedule: Any = None

    def on_train_begin(self) -> None:
        self.average = swa_utils.AveragedModel(self.train_loop_obj.model)
        self.schedule = swa_utils.SWALR(self.train_loop_obj.optimizer, swa_lr=0.05, anneal_epochs=2)

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch >= 1:
            self.average.update_parameters(self.train_loop_obj.model)
            self.schedule.step()

    def on_train_end(self) -> None:
        self.train_loop_obj.model.load_state_dict(self.average.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average.load_state_dict(state_dict["average"])
        self.schedule.load_state_dict(state_dict["schedule"])


def make_swa(batch: int, shuffle: bool) -> Parts:
    return parts_of(Net().double(), momentum, batch, shuffle, Swa())


def swa_by_hand(parts: Parts, epochs: int) -> None:
    average = swa_utils.AveragedModel(parts.model)
    schedule = swa_utils.SWALR(parts.optimizer, swa_lr=0.05, anneal_epochs=2)
    for epoch in range(epochs):
        parts.model.train()
        for batch in parts.train:
            parts.optimizer.zero_grad()
            net_loss(parts.model, batch).backward()
            parts.optimizer.step()
        if epoch >= 1:
            average.update_parameters(parts.model)
            schedule.step()
    parts.model.load_state_dict(average.module.state_dict())


# -- schedule-free -----------------------------------------------------------------------------------------------------


class ScheduleFreeModes(AbstractCallback):
    """The optimizer holds two points: where gradients are taken, and the average that is evaluated and kept."""

    def __init__(self) -> None:
        super().__init__("ScheduleFreeModes", execution_order=-100)
        self.was_training = True

    def on_epoch_begin(self) -> None:
        self.train_loop_obj.optimizer.train()

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.was_training = self.train_loop_obj.optimizer.param_groups[0]["train_mode"]
        self.train_loop_obj.optimizer.eval()

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        if self.was_training:
            self.train_loop_obj.optimizer.train()

    def on_train_end(self) -> None:
        self.train_loop_obj.optimizer.eval()


def make_schedule_free(batch: int, shuffle: bool) -> Parts:
    make = partial(AdamWScheduleFree, lr=0.01, warmup_steps=3, foreach=False)
    return parts_of(Net().double(), make, batch, shuffle, ScheduleFreeModes())


def schedule_free_by_hand(parts: Parts, epochs: int) -> None:
    parts.optimizer.train()
    for batch in steps(parts, epochs):
        parts.optimizer.zero_grad()
        net_loss(parts.model, batch).backward()
        parts.optimizer.step()
    parts.optimizer.eval()


# -- low-bit optimizers, compiled models -------------------------------------------------------------------------------


def make_8bit(batch: int, shuffle: bool) -> Parts:
    """Wide enough for 8 bits: torchao quantizes the state of tensors from 4096 elements on."""
    return parts_of(Net(width=512), partial(AdamW8bit, lr=0.01), batch, shuffle)


def make_compiled(batch: int, shuffle: bool) -> Parts:
    """Layers that the user compiled; eager's graph, so that bits can be compared."""
    model = Net().double()
    model.layers = torch.compile(model.layers, backend="aot_eager", dynamic=True)
    return parts_of(model, momentum, batch, shuffle)


def make_net(batch: int, shuffle: bool) -> Parts:
    return parts_of(Net().double(), momentum, batch, shuffle)


test_single, test_ddp = in_all_modes(
    Entry("SparseAdam", make_sparse, sparse_by_hand),
    Entry("OneCycleLR", make_one_cycle, one_cycle_by_hand),
    Entry("SequentialLR", make_sequential, sequential_by_hand),
    Entry("ReduceLROnPlateau", make_plateau, plateau_by_hand, epochs=3),
    Entry("EMA", make_ema, ema_by_hand),
    Entry("SWA", make_swa, swa_by_hand, epochs=3),
    Entry("schedule-free", make_schedule_free, schedule_free_by_hand),
    Entry("torchao AdamW8bit", make_8bit, plain(net_loss), tolerance=1e-5),
    Entry("compiled layers", make_compiled, plain(net_loss)),
    Entry("compile=", make_net, plain(net_loss), loop={"compile": {"backend": "aot_eager", "dynamic": True}}),
)
