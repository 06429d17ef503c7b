"""Checkpoints of a real loop, in this process: what is in them, where they go on, and what they refuse."""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import signal
import warnings
from collections import UserDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small_loop
from kit.checkpoints import same
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel, TTModel, checkpoint
from trainloop.__main__ import main
from trainloop.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    LearningRateMonitor,
    LRScheduler,
    ModelCheckpoint,
    TerminateOnNaN,
    ThresholdEarlyStopping,
)
from trainloop.callbacks.base import Saver
from trainloop.data import SplitBatches
from trainloop.data.loader import generators
from trainloop.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*by its name, (lower|higher) is better")


class Net(TTModel):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.Linear(width, 3))
        self._rows: list[list[float]] = []

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        if self.training:
            self._rows.append(x[:, 0].tolist())
        return criterion(self.layers(x), y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        x, y = batch_data
        return self.layers(x), y, {}


class StopAfter(Saver):
    """Raise after so many optimizer steps, after ModelCheckpoint's turn: the nearest to a kill in one process."""

    def __init__(self, steps: int) -> None:
        super().__init__(execution_order=5000)
        self.steps = steps

    def save_due(self) -> None:
        if self.train_loop_obj.global_step == self.steps:
            raise InterruptedError


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data())


class OnAndOn(Stream):
    """A stream whose next epoch begins where the one before ended, and which says where that is."""

    at = 0

    def __iter__(self) -> Any:
        data = make_data()
        for at in range(self.at + 1, self.at - self.at % 45 + 46):
            self.at = at
            yield data[self.at % len(data)]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled(BatchSampler):
    """A batch sampler of the user's own, which draws from torch's global generator."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Any:
        order = torch.randperm(101).tolist()
        return (order[i : i + 10] for i in range(0, 101, 10))

    def __len__(self) -> int:
        return 11


class Several(BatchSampler):
    """A batch sampler of the user's own, which takes turns between samplers, by generators in a dict."""

    def __init__(self) -> None:
        self.samplers = [RandomSampler(range(101), generator=torch.Generator().manual_seed(i)) for i in range(2)]
        self.last = Own(np.random.default_rng(2))
        self.draws = {"turn": random.Random(3)}

    def __iter__(self) -> Any:
        orders = [list(sampler) for sampler in (*self.samplers, self.last)]
        return (self.draws["turn"].choice(orders)[i : i + 10] for i in range(0, 101, 10))

    def __len__(self) -> int:
        return 11


class InOtherContainers(Several):
    def __init__(self) -> None:
        super().__init__()
        self.samplers, self.draws = deque(self.samplers), UserDict(self.draws)  # type: ignore[assignment]


class Mixed:
    """A loader of the user's own, which mixes the batches of two loaders by a generator of its own."""

    def __init__(self, data: Any) -> None:
        self.first = DataLoader(data, 20, shuffle=True, generator=torch.Generator().manual_seed(5))
        self.others = [DataLoader(data, 21, sampler=Own(np.random.default_rng(2)))]
        self.rng = random.Random(3)

    def __iter__(self) -> Any:
        batches = [*self.first, *self.others[0]]
        self.rng.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 11


class Own:
    """A sampler of the user's own, with a generator of its own: of Python, numpy or torch."""

    def __init__(self, generator: Any) -> None:
        self.rng = generator

    def __iter__(self) -> Any:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(101, generator=self.rng).tolist())
        order = list(range(101))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 101


class Passes(Own):
    """A sampler that counts its passes, and reports the count and its generator."""

    def __init__(self) -> None:
        super().__init__(random.Random(3))
        self.passes = np.zeros(1, dtype=np.int64)

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([(i + int(self.passes[0])) % 101 for i in super().__iter__()])

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "rng": self.rng.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes[:] = state["passes"]
        self.rng.setstate(state["rng"])


GENERATORS: dict[str, Any] = {
    "Python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


def with_generator(**arguments: Any) -> Any:
    return lambda data: DataLoader(data, 10, generator=torch.Generator().manual_seed(5), **arguments)


LOADERS: dict[str, Any] = {
    "sequential": lambda data: DataLoader(data, 10),
    "shuffled": lambda data: DataLoader(data, 10, shuffle=True),
    "shuffled, its own generator": with_generator(shuffle=True),
    "drop_last": lambda data: DataLoader(data, 10, shuffle=True, drop_last=True),
    "with replacement": lambda data: DataLoader(
        data, 10, sampler=RandomSampler(data, replacement=True, num_samples=90)
    ),
    "weighted": lambda data: DataLoader(data, 10, sampler=WeightedRandomSampler(torch.arange(1.0, 102.0), 101)),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=Shuffled()),
    "a batch sampler's lists": lambda data: DataLoader(data, batch_sampler=Several()),
    "a batch sampler's other containers": lambda data: DataLoader(data, batch_sampler=InOtherContainers()),
    "loaders within a loader": Mixed,
    "stream": lambda data: DataLoader(Stream(), 10),
    "stream that goes on": lambda data: DataLoader(OnAndOn(), 10),
    "list of batches": lambda data: list(DataLoader(data, 10)),
    **{
        f"a sampler's {name}": lambda data, make=make: DataLoader(data, 10, sampler=Own(make()))
        for name, make in GENERATORS.items()
    },
    "a sampler with a state_dict": lambda data: DataLoader(data, 10, sampler=Passes()),
    "a batch sampler's sampler with a state_dict": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(Passes(), 10, False)
    ),
    "a batch sampler's sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(Own(random.Random(1)), 10, False)
    ),
}


def make_loop(
    loader: Any = None, model: Net | None = None, optimizer: Any = torch.optim.Adam, **options: Any
) -> TrainLoop:
    torch.manual_seed(1)
    model = model or Net()
    options = {"criterion": nn.CrossEntropyLoss(), "seed": 3, "end_auto_eval": False, "progress_bar": False, **options}
    loader = DataLoader(make_data(), 10, shuffle=True) if loader is None else loader
    return TrainLoop(model, loader, optimizer=optimizer(model.parameters(), lr=0.01), **options)


def interrupted(where: Path, steps: int, loop: TrainLoop, *callbacks: Any, **arguments: Any) -> TrainLoop:
    options = {"num_epochs": 3, "grad_accumulation": 2, **arguments}
    keeper = ModelCheckpoint(where, every_n_epochs=None, every_n_steps=1)
    with pytest.raises(InterruptedError):
        loop.fit(callbacks=[*callbacks, keeper, StopAfter(steps)], **options)
    return loop


