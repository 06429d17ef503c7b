"""Random data, samplers, losses, optimizers, schedules and lengths: each mode gives the numbers of ``single``.

A failing test names its seed; ``draw`` shows the combination.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import ExponentialMovingAverage, LRScheduler, ModelCheckpoint
from trainloop.optim.optimizers import optimizers_of


class Rows(Dataset[Any]):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


class Net(TTModel):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.other = nn.Linear(5, 1).double()

    def forward(self, batch: Any) -> Tensor:
        return self.layers(self.parts(batch)[0])

    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch

    def other_loss(self, batch_data: Any) -> Tensor:
        x, y = self.parts(batch_data)
        return (self.other(x).squeeze(1) - y).square().mean()

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if self.config["losses"] == "two at once":
            return MultiLoss({"main": self.main_loss(batch_data, criterion), "other": self.other_loss(batch_data)})
        return self.main_loss(batch_data, criterion)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return self.main_loss(batch_data, criterion)

    def main_loss(self, batch_data: Any, criterion: Any) -> Any:
        y_pred, y = self(batch_data), self.parts(batch_data)[1]
        self.log("accuracy", (y_pred.argmax(1) == y).double().mean())
        self.log("samples", float(len(y)), reduce="sum")
        if self.config["loss"] != "weighted":
            return criterion(y_pred, y)
        weights = (y + 1).double()
        return (nn.functional.cross_entropy(y_pred, y, reduction="none") * weights).sum() / weights.sum(), weights.sum()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data), self.parts(batch_data)[1], {}


class Yields(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield "main", self.main_loss(batch_data, criterion)
        yield "other", self.other_loss(batch_data) + self(batch_data).detach().square().mean()


class EvaluatesInHook(AbstractCallback):
    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step % 2 == 0:
            self.train_loop_obj.log("in_hook", self.train_loop_obj.evaluate_loss_on_test_set())


class EndsEpochs(AbstractCallback):
    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step % 5 == 2:
            self.train_loop_obj.end_epoch()


DATA = ("tensors", "rows", "subset", "concatenated", "stream")
SAMPLERS = ("in order", "shuffled", "its own generator", "weighted", "weighted, its own generator", "with replacement")
CRITERIA: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "classes": {"weight": torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)},
    "weighted": {},
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def draw(seed: int) -> dict[str, Any]:
    """The combination of a seed."""
    r = random.Random(seed)
    losses = r.choice(["one", "one", "two at once", "two in turn"])
    return {
        "mode": r.choice(["ddp", "ddp", "fsdp", "dp"]),
        "ranks": r.choice([2, 2, 3]),
        "rows": [r.randint(4, 40), r.randint(2, 30), r.randint(2, 12)],
        "data": [r.choice(DATA) for _ in range(3)],
        "sampler": [r.choice(SAMPLERS) for _ in range(3)],
        "batch_size": [r.randint(1, 4), r.randint(1, 8), r.randint(1, 5)],
        "workers": r.choice([0, 0, 0, 1, 2]),
        "losses": losses,
        # The other loss is a mean over samples, and MultiLoss takes no weights.
        "loss": r.choice(list(CRITERIA) if losses == "one" else ["mean", "classes"]),
        "optimizer": r.choice(list(OPTIMIZERS)),
        "schedule": r.choice([None, "step", "epoch", "plateau"]),
        "callbacks": r.sample(["average", "hook", "ends"], r.randint(0, 2)),
        "clip": r.choice([None, 0.3]),
        "accumulation": r.choice([1, 1, 2, 3]),
        "evaluated": r.choice([True, True, 2]),
        "length": r.choice([{"num_epochs": 2}, {"num_epochs": 3}, {"num_iterations": r.randint(1, 12)}]),
        "checkpoint": r.random(),
    }


def loader_of(config: dict[str, Any], which: int, ranks: int) -> DataLoader[Any]:
    rows = Rows(config["rows"][which])
    data: Any = {
        "tensors": lambda: TensorDataset(rows.x, rows.y),
        "rows": lambda: rows,
        "subset": lambda: Subset(rows, range(len(rows) - 1, -1, -1)),
        "concatenated": lambda: ConcatDataset([rows, rows]),
        "stream": lambda: Stream(rows),
    }[config["data"][which]]()
    options: dict[str, Any] = {"batch_size": config["batch_size"][which] * ranks, "num_workers": config["workers"]}
    if isinstance(data, Stream):
        return DataLoader(data, **options)
    generator = torch.Generator().manual_seed(which)
    weights = torch.rand(len(data), generator=generator)
    sampler = config["sampler"][which]
    if sampler.startswith("weighted"):
        own = generator if "generator" in sampler else None
        return DataLoader(data, sampler=WeightedRandomSampler(weights, len(data), generator=own), **options)
    if sampler == "with replacement":
        return DataLoader(data, sampler=RandomSampler(data, replacement=True), **options)
    own = generator if sampler == "its own generator" else None
    return DataLoader(data, shuffle=sampler != "in order", generator=own, **options)


def make_loop(config: dict[str, Any], mode: str) -> TrainLoop:
    torch.manual_seed(0)
    model = (Yields if config["losses"] == "two in turn" else Net)(config)
    ranks, make = config["ranks"], OPTIMIZERS[config["optimizer"]]
    if config["losses"] == "one":
        model.other.requires_grad_(False)
        optimizer = make(model.layers.parameters())
    else:
        optimizer = MultiOptimizer({"main": make(model.layers.parameters()), "other": make(model.other.parameters())})
    alone = 1 if mode in ("ddp", "fsdp") else ranks  # the other modes read whole global batches
    loaders = [loader_of(config, which, alone if which == 0 else 1) for which in range(3)]
    criterion = nn.CrossEntropyLoss(**CRITERIA[config["loss"]])
    return loop_in_mode(config, mode, model, *loaders, optimizer, criterion, seed=3)


def loop_in_mode(config: dict[str, Any], mode: Any, *parts: Any, seed: int) -> TrainLoop:
    """A loop of a model, its three loaders, an optimizer and a criterion, in one of a combination's modes."""
    return TrainLoop(
        *parts,
        end_auto_eval=config["evaluated"],
        gpu_mode=mode,
        accelerator="cpu",
        devices=1 if mode == "single" else config["ranks"],
        seed=seed,
        gradient_clip_norm=config["clip"],
        progress_bar=False,
    )


