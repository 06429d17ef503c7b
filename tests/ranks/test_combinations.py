"""Random combinations of data, losses, optimizers, schedules and callbacks: all modes agree, and a resumed run, too.

The reference is the mode ``single`` with a batch as large as that of all ranks. A seed always gives the same
combination; ``python tests/ranks/test_combinations.py 100 200`` tries other seeds.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from trainloop import MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientStats,
    LearningRateMonitor,
    LRScheduler,
    ModelCheckpoint,
    ModelPerformanceEvaluation,
    StochasticWeightAveraging,
    TerminateOnNaN,
)

FEATURES, CLASSES = 6, 3
RANKS = {"dp 2": 2, "ddp 2": 2, "ddp 3": 3, "fsdp 2": 2}
SEEDS = range(16)
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit"),
    pytest.mark.filterwarnings(r"ignore:devices=\d on"),
    pytest.mark.filterwarnings("ignore:.*[Tt]he schedule ends"),
]

DATA = ("in order", "shuffled", "workers", "weighted", "batch sampler", "stream", "concatenated")
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "RMSprop": lambda p: optim.RMSprop(p, 0.001),
}
SCHEDULES: dict[str, Any] = {
    "steps": (lr_scheduler.ExponentialLR, {"interval": "step", "gamma": 0.97}),
    "epochs": (lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5}),
    "plateau": (lr_scheduler.ReduceLROnPlateau, {"monitor": "loss", "patience": 0}),
    "warmup": (lr_scheduler.LinearLR, {"interval": "step", "start_factor": 0.1, "total_iters": 4}),
}
CALLBACKS: dict[str, Any] = {
    "EMA": lambda: ExponentialMovingAverage(0.9),
    "SWA": lambda: StochasticWeightAveraging(swa_lr=0.02, start=1, anneal_epochs=1),
    "norms": lambda: GradientStats(2),
    "early stopping": lambda: EarlyStopping("loss", patience=5),
    "NaN": TerminateOnNaN,
    "metric": lambda: ModelPerformanceEvaluation({"size": size_of}),
    "rates": lambda: LearningRateMonitor(1),
}


class Combination(NamedTuple):
    target: str
    loss: str
    norm: bool
    frozen: bool
    penalty: bool
    samples: int
    batch: int
    accumulation: int
    optimizer: str
    clip: float | None
    data: str
    schedule: str | None
    callbacks: tuple[str, ...]
    num_iterations: int | None
    evaluates: bool | int
    fits: int
    saves: dict[str, Any]
    dicts: bool
    recomputes: bool


def size_of(y_pred: Tensor, y_true: Any, metadata: Any) -> float:
    return float(y_pred.abs().mean())


def combination(seed: int) -> Combination:
    draw = random.Random(seed)
    target = draw.choice(["numbers", "classes", "weighted", "ignored"])
    one = Combination(
        target=target,
        # A class loss beside another one would have two divisors.
        loss=draw.choice(["plain", "weight", "parts", "parts"] if target == "numbers" else ["plain"]),
        norm=draw.random() < 0.5,
        frozen=draw.random() < 0.2,
        penalty=draw.random() < 0.2,
        samples=draw.choice([13, 20, 23, 24, 31]),
        batch=draw.choice([1, 3, 4, 5, 8]),
        accumulation=draw.choice([1, 1, 2, 3]),
        optimizer=draw.choice([*OPTIMIZERS, "two"]),
        clip=draw.choice([None, None, 0.5]),
        data=draw.choice(DATA),
        schedule=draw.choice([None, *SCHEDULES]),
        callbacks=tuple(draw.sample(list(CALLBACKS), draw.choice([0, 1, 2, 3]))),
        num_iterations=7 if draw.random() < 0.2 else None,
        evaluates=draw.choice([True, True, 2, False]),
        fits=draw.choice([1, 1, 2]),
        saves=draw.choice([{"every_n_epochs": 1}, {"every_n_epochs": None, "every_n_steps": draw.choice([2, 3, 5])}]),
        dicts=draw.random() < 0.3,
        recomputes=draw.random() < 0.2,
    )
    if one.optimizer == "two":  # which needs a loss for each
        one = one._replace(target="numbers", loss="parts", schedule=None if one.schedule == "plateau" else one.schedule)
    if "SWA" in one.callbacks:  # it sets the rates, and counts epochs
        one = one._replace(callbacks=("SWA",), schedule=None, num_iterations=None)
    if not one.evaluates:
        one = one._replace(callbacks=tuple(name for name in one.callbacks if name != "metric"))
    return one


class Rows(Dataset[Any]):
    def __init__(self, length: int, of: Combination) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = (self.x @ torch.arange(float(FEATURES)))[:, None]
        if of.target != "numbers":
            self.y = self.x[:, :CLASSES].argmax(1)
        if of.target == "ignored":
            self.y[::7] = -100
        self.dicts = of.dicts

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return {"x": self.x[i], "y": self.y[i]} if self.dicts else (self.x[i], self.y[i])


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(len(self.rows)))


class Net(TTModel):
    def __init__(self, of: Combination) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.of = of
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8) if of.norm else nn.Identity(), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 1 if of.target == "numbers" else CLASSES)
        self.body[0].weight.requires_grad_(not of.frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data.values() if isinstance(batch_data, dict) else batch_data
        x.requires_grad_(self.of.penalty and torch.is_grad_enabled())
        output = self(x)
        loss = criterion(output, y)
        self.log("size", output.detach().abs().mean())
        self.log("largest", output.detach().max(), reduce="max")
        if self.of.loss == "weight":
            return loss, len(x)
        if self.of.loss == "parts":
            parts = {"fit": loss, "size": 0.1 * output.square().mean()}
            return MultiLoss(parts, {"fit": 0, "size": 1} if self.of.optimizer == "two" else None)
        if x.requires_grad and self.of.target == "numbers":
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return loss + 0.01 * gradient.square().sum(1).mean()
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data.values() if isinstance(batch_data, dict) else batch_data
        return self(x), y, {}


def loader_of(of: Combination, batch: int) -> DataLoader[Any]:
    rows, generator = Rows(of.samples, of), torch.Generator().manual_seed(3)
    if of.data == "weighted":
        weights = torch.arange(1.0, of.samples + 1)
        return DataLoader(rows, batch, sampler=WeightedRandomSampler(weights.tolist(), of.samples, generator=generator))
    if of.data == "batch sampler":
        return DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows, generator=generator), batch, False))
    if of.data == "stream":
        return DataLoader(Stream(rows), batch)
    if of.data == "concatenated":
        both: Any = ConcatDataset([Subset(rows, range(5)), Subset(rows, range(5, of.samples))])
        return DataLoader(both, batch, shuffle=True)
    return DataLoader(rows, batch, shuffle=of.data != "in order", num_workers=2 if of.data == "workers" else 0)


def loop_of(of: Combination, mode: str, factor: int = 1) -> TrainLoop:
    model = Net(of)
    if of.optimizer == "two":
        body = [*model.body.parameters(), *model.blocks.parameters()]
        optimizer: Any = MultiOptimizer([optim.SGD(body, 0.05), optim.Adam(model.head.parameters(), 0.01)])
    else:
        optimizer = OPTIMIZERS[of.optimizer](model.parameters())
    weight = torch.tensor([1.0, 2.0, 0.5]) if of.target == "weighted" else None
    gpu_mode, _, ranks = mode.partition(" ")
    return TrainLoop(
        model,
        loader_of(of, of.batch * factor),
        DataLoader(Rows(11, of), 4),
        None,
        optimizer,
        nn.MSELoss() if of.target == "numbers" else nn.CrossEntropyLoss(weight),
        seed=7,
        progress_bar=False,
        gradient_clip_norm=of.clip,
        end_auto_eval=of.evaluates,
        checkpoint_modules=[nn.Tanh] if of.recomputes else None,
        gpu_mode=gpu_mode,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=int(ranks or 1),
    )


def fit(loop: TrainLoop, of: Combination, *, folder: Path | None = None, resume_from: Path | None = None) -> None:
    callbacks = [CALLBACKS[name]() for name in of.callbacks]
    if of.schedule:
        scheduler, arguments = SCHEDULES[of.schedule]
        which: dict[str, Any] = {"optimizer_idx": 0} if of.optimizer == "two" else {}
        callbacks.append(LRScheduler(scheduler, **arguments, **which))
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, keep=None, **of.saves))
    length: dict[str, Any] = {"num_iterations": of.num_iterations} if of.num_iterations else {"num_epochs": 3}
    loop.fit(**length, grad_accumulation=of.accumulation, callbacks=callbacks, resume_from=resume_from)


def outcome(loop: TrainLoop) -> dict[str, Tensor]:
    """Weights, all values of the history, and the rows of predictions."""
    rows, *_ = loop.predict_with_model(loop.validation_loader)
    found = {f"weights {name}": p.detach() for name, p in loop.model.named_parameters()}
    found |= {f"history {name}": torch.tensor(list(values)) for name, values in loop.history.items()}
    return {**found, "rows": torch.as_tensor(rows)}


def check(of: Combination, modes: list[str], folder: Path) -> None:
    draw = random.Random(repr(of))
    references: dict[int, dict[str, Tensor]] = {}
    for mode in ["single", *modes]:
        factor = RANKS[mode] if mode in RANKS and mode != "dp 2" else 1
        loop = loop_of(of, mode)
        for i in range(of.fits):
            fit(loop, of, folder=folder / mode / str(i))
        found = outcome(loop)
        if factor not in references:
            whole = loop_of(of, "single", factor)
            for _ in range(of.fits):
                fit(whole, of)
            references[factor] = outcome(whole)
        assert_close(found, references[factor], mode, 1e-8)
        saved = sorted((folder / mode / "0").glob("*.pt"))[:-1]
        if saved and of.fits == 1:
            again = loop_of(of, mode)
            fit(again, of, resume_from=draw.choice(saved))
            assert_close(outcome(again), found, f"{mode}, resumed", 0 if mode in ("single", "dp 2") else 1e-10)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], where: str, tolerance: float) -> None:
    assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
    for name, value in found.items():
        try:
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{where}, {name}: {error}") from None


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_modes_and_resumed_runs_agree(seed: int, float64: None, tmp_path: Path) -> None:
    modes = random.Random(seed).sample(list(RANKS), 2)
    check(combination(seed), modes, tmp_path)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as where:
            try:
                check(combination(number), list(RANKS), Path(where))
            except Exception as error:
                print(number, combination(number), f"\n{type(error).__name__}: {error}", flush=True)
            else:
                print(number, "agrees", flush=True)