def state_of(loop: TrainLoop) -> dict[str, Any]:
    return {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "history": loop.history.state_dict(),
        "counters": [loop.epoch, loop.global_step, loop.total_iteration_idx],
    }


@pytest.mark.long(every=3)
@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("steps", [1, 8], ids=["in the first epoch", "in the second"])
def test_every_kind_of_loader_goes_on_where_it_was(tmp_path: Path, kind: str, steps: int, seed: int | None) -> None:
    """Unseeded runs too: what the global generators held is in the checkpoint."""
    whole = make_loop(LOADERS[kind](make_data()), seed=seed)
    whole.fit(num_epochs=3, grad_accumulation=2)
    first = interrupted(tmp_path, steps, make_loop(LOADERS[kind](make_data()), seed=seed))
    second = make_loop(LOADERS[kind](make_data()), seed=seed)
    torch.manual_seed(99)  # another process begins with other generators
    second.fit(
        num_epochs=3,
        grad_accumulation=2,
        callbacks=[ModelCheckpoint(tmp_path, every_n_epochs=None)],
        resume_from="last",
    )
    assert first.model._rows + second.model._rows == whole.model._rows
    assert same(state_of(second), state_of(whole))


@pytest.mark.long
@pytest.mark.parametrize("generator", GENERATORS)
def test_a_samplers_generator_continues_after_ranks(generator: str) -> None:
    def orders(**mode: Any) -> list[list[int]]:
        sampler = Own(GENERATORS[generator]())
        loop = make_loop(DataLoader(make_data(), 10, sampler=sampler), accelerator="cpu", **mode)
        loop.fit(num_epochs=1)
        return [list(sampler) for _ in range(2)]

    assert orders() == orders(gpu_mode="ddp", devices=2)


class Noise(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = GENERATORS["torch"](), GENERATORS["Python"](), GENERATORS["numpy"]()
        self.torch, self.python, self.numpy = self.generators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.torch, dtype=x.dtype)
        return x + noise * self.python.random() * self.numpy.random()


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return super().get_loss((self.noise(x), y), criterion, device)


class Langevin(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.generator = GENERATORS["torch"]()

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p += 1e-3 * torch.randn(p.shape, generator=self.generator)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit")
@pytest.mark.parametrize("mode", [{}, {"gpu_mode": "ddp", "devices": 2}], ids=["single", "ddp"])
def test_generators_of_a_models_parts_and_of_an_optimizer_resume(mode: dict[str, Any], tmp_path: Path) -> None:
    def make() -> TrainLoop:
        return make_loop(model=Noisy(), optimizer=Langevin, accelerator="cpu", **mode)

    whole, again = make(), make()
    whole.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=None)])
    middle = sorted(tmp_path.glob("*.pt"))[2]
    again.fit(num_epochs=2, resume_from=middle)
    assert again.history["loss"] == whole.history["loss"]
    assert same(again.model.state_dict(), whole.model.state_dict())


class NoisyPart:
    def __init__(self) -> None:
        self.generator = GENERATORS["numpy"]()

    def __call__(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y_pred, y) * self.generator.random()


class SumOfParts(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        return sum(part(self.layers(x), y) for part in criterion.values())


def test_generators_of_a_criterions_parts_resume(tmp_path: Path) -> None:
    def make() -> TrainLoop:
        return make_loop(model=SumOfParts(), criterion={"plain": nn.CrossEntropyLoss(), "noisy": NoisyPart()})

    whole, again = make(), make()
    whole.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=None)])
    middle = sorted(tmp_path.glob("*.pt"))[2]
    with pytest.warns(UserWarning, match="callbacks not in this fit"):
        again.fit(num_epochs=2, resume_from=middle)
    assert again.history["loss"] == whole.history["loss"]