def fit(loop: TrainLoop, config: dict[str, Any], *more: AbstractCallback, **arguments: Any) -> None:
    callbacks: list[AbstractCallback] = [*more]
    optimizer = next(iter(optimizers_of(loop.optimizer)))
    if config["schedule"] == "plateau" and config["evaluated"] is True and "num_epochs" in config["length"]:
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        callbacks.append(LRScheduler(plateau, monitor="val_loss"))
    elif config["schedule"] in ("step", "epoch"):
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.7)
        callbacks.append(LRScheduler(schedule, interval=config["schedule"]))
    if "average" in config["callbacks"]:
        callbacks.append(ExponentialMovingAverage(0.8, evaluate=True))
    if "hook" in config["callbacks"]:
        callbacks.append(EvaluatesInHook())
    if "ends" in config["callbacks"]:
        callbacks.append(EndsEpochs())
    loop.fit(callbacks=callbacks, grad_accumulation=config["accumulation"], **config["length"], **arguments)


def numbers(loop: TrainLoop) -> dict[str, Any]:
    return {**loop.history.to_dict(), **{name: value.tolist() for name, value in loop.model.state_dict().items()}}


def check(ours: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(ours[name], values, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:devices=3 on 2 CPU cores", "ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit")
@pytest.mark.parametrize("seed", range(200))
def test_a_mode_equals_single(seed: int, tmp_path: Path) -> None:
    """Also in a second fit, in predictions, and bit by bit in a run that is resumed."""
    config = draw(seed)
    alone, loop = make_loop(config, "single"), make_loop(config, config["mode"])
    keeper = ModelCheckpoint(tmp_path, every_n_steps=2, keep=None)
    with loop.ranks():
        fit(loop, config, keeper)
        first = numbers(loop)
        fit(loop, config)
        loss, rows = loop.evaluate_loss_on_test_set(), loop.predict_on_validation_set()
    fit(alone, config)
    check(first, numbers(alone), 1e-9)
    fit(alone, config)
    check(numbers(loop), numbers(alone), 1e-9)
    assert loss == pytest.approx(alone.evaluate_loss_on_test_set(), rel=1e-9)
    for part, expected in zip(rows[:2], alone.predict_on_validation_set()[:2], strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-9)
    written = sorted(path for path in tmp_path.iterdir() if path.name.startswith("checkpoint"))
    again = make_loop(config, config["mode"])
    fit(again, config, resume_from=written[int(config["checkpoint"] * len(written))])
    check(numbers(again), first, 0)