class Moving(nn.CrossEntropyLoss):
    """A criterion with a parameter and a buffer, which each call in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(self.scale * y_pred, y)
        if self.training:
            self.mean.lerp_(loss.detach(), 0.5)
        return loss + self.mean


@pytest.mark.parametrize(
    "around",
    [functools.partial, lambda part: part.forward, lambda part: lambda *args: part(*args)],
    ids=["partial", "method", "closure"],
)
def test_a_criterion_in_a_function_is_part_of_the_training(tmp_path: Path, around: Any) -> None:
    def make(around: Any) -> tuple[TrainLoop, Moving]:
        part, loader = Moving(), DataLoader(make_data(), batch_size=25)
        options = {"validation_loader": loader, "end_auto_eval": True, "criterion": around(part)}
        return make_loop(loader, optimizer=lambda p, lr: torch.optim.SGD([*p, part.scale], lr), **options), part

    (plain, of_plain), (first, _), (resumed, own) = make(lambda part: part), make(around), make(around)
    plain.fit(num_epochs=2)
    first.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    resumed.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert same(own.state_dict(), of_plain.state_dict())
    assert resumed.history.to_dict() == plain.history.to_dict()


@pytest.mark.long
def test_a_samplers_state_dict_continues_after_ranks() -> None:
    def order(**mode: Any) -> list[int]:
        sampler = Passes()
        make_loop(DataLoader(make_data(), 10, sampler=sampler), accelerator="cpu", **mode).fit(num_epochs=1)
        assert sampler.passes.tolist() == [1]
        return list(sampler)

    assert order() == order(gpu_mode="ddp", devices=2)


def test_a_samplers_state_dict_that_needs_arguments_is_not_called() -> None:
    class Asks(Own):
        def state_dict(self, samples: int) -> Any:
            raise AssertionError

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    sampler = Asks(random.Random(3))
    make_loop(DataLoader(make_data(), 10, sampler=sampler)).fit(num_epochs=1)
    assert list(generators.generators_of(DataLoader(make_data(), 10, sampler=sampler))) == ["sampler:rng"]


def test_generators_within_a_loader_that_is_split_by_columns_are_kept() -> None:
    loader = DataLoader(make_data(), 10, shuffle=True, generator=torch.Generator())
    assert list(generators.generators_of(SplitBatches(loader))) == list(generators.generators_of(loader)) == ["loader"]


def test_a_samplers_state_that_no_checkpoint_can_contain_is_warned_of(tmp_path: Path) -> None:
    class Odd(Own):
        def state_dict(self) -> Any:
            return {"loop": object()}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    loop = make_loop(DataLoader(make_data(), 10, sampler=Odd(random.Random(3))))
    with pytest.warns(UserWarning, match=r"train_loader: the state_dict\(\) of its sampler can't be stored"):
        loop.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])


def test_the_order_of_a_validation_loader_goes_on_too(tmp_path: Path) -> None:
    def loop() -> TrainLoop:
        sampler = WeightedRandomSampler(torch.arange(1.0, 102.0), 20, generator=torch.Generator().manual_seed(5))
        return make_loop(validation_loader=DataLoader(make_data(), 10, sampler=sampler), end_auto_eval=True)

    whole = loop()
    whole.fit(num_epochs=3, grad_accumulation=2)
    interrupted(tmp_path, 8, loop())  # in the second epoch, after one evaluation
    second = loop()
    second.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert second.history["val_loss"] == whole.history["val_loss"]
    ours, expected = (one.validation_loader.sampler.generator.get_state() for one in (second, whole))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("iterations", "steps"), [(25, 8), (25, 14), (22, 12)], ids=["within", "after the last", "after a whole epoch"]
)
def test_iterations_instead_of_epochs_go_on_too(tmp_path: Path, iterations: int, steps: int) -> None:
    """A checkpoint after the last one has no step before it, but the end of its epoch."""
    whole = make_loop()
    whole.fit(num_iterations=iterations, grad_accumulation=2)
    first = interrupted(tmp_path, steps, make_loop(), num_epochs=0, num_iterations=iterations)
    second = make_loop()
    keeper = ModelCheckpoint(tmp_path)
    second.fit(num_iterations=iterations, grad_accumulation=2, callbacks=[keeper], resume_from="last")
    assert first.model._rows + second.model._rows == whole.model._rows
    assert same(state_of(second), state_of(whole))


def test_from_a_checkpoint_by_its_path(tmp_path: Path) -> None:
    loop = make_loop()
    loop.fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path, keep=None)])
    middle = checkpoint.checkpoints(tmp_path)[1].path
    again = make_loop()
    elsewhere = ModelCheckpoint(tmp_path / "elsewhere", keep=1)
    again.fit(num_epochs=3, callbacks=[elsewhere], resume_from=middle)
    assert elsewhere.last_path == str(tmp_path / "elsewhere" / "checkpoint-epoch=0003-step=00000033.pt")
    assert len(checkpoint.checkpoints(tmp_path)) == 3, "what the run wrote elsewhere before is left alone"
    assert same(state_of(again), state_of(loop))
    longer = make_loop()
    longer.fit(
        num_epochs=4, callbacks=[ModelCheckpoint(tmp_path)], resume_from=checkpoint.checkpoints(tmp_path)[-1].path
    )
    assert longer.epoch == 4


def test_a_finished_run_started_again_trains_no_more(tmp_path: Path) -> None:
    loop = make_loop()
    loop.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    before = sorted(tmp_path.iterdir())
    again = make_loop()
    again.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert again.model._rows == []
    assert same(state_of(again), state_of(loop))
    assert sorted(tmp_path.iterdir()) == before


def test_the_place_of_a_resume_is_in_the_log_without_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("trainloop")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger.addHandler(handler)
    try:
        make_loop().fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
        make_loop().fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
        loop = make_loop()
        loop.fit(num_epochs=1)
        loop.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path / "second")])
        again = make_loop()
        again.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path / "second")], resume_from="last")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [record.getMessage() for record in records] == [
        f"resume_from='last': no checkpoint in {tmp_path} yet. Training starts from scratch.",
        "resumed at epoch 2, step 11",
        "resumed at epoch 3, step 22 (num_epochs=2 counts from epoch 2, the first of the call of fit that wrote the "
        "checkpoint)",
    ]
    assert again.epoch == 3


def test_a_resume_with_other_values_says_which_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(epochs: int, accumulation: int = 1, batch: int = 16, seed: int = 1, **of_optimizer: float) -> str:
        loop = small_loop.make_loop(seed=seed)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), **{"lr": 0.1, **of_optimizer})
        loop.train_loader = DataLoader(make_data(), batch)
        schedule = LRScheduler(torch.optim.lr_scheduler.StepLR(loop.optimizer, 1))
        keeper = ModelCheckpoint(tmp_path)
        loop.fit(epochs, grad_accumulation=accumulation, callbacks=[keeper, schedule], resume_from="last")
        return capsys.readouterr().err  # a warning of the log

    assert said(1) == said(2) == ""
    other = said(3, accumulation=2, batch=12, seed=2, lr=0.5, momentum=0.9, weight_decay=0.25)
    assert other == (
        "Resumed with SGD's lr=0.1 from the checkpoint (the script has 0.5), SGD's momentum=0 from the checkpoint (the "
        "script has 0.9), SGD's weight_decay=0 from the checkpoint (the script has 0.25), seed=1 "
        "from the checkpoint (the script has 2), grad_accumulation=2 from the script (the checkpoint has 1), global "
        "batch size=12 from the script (the checkpoint has 16).\n"
    )


@pytest.mark.parametrize(
    "before, now, said",
    [
        ({"weight": torch.ones(3)}, {"weight": torch.ones(3)}, ""),
        (
            {"weight": torch.ones(3)},
            {"weight": torch.arange(3.0)},
            "weight from the checkpoint (the script has others)",
        ),
        ({"weight": torch.ones(3)}, {}, "weight from the checkpoint (the script has others)"),
        ({}, {"weight": torch.ones(3)}, "weight from the script (the checkpoint has none)"),
    ],
    ids=["equal", "other", "none now", "none before"],
)
def test_a_resume_says_which_class_weights_are_used(
    before: Any, now: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs, arguments in enumerate((before, now), start=1):
        loop = small_loop.make_loop(seed=1)
        loop.criterion = nn.CrossEntropyLoss(**arguments)
        loop.fit(epochs, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert capsys.readouterr().err == (f"Resumed with the criterion's {said}.\n" if said else "")


def test_a_resume_says_that_only_the_script_has_a_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs, seed in ((1, None), (2, 4)):
        small_loop.make_loop(seed=seed).fit(epochs, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert capsys.readouterr().err == "Resumed with seed=4 from the script (the checkpoint has none).\n"


@pytest.mark.filterwarnings("ignore:LRScheduler. the schedule ends")
def test_a_schedule_of_steps_is_no_schedule_of_epochs_in_a_resumed_run(tmp_path: Path) -> None:
    """It begins again: a count of steps would be after all milestones of epochs."""

    def rates(epochs: int, **arguments: Any) -> list[float]:
        loop = small_loop.make_loop(seed=1)
        schedule = LRScheduler(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 3], gamma=0.5, **arguments)
        loop.fit(epochs, callbacks=[schedule, LearningRateMonitor(), ModelCheckpoint(tmp_path)], resume_from="last")
        return loop.history["lr"]

    assert rates(1, interval="step") == pytest.approx([0.1])
    with pytest.warns(
        UserWarning, match="state of a schedule for each step, but this fit has a schedule for each epoch"
    ):
        found = rates(5)
    assert found[1:] == pytest.approx([0.025, 0.025, 0.0125, 0.00625])


@pytest.mark.filterwarnings("ignore:LRScheduler. the schedule ends")
def test_a_resume_says_which_arguments_of_a_schedule_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def schedule(optimizer: Any, steps: int) -> Any:
        kinds = torch.optim.lr_scheduler
        parts = [kinds.LinearLR(optimizer, total_iters=steps), kinds.MultiStepLR(optimizer, [steps])]
        return kinds.SequentialLR(optimizer, parts, [steps])

    def said(epochs: int, steps: int) -> str:
        loop = small_loop.make_loop(seed=1)
        callbacks = [LRScheduler(lambda optimizer: schedule(optimizer, steps)), ModelCheckpoint(tmp_path)]
        loop.fit(epochs, callbacks=callbacks, resume_from="last")
        return capsys.readouterr().err

    assert said(1, 2) == said(2, 2) == ""
    assert said(3, 5) == (
        "Resumed with SequentialLR's milestones=[2] from the checkpoint (the script has [5]), LinearLR's total_iters=2 "
        "from the checkpoint (the script has 5), MultiStepLR's milestones=[2] from the checkpoint (the script has [5])."
        "\n"
    )


@pytest.mark.filterwarnings("ignore:LRScheduler. the")
@pytest.mark.parametrize("first", [None, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)], ids=["none", "StepLR"])
def test_a_schedule_that_only_the_resumed_run_has_keeps_its_settings_in_groups(tmp_path: Path, first: Any) -> None:
    """OneCycleLR computes its rates from what it has written into the optimizer's groups."""

    def fitted(schedule: Any, epochs: int, rate: float, **options: Any) -> list[dict[str, Any]]:
        loop = small_loop.make_loop(seed=1)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=rate, momentum=0.5)
        callbacks = [LRScheduler(schedule)] if schedule else []
        loop.fit(epochs, callbacks=[*callbacks, ModelCheckpoint(tmp_path)], **options)
        return [{k: v for k, v in group.items() if k != "params"} for group in loop.optimizer.param_groups]

    def cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.8, total_steps=5)

    fitted(first, 2, 0.3)
    (resumed,) = fitted(cycle, 4, 0.1, resume_from="last")
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    schedule = cycle(optimizer)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    alone = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert resumed == pytest.approx(alone)


@pytest.mark.filterwarnings("ignore:LRScheduler. the schedule ends")
def test_another_class_of_schedules_begins_at_its_first_step_in_a_resumed_run(tmp_path: Path) -> None:
    kinds = torch.optim.lr_scheduler

    def rates(schedule: Any, epochs: int) -> list[float]:
        loop = small_loop.make_loop(seed=1)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        callbacks = [LRScheduler(schedule), LearningRateMonitor(), ModelCheckpoint(tmp_path)]
        loop.fit(epochs, callbacks=callbacks, resume_from="last")
        return loop.history["lr"]

    def warmed(last: Any) -> Any:
        return lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o, 0.5, 1), last(o)], [1])

    assert rates(lambda o: kinds.StepLR(o, 1, 0.5), 2) == pytest.approx([0.1, 0.05])
    with pytest.warns(UserWarning, match="the state of a StepLR, but this fit has a LambdaLR"):
        decay = rates(lambda o: kinds.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), 5)
    assert decay[2:] == pytest.approx([0.025, 0.05, 0.1 / 3])  # the checkpoint's rate, then the schedule's own
    with pytest.warns(UserWarning, match="a LambdaLR, but this fit has a SequentialLR.ConstantLR, StepLR.[.] That"):
        rates(warmed(lambda o: kinds.StepLR(o, 1)), 6)
    with pytest.warns(UserWarning, match="SequentialLR.ConstantLR, StepLR., but .* SequentialLR.ConstantLR, LambdaLR"):
        rates(warmed(lambda o: kinds.LambdaLR(o, lambda epoch: 1.0)), 7)


@pytest.mark.filterwarnings("ignore:LRScheduler")
def test_another_class_of_schedules_has_its_own_settings_in_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = torch.optim.lr_scheduler

    def settings(schedule: Any, epochs: int, folder: str) -> dict[str, Any]:
        loop = small_loop.make_loop(seed=1)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5)
        callbacks = [LRScheduler(schedule), ModelCheckpoint(tmp_path / folder)]
        loop.fit(epochs, callbacks=callbacks, resume_from="last")
        (group,) = loop.optimizer.param_groups
        return {key: value for key, value in group.items() if key != "params"}

    def one_cycle(optimizer: Any) -> Any:
        return kinds.OneCycleLR(optimizer, 0.8, total_steps=9)

    settings(lambda o: kinds.CyclicLR(o, 0.01, 0.2, base_momentum=0.3, max_momentum=0.6), 2, "a")
    capsys.readouterr()
    resumed = settings(one_cycle, 4, "a")
    assert "momentum" not in capsys.readouterr().out  # none of the checkpoint's is used
    assert resumed == settings(one_cycle, 2, "b")


def test_the_monitors_patience_goes_on(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [EarlyStopping("loss", patience=4, min_delta=100.0), ModelCheckpoint(tmp_path, monitor="loss")]

    first = callbacks()
    make_loop().fit(num_epochs=3, callbacks=first)
    second = callbacks()
    loop = make_loop()
    loop.fit(num_epochs=20, callbacks=second, resume_from="last")
    assert first[0].epochs_without_improvement == 2
    assert loop.epoch == 5
    assert second[1].best_value == min(loop.history["loss"])
    assert second[1].best_path == first[1].best_path or second[1].best_value < first[1].best_value


class EverySecondEpoch(AbstractCallback):
    """Measures at steps or at the end of epochs: NaN in the first epoch, 2 in the third and so on."""

    def __init__(self, hook: str) -> None:
        super().__init__("every second epoch")
        setattr(self, hook, self.measure)

    def measure(self) -> None:
        if self.train_loop_obj.epoch % 2 == 0 and self.train_loop_obj.global_step % 11 in (0, 5):
            self.log("measured_loss", self.train_loop_obj.epoch or math.nan)


class Judged(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, metrics: Any, *args: Any) -> None:
        super().step(metrics, *args)
        self.judged = [*getattr(self, "judged", []), metrics]


@pytest.mark.filterwarnings("ignore:the checkpoint does not contain _rows")
@pytest.mark.parametrize("hook", ["on_epoch_end", "on_batch_end"])
def test_a_monitor_that_only_the_resumed_run_has_does_not_judge_old_values(hook: str, tmp_path: Path) -> None:
    at_steps = hook == "on_batch_end"
    first = ModelCheckpoint(tmp_path / "first")
    make_loop().fit(num_epochs=1, callbacks=[EverySecondEpoch(hook), first])
    schedule = LRScheduler(Judged, monitor="measured_loss", interval="step" if at_steps else "epoch", patience=9)
    stopping = EarlyStopping("measured_loss", patience=9, every_n_steps=1 if at_steps else None)
    keeper = ModelCheckpoint(tmp_path / "best", monitor="measured_loss", keep=None)
    callbacks = [EverySecondEpoch(hook), schedule, stopping, keeper, TerminateOnNaN("measured_loss")]
    make_loop().fit(num_epochs=4, callbacks=callbacks, resume_from=first.last_path)
    assert stopping.best == 2
    assert set(schedule.scheduler.judged) == {2}
    values = {one.info.epoch: one.info.value for one in checkpoint.checkpoints(tmp_path / "best") if one.info}
    assert values == {1: None, 2: 2.0, 3: None}


class Counts(AbstractCallback):
    def __init__(self, name: str, by: int) -> None:
        super().__init__(name)
        self.by, self.count = by, 0

    def on_epoch_end(self) -> None:
        self.count += self.by

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_callbacks_of_one_name_are_matched_by_their_key_and_arguments_in_any_order(tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        return [
            EarlyStopping("loss", patience=9),
            EarlyStopping("rows", patience=9, mode="max"),
            ThresholdEarlyStopping("loss", 0.0, patience=9),
            ThresholdEarlyStopping("loss", 99.0, patience=9),
            LRScheduler(lr_scheduler.StepLR, step_size=1, gamma=0.5, optimizer_idx=0),
            LRScheduler(lr_scheduler.LinearLR, interval="step"),
            LRScheduler(lr_scheduler.ExponentialLR, gamma=0.9),
            Counts("a", 1),
            Counts("a", 10),
            ExponentialMovingAverage(0.5),
            ExponentialMovingAverage(0.9),
        ]

    class Logs(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
            self.log("rows", float(len(batch_data[0])))
            return super().get_loss(batch_data, criterion, device)

    first, second = callbacks(), callbacks()
    make_loop(model=Logs()).fit(num_epochs=1, callbacks=[*first, ModelCheckpoint(tmp_path)])
    again = make_loop(model=Logs())
    again.fit(num_epochs=1, callbacks=[*reversed(second), ModelCheckpoint(tmp_path)], resume_from="last")
    assert all(same(mine.state_dict(), its.state_dict()) for mine, its in zip(second, first, strict=True))


@pytest.mark.filterwarnings("ignore:the checkpoint does not contain _rows")
def test_callbacks_of_one_name_are_matched_in_order_with_a_warning_if_one_is_missing(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path)
    make_loop().fit(num_epochs=1, callbacks=[Counts("a", 1), Counts("a", 10), keeper])

    def resumed(by: int) -> int:
        counts = Counts("a", by)
        make_loop().fit(num_epochs=2, callbacks=[counts], resume_from=keeper.last_path)
        return counts.count

    fewer = pytest.warns(UserWarning, match=r"states of 2 callbacks 'a' \(Counts\), but this fit has 1\.")
    with fewer, pytest.warns(UserWarning, match="callbacks not in this fit: a"):
        assert resumed(5) == 6  # its arguments have changed
    with pytest.warns(UserWarning, match="callbacks not in this fit: a") as raised:
        assert resumed(10) == 20  # found by its arguments
    assert not any("this fit has 1" in str(one.message) for one in raised)


def test_load_best_after_fit(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="loss", mode="max", keep=1)
    loop = make_loop()
    loop.fit(num_epochs=3, callbacks=[keeper])
    state = keeper.load_best()
    assert state["place"]["epoch"] == 1  # the highest loss is that of the first epoch
    assert same(dict(loop.model.state_dict()), dict(state["model"]))


# -- signals -----------------------------------------------------------------------------------------------------------


class Signalled(AbstractCallback):
    """Sends this process a signal at one place in training."""

    def __init__(self, place: str, signum: int) -> None:
        super().__init__()
        self.place, self.signum, self.handled = place, signum, 0

    def send(self, place: str, step: int = 5) -> None:
        if place == self.place and self.train_loop_obj.global_step >= step:
            self.place = ""
            os.kill(os.getpid(), self.signum)

    def on_batch_end(self) -> None:
        self.send("between batches")

    def on_after_batch_prediction(self, *_: Any) -> None:
        self.send("evaluation")

    def on_epoch_end(self) -> None:
        self.train_loop_obj.predict_on_validation_set()
        self.send("epoch end")

    def state_dict(self) -> dict[str, Any]:
        self.send("saving")
        return {}


@pytest.mark.long(every=2)
@pytest.mark.parametrize(
    "signum, code",
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)],
    ids=["SIGTERM", "SIGUSR1", "SIGUSR2 in a job of submitit"],
)
@pytest.mark.parametrize("place", ["between batches", "evaluation", "epoch end", "saving"])
def test_a_signal_at_any_place_saves_once_and_ends(
    tmp_path: Path,
    place: str,
    signum: int,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if signum == signal.SIGUSR2:
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    held_out = DataLoader(make_data(), 10)
    options: dict[str, Any] = {"validation_loader": held_out, "end_auto_eval": True}
    whole = make_loop(**options)
    whole.fit(num_epochs=3, grad_accumulation=2)
    handled = []
    before = signal.signal(signum, lambda *_: handled.append(1))
    try:
        first = make_loop(**options)
        keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=5)
        with pytest.raises(SystemExit) as ended:
            first.fit(num_epochs=3, grad_accumulation=2, callbacks=[Signalled(place, signum), keeper])
    finally:
        signal.signal(signum, before)
    assert ended.value.code == code
    assert handled, "the user's own handler runs too"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "received" in line]
    assert line.startswith(f"{signal.Signals(signum).name} received: training ends after step {first.global_step} (")
    assert line.endswith(f"A checkpoint of this step is written to {tmp_path}, unless there is one.")
    state = keeper.last_state()
    assert state is not None
    assert state["place"]["global_step"] == first.global_step
    second = make_loop(**options)
    second.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert first.model._rows + second.model._rows == whole.model._rows
    assert same(state_of(second), state_of(whole))


# -- the order of the optimizer's parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_parameters_in_another_order_get_their_own_state(tmp_path: Path, named: bool) -> None:
    def loop(order: int) -> TrainLoop[Net]:
        made = make_loop()
        listed: list[Any] = list(made.model.named_parameters() if named else made.model.parameters())
        made.optimizer = torch.optim.Adam(listed[::order], 0.01)
        return made

    whole = loop(1)
    whole.fit(num_epochs=3, grad_accumulation=2)
    interrupted(tmp_path, 2, loop(1))
    resumed = loop(-1)
    resumed.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.optimizer.param_groups[0]["params"][0] is list(resumed.model.parameters())[-1]


@pytest.mark.parametrize("first_wrapped", [False, True])
def test_a_resumed_run_may_wrap_modules_in_checkpoint_wrapper_or_not(tmp_path: Path, first_wrapped: bool) -> None:
    """As in torch's state_dicts; the flags of parameters have their names, too."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def loop(wrapped: bool, frozen: bool = True) -> TrainLoop[Net]:
        made = make_loop()
        made.model.layers[2].bias.requires_grad_(not frozen)
        made.model.layers[1].train(not frozen)
        if wrapped:
            for place in (1, 2):
                made.model.layers[place] = checkpoint_wrapper(made.model.layers[place])
        made.optimizer = torch.optim.Adam(made.model.parameters(), 0.01)
        return made

    whole = loop(first_wrapped)
    whole.fit(num_epochs=3, grad_accumulation=2)
    interrupted(tmp_path, 2, loop(first_wrapped))
    resumed = loop(not first_wrapped, frozen=False)
    resumed.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert same(resumed.model.state_dict(), whole.model.state_dict())


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.noise = nn.Dropout(0.5)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.noise(output * self.factor), target)


class SettleCriterion(AbstractCallback):
    """Fix a criterion's parameter and its dropout after the first step."""

    def on_batch_end(self) -> None:
        part = self.train_loop_obj.criterion
        part = part["main"] if isinstance(part, dict) else part
        if self.train_loop_obj.global_step == 1:
            part.factor.requires_grad_(False)
            part.noise.eval()


@pytest.mark.parametrize("in_dict", [False, True])
def test_flags_of_a_criterion_s_parameters_and_modules_are_in_checkpoints(tmp_path: Path, in_dict: bool) -> None:
    class OfDict(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
            return super().get_loss(batch_data, criterion["main"] if isinstance(criterion, dict) else criterion, device)

    def loop() -> TrainLoop[Net]:
        made = make_loop()
        made.model.__class__ = OfDict
        part = Temperature()
        made.criterion = {"main": part} if in_dict else part
        made.optimizer = torch.optim.Adam([*made.model.parameters(), *part.parameters()], 0.05)
        return made

    whole = loop()
    whole.fit(num_epochs=3, grad_accumulation=2, callbacks=[SettleCriterion()])
    interrupted(tmp_path, 3, loop(), SettleCriterion())
    resumed = loop()
    callbacks = [SettleCriterion(), ModelCheckpoint(tmp_path)]
    resumed.fit(num_epochs=3, grad_accumulation=2, callbacks=callbacks, resume_from="last")
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    part = resumed.criterion["main"] if in_dict else resumed.criterion
    assert not part.factor.requires_grad
    assert part.training
    assert not part.noise.training


def test_an_optimizer_s_state_follows_a_criterion_of_another_dtype(tmp_path: Path) -> None:
    def loop(dtype: torch.dtype) -> TrainLoop[Net]:
        made = make_loop()
        made.criterion = Temperature().to(dtype)
        made.optimizer = torch.optim.Adam([*made.model.parameters(), *made.criterion.parameters()], 0.05, foreach=False)
        return made

    interrupted(tmp_path, 3, loop(torch.float32))
    resumed = loop(torch.float64)
    resumed.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert resumed.optimizer.state[resumed.criterion.factor]["exp_avg"].dtype == torch.float64


def two_groups(model: nn.Module, order: int) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    return torch.optim.SGD([{"params": weights}, {"params": biases, "weight_decay": 0.1}][::order], 0.1, momentum=0.9)


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (two_groups, r"group 0 of SGD has model.layers.0.bias, .*, but in the checkpoint it has model.layers.0.weight"),
        (
            lambda model, order: torch.optim.LBFGS(list(model.parameters())[::order], 0.01),
            r"the parameters of LBFGS have another order than in the checkpoint, .* can't be put into another order",
        ),
    ],
    ids=["groups", "LBFGS"],
)
def test_an_order_that_no_state_fits_is_refused(tmp_path: Path, optimizer: Any, message: str) -> None:
    first, second = make_loop(), make_loop()
    first.optimizer, second.optimizer = optimizer(first.model, 1), optimizer(second.model, -1)
    first.fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.raises(CheckpointError, match=message):
        second.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")


# -- what does not belong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other, message",
    [
        (
            lambda: make_loop(model=Net(9)),
            r"belongs to another model: layers.0.weight has shape \(9, 8\) in the model, but \(8, 8\) in the",
        ),
        (lambda: make_loop(optimizer=torch.optim.SGD), r"was made with Adam, but the loop has SGD"),
        (
            lambda: make_loop(DataLoader(make_data(90), 10)),
            r"in the middle of an epoch of 101 training samples, but the loader has 90 now",
        ),
        (lambda: make_loop(DataLoader(make_data(), 7)), r"after 40 samples of its epoch, but this run's steps"),
    ],
    ids=["model", "optimizer", "dataset", "batch size"],
)
def test_what_differs_is_named(tmp_path: Path, other: Any, message: str) -> None:
    interrupted(tmp_path, 2, make_loop())
    loop = other()
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        loop.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert all(torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())


def test_keys_that_are_missing_are_named(tmp_path: Path) -> None:
    interrupted(tmp_path, 2, make_loop())
    model = Net()
    model.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"more.weight is missing in the checkpoint; more.bias is missing"):
        make_loop(model=model).fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")


class CreatesItsNorm(Net):
    """Has a part with a buffer only after the first batch, as the losses of torchrl."""

    norm: Any = None

    def get_loss(self, *args: Any) -> Tensor:
        if self.norm is None:
            self.norm = nn.BatchNorm1d(2, affine=False)
        return super().get_loss(*args)


def test_keys_that_the_first_batch_creates_are_explained(tmp_path: Path) -> None:
    interrupted(tmp_path, 2, make_loop(model=CreatesItsNorm()))
    with pytest.raises(CheckpointError, match=r"norm\.running_mean is not in .* creates a part, call the model once"):
        make_loop(model=CreatesItsNorm()).fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")


def test_keys_of_a_compiled_module_are_explained(tmp_path: Path) -> None:
    compiled = Net()
    compiled.layers = torch.compile(compiled.layers, backend="eager")
    interrupted(tmp_path, 2, make_loop(model=compiled))
    with pytest.raises(CheckpointError, match=r"layers._orig_mod.0.weight is .*module.compile\(\) keeps the names"):
        make_loop().fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")


def test_last_without_a_checkpoint_callback_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"resume_from='last' needs a ModelCheckpoint in callbacks"):
        make_loop().fit(num_epochs=1, resume_from="last")


def test_last_without_a_checkpoint_says_that_training_starts_from_scratch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"resume_from='last': no checkpoint in {tmp_path} yet. Training starts from scratch.\n"
    for begins in (True, False):
        make_loop(progress_bar=True).fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
        assert (line in capsys.readouterr().out) == begins


@pytest.mark.filterwarnings("ignore:the checkpoint does not contain _rows")
@pytest.mark.parametrize("steps", [6, 12, 21], ids=["before an epoch's end", "after one", "before the second one"])
@pytest.mark.parametrize("best_first", [True, False])
def test_last_is_the_newest_of_several_folders(best_first: bool, steps: int, tmp_path: Path) -> None:
    def keepers() -> list[ModelCheckpoint]:
        best = ModelCheckpoint(tmp_path / "best", every_n_epochs=None, monitor="loss", keep=1)
        last = ModelCheckpoint(tmp_path / "last", every_n_epochs=None, every_n_steps=3, keep=1)
        return [best, last] if best_first else [last, best]

    whole, killed, resumed, resumed_keepers = make_loop(), make_loop(), make_loop(), keepers()
    whole.fit(num_epochs=3)  # an epoch has 11 steps
    with pytest.raises(InterruptedError):
        killed.fit(num_epochs=3, callbacks=[*keepers(), StopAfter(steps)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ModelCheckpoint")  # of the best one, which would be left behind
        resumed.fit(num_epochs=3, callbacks=resumed_keepers, resume_from="last")
    assert killed.model._rows + resumed.model._rows == whole.model._rows
    assert same(state_of(resumed), state_of(whole))
    best = resumed_keepers[not best_first]
    assert best.best_value == min(whole.history["loss"])
    assert len(checkpoint.checkpoints(tmp_path / "best")) <= 2  # the best and the last


def test_a_path_to_nothing_and_to_something_else_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none.pt: no such file"):
        make_loop().fit(num_epochs=1, resume_from=tmp_path / "none.pt")
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights.pt is not a complete checkpoint: it has no end mark"):
        make_loop().fit(num_epochs=1, resume_from=str(tmp_path / "weights.pt"))


@pytest.mark.filterwarnings("ignore:the checkpoint does not contain _rows")
def test_the_damaged_newest_is_passed_over_by_fit(tmp_path: Path) -> None:
    whole = make_loop()
    whole.fit(num_epochs=3, grad_accumulation=2)
    interrupted(tmp_path, 8, make_loop())
    newest = Path(checkpoint.checkpoints(tmp_path)[-1].path)
    newest.write_bytes(newest.read_bytes()[:-1000])
    loop = make_loop()
    with pytest.warns(RuntimeWarning, match=r"step=00000008.pt is not a complete checkpoint") as caught:
        loop.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert [one.category for one in caught] == [RuntimeWarning, UserWarning]  # the second one names _rows
    assert same(state_of(loop), state_of(whole))


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    """By them load_state_dict() knows whether weights were made by an older version of a module."""
    model = Net()
    model.layers.append(nn.BatchNorm1d(3))
    keeper = ModelCheckpoint(tmp_path)
    make_loop(DataLoader(make_data(100), 10), model=model).fit(num_epochs=1, callbacks=[keeper])
    saved = checkpoint.load(keeper.last_path or "")["model"]
    assert saved._metadata["layers.3"] == {"version": 2}


def test_a_callbacks_state_that_is_not_plain_is_named(tmp_path: Path) -> None:
    class Careless(AbstractCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"when": [Path("x")]}

    with pytest.raises(CheckpointError, match=r"state\['callbacks'\]\[0\]\['state'\]\['when'\]\[0\] is a pathlib"):
        make_loop().fit(num_epochs=1, callbacks=[Careless(), ModelCheckpoint(tmp_path)])


def test_a_checkpoint_opens_without_trainloop(tmp_path: Path) -> None:
    loop = make_loop()
    keeper = ModelCheckpoint(tmp_path)
    loop.fit(num_epochs=1, callbacks=[keeper])
    state = torch.load(keeper.last_path or "", weights_only=True)
    plain_model = nn.Module()
    plain_model.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    plain_model.load_state_dict(state["model"])
    assert torch.equal(plain_model.layers[0].weight, loop.model.layers[0].weight)


class Counted(Dataset[Any]):
    """Counts what is read."""

    def __init__(self) -> None:
        self.data, self.reads = make_data(), 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.data[i]


def test_steps_that_are_skipped_are_not_read(tmp_path: Path) -> None:
    interrupted(tmp_path, 4, make_loop(DataLoader(Counted(), 10, shuffle=True)), num_epochs=1)
    data = Counted()
    loop = make_loop(DataLoader(data, 10, shuffle=True))
    loop.fit(num_epochs=1, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert data.reads == 101 - 4 * 2 * 10


class Seen(TTBasicModel):
    """Notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(x.flatten().tolist())
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("length", ["num_epochs", "num_iterations"])
def test_a_run_that_ended_with_an_epoch_draws_the_next_order_when_it_is_extended(tmp_path: Path, length: str) -> None:
    """Without a seed, by the loader's own generator, also where the number of iterations ended the epoch."""

    def batches(number: int, folder: Path | None, resume_from: str | None = None) -> list[list[float]]:
        data = TensorDataset(torch.arange(10.0).view(-1, 1), torch.zeros(10, 1))
        loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(5))
        model = Seen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tl = cpu_loop(model, loader, optimizer, nn.MSELoss())
        keepers = [] if folder is None else [ModelCheckpoint(folder)]
        tl.fit(**{length: number if length == "num_epochs" else 5 * number}, callbacks=keepers, resume_from=resume_from)
        return model.batches

    first = batches(2, tmp_path)
    whole = batches(4, None)
    assert first + batches(4, tmp_path, "last") == whole


def test_the_scale_of_fp16_is_resumed(tmp_path: Path) -> None:
    """In the middle of the scaler's search: with a scale of its beginning, the resumed run would skip other steps."""
    amp = {"init_scale": 2.0**24, "growth_interval": 3}
    whole = make_loop(use_amp=amp)
    whole.fit(num_epochs=3, grad_accumulation=2)
    first = interrupted(tmp_path, 4, make_loop(use_amp=amp))
    assert first.optimizer.state_dict()["state"] == {}, "so far each step overflowed: the state matters"
    second = make_loop(use_amp=amp)
    second.fit(num_epochs=3, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert second.optimizer.state_dict()["state"], "later steps were taken"
    assert second.scaler_state == whole.scaler_state
    assert same(state_of(second), state_of(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_last_loss_is_resumed(dtype: torch.dtype, tmp_path: Path) -> None:
    """A rank without a batch in its first step would have none otherwise."""

    class Reads(AbstractCallback):
        seen: Any = None

        def on_train_begin(self) -> None:
            self.before = self.train_loop_obj.last_loss

        def on_batch_begin(self) -> None:
            self.seen = self.train_loop_obj.last_loss if self.seen is None else self.seen

    def made() -> TrainLoop:
        data = TensorDataset(make_data().tensors[0].to(dtype), make_data().tensors[1])
        return make_loop(DataLoader(data, 10), Net().to(dtype))

    first = interrupted(tmp_path, 4, made())
    reads = Reads()
    made().fit(num_epochs=1, grad_accumulation=2, callbacks=[ModelCheckpoint(tmp_path), reads], resume_from="last")
    assert reads.before is None
    assert first.last_loss is not None
    assert torch.equal(reads.seen, first.last_loss)


def test_export_says_which_checkpoint_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeper = ModelCheckpoint(tmp_path / "kept", keep=None)
    make_loop().fit(num_epochs=2, callbacks=[keeper])
    assert main(["checkpoint", "export", str(tmp_path / "kept"), str(tmp_path / "model.safetensors")]) == 0
    assert capsys.readouterr().out.endswith(f", from {keeper.last_path}\n")
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "none.safetensors")]) == 1
    assert "is a folder without a checkpoint" in capsys.readouterr().err


class Centred(TTBasicModel):
    """Its centre is the first batch's mean; the criterion's weights of positive samples are those of each batch."""

    centre: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.register_buffer("centre", None)

    def forward(self, x: Tensor) -> Any:
        if self.centre is None:
            self.centre = x.mean(0)
        return self.fc(x - self.centre)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        y = nn.functional.one_hot(y, 3).to(x.dtype)
        criterion.pos_weight = 1.0 + y.mean(0)
        return criterion(self(x), y)


def centred_loop(model: Centred) -> TrainLoop[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(make_data(), batch_size=16)
    return TrainLoop(model, loader, None, None, optimizer, nn.BCEWithLogitsLoss(), seed=0, progress_bar=False)


def test_buffers_that_the_training_fills_are_resumed(tmp_path: Path) -> None:
    def trained(**arguments: Any) -> Centred:
        torch.manual_seed(0)
        model = Centred()
        centred_loop(model).fit(num_epochs=2, **arguments)
        return model

    whole = trained(callbacks=[ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=100)])
    first = min(tmp_path.glob("*step=*"))
    resumed = trained(resume_from=first, callbacks=[ModelCheckpoint(tmp_path / "resumed")])
    assert same(whole.state_dict(), resumed.state_dict())


def test_a_checkpoint_with_a_tensor_that_is_no_buffer_here_is_refused(tmp_path: Path) -> None:
    class Plain(Centred):
        def __init__(self) -> None:
            super().__init__()
            del self.centre
            self.centre = None

    centred_loop(Centred()).fit(1, callbacks=[ModelCheckpoint(tmp_path)])
    with pytest.raises(CheckpointError, match="centre is not in the model"):
        centred_loop(Plain()).fit(2, resume_from=next(tmp_path.glob("*step=*")))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_with_a_scripted_part_is_resumed(tmp_path: Path) -> None:
    def model() -> Centred:
        torch.manual_seed(0)
        model = Centred()
        model.fc = torch.jit.script(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))
        return model

    whole, resumed = model(), model()
    centred_loop(whole).fit(2, callbacks=[ModelCheckpoint(tmp_path)])
    first = min(tmp_path.glob("*step=*"))
    centred_loop(resumed).fit(2, resume_from=first, callbacks=[ModelCheckpoint(tmp_path / "resumed")])
    assert same(whole.state_dict(), resumed.state_dict())
