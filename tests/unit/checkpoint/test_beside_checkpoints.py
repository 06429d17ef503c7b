"""What a resumed run loses beside the checkpoint is reported; modules that create what they load."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from kit.small_loop import Net, make_loop
from kit.warned import warnings_of
from torch import Tensor, nn, optim
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from trainloop import AbstractCallback, TrainLoop, checkpoint
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import CheckpointError


def saved(folder: Path, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **{"every_n_epochs": None, "every_n_steps": 1, "keep": 99, **arguments})


def path_of(folder: Path, step: int) -> str:
    return next(c.path for c in checkpoint.checkpoints(folder) if c.info is not None and c.info.step == step)


# -- on_epoch_begin ----------------------------------------------------------------------------------------------------


class Rate(AbstractCallback):
    """Sets the rate of the epoch."""

    def __init__(self) -> None:
        super().__init__("Rate")
        self.rate = 1.0

    def on_epoch_begin(self) -> None:
        self.rate = 0.5**self.train_loop_obj.epoch


class RateOnResume(Rate):
    on_resume = Rate.on_epoch_begin


class RateInState(Rate):
    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]


@pytest.mark.parametrize("kind, step, warned", [(Rate, 9, True), (Rate, 7, False), (Rate, 14, False)])
def test_a_hook_that_is_not_called_for_a_resumed_epoch_is_warned_of(
    tmp_path: Path, kind: Any, step: int, warned: bool
) -> None:
    make_loop(validation=False).fit(num_epochs=2, callbacks=[kind(), saved(tmp_path)])
    rate = kind()
    resumed: Any = {"callbacks": [rate, saved(tmp_path)], "resume_from": path_of(tmp_path, step)}
    loop = make_loop(validation=False)
    found = warnings_of(lambda: loop.fit(num_epochs=3, **resumed), "on_epoch_begin of Rate is not called")
    assert len(found) == warned
    assert all("epoch 2 is resumed in the middle" in one for one in found)


@pytest.mark.parametrize("kind", [RateOnResume, RateInState])
@pytest.mark.filterwarnings("error")
def test_a_hook_whose_effect_is_restored_is_not_warned_of(tmp_path: Path, kind: Any) -> None:
    make_loop(validation=False).fit(num_epochs=2, callbacks=[kind(), saved(tmp_path)])
    rate = kind()
    make_loop(validation=False).fit(num_epochs=2, callbacks=[rate, saved(tmp_path)], resume_from=path_of(tmp_path, 9))
    assert rate.rate == 0.5


# -- attributes that get_loss changes ----------------------------------------------------------------------------------


class Pool:
    def __init__(self) -> None:
        self.images: deque[Any] = deque(maxlen=5)


class Target(nn.Module):
    """A criterion with a running value for each class, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.zeros(3)

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        self.target[:] = 0.9 * self.target + 0.1 * y_pred.detach().mean(0)
        return nn.functional.cross_entropy(y_pred, y) - (self.target * y_pred).mean()


class Keeps(Net):
    """Keeps state in attributes: some is for the training, some only a cache."""

    num_iter = 0
    kinds: tuple[str, ...] = ()

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.pool = Pool()
        self.losses: list[float] = []
        self.features = torch.zeros(3)
        self.mean = torch.zeros(3)
        self.sparse = torch.eye(2).to_sparse()
        self.kept = torch.zeros(2, device="meta")
        self.register_buffer("bank", torch.zeros(3), persistent=False)
        self.register_buffer("saved_bank", torch.zeros(3))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        y_pred = self(batch_data[0])
        if "count" in self.kinds:
            self.num_iter += 1
        if "pool" in self.kinds:
            self.pool.images.append(y_pred.detach())
        if "pairs" in self.kinds:
            self.pool.images.append((y_pred.detach(), batch_data[1]))
        if "mean" in self.kinds:
            self.mean.mul_(0.9).add_(y_pred.detach().mean(0))
        if "bank" in self.kinds:
            self.bank += 1
        self.saved_bank += 1
        if "caches" in self.kinds:
            self.features = y_pred.detach()
            self.losses.append(1.0)
            self.sparse.mul_(2)
            self.kept = torch.zeros(3, device="meta")
            self.last = y_pred
        return criterion(y_pred, batch_data[1])


class KeepsWithState(Keeps):
    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize(
    "model, name",
    [
        (lambda: Keeps("count"), "num_iter"),
        (lambda: Keeps("pool"), "pool.images"),
        (lambda: Keeps("pairs"), "pool.images"),
        (lambda: Keeps("bank"), "bank"),
        (lambda: Keeps("mean", "count"), "num_iter, mean"),
    ],
    ids=["count", "pool", "pool of pairs", "not persistent", "two"],
)
def test_what_the_training_goes_on_from_beside_checkpoints_is_named_once(tmp_path: Path, model: Any, name: str) -> None:
    loop = make_loop(model(), validation=False)
    found = warnings_of(lambda: loop.fit(num_epochs=2, callbacks=[saved(tmp_path)]))
    about = [one for one in found if "Checkpoints do not contain this" in one]
    assert len(about) == 1
    assert about[0].startswith(f"the training changes {name}. Checkpoints")


def test_state_of_a_criterion_beside_checkpoints_is_named(tmp_path: Path) -> None:
    loop = make_loop(validation=False)
    loop.criterion = Target()
    with pytest.warns(UserWarning, match=r"the training changes criterion.target. Checkpoints do not contain this"):
        loop.fit(num_epochs=1, callbacks=[saved(tmp_path)])


def test_caches_and_state_in_checkpoints_are_not_named(tmp_path: Path) -> None:
    def run() -> None:
        make_loop(Keeps("caches"), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path / "a")])
        make_loop(KeepsWithState("mean"), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path / "b")])
        make_loop(Keeps("count", "mean", "pool"), validation=False).fit(num_epochs=1)  # no checkpoint

    assert warnings_of(run) == []


class Normalises:
    """A transform with a running mean of its own."""

    def __init__(self) -> None:
        self.mean, self.calls = np.zeros(1), 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean += (x.item() - self.mean) / self.calls
        return x - float(self.mean[0])


class Draws(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind, self.images, self.reads = kind, torch.rand(100, 10, 10), 0
        self.of_torch, self._of_numpy, self.of_python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.transforms = [Normalises()]
        first, second, third = (np.random.default_rng(i) for i in range(3))
        self.bits, self.several, self.by_name = np.random.PCG64(0), [random.Random(0)], {"own": first}
        self.partial, self.closure = functools.partial(np.random.Generator.random, second), lambda: third.random()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.drawn(index).expand(8), 0

    def drawn(self, index: int) -> Tensor:
        self.reads += 1
        self.images[index] = 0.0  # as of a cache
        x = torch.tensor([float(index)])
        if self.kind == "transforms[0].mean":
            return self.transforms[0](x)
        if self.kind == "of_torch":
            return x + torch.rand(1, generator=self.of_torch)
        draws: dict[str, Callable[[], float]] = {
            "_of_numpy": self._of_numpy.random,
            "of_python": self.of_python.random,
            "bits": lambda: self.bits.random_raw() % 7,
            "several": self.several[0].random,
            "by_name": self.by_name["own"].random,
            "partial": self.partial,
            "closure": self.closure,
        }
        return x + draws.get(self.kind, float)()


OWN_GENERATORS = ["of_torch", "_of_numpy", "of_python", "bits", "several", "by_name", "partial", "closure"]


@pytest.mark.parametrize("kind", ["none", *OWN_GENERATORS, "transforms[0].mean"])
def test_state_of_a_dataset_that_reading_changes_is_named_once(tmp_path: Path, kind: str) -> None:
    rows = Draws(kind)
    loop = make_loop(validation=False)
    loop.train_loader = DataLoader(Subset(rows, range(6)), 2)
    found = warnings_of(lambda: loop.fit(num_epochs=2, callbacks=[saved(tmp_path)]))
    text = f"the training changes train_loader.dataset.dataset.{kind}. Checkpoints"
    assert sum(one.startswith(text) for one in found) == (kind != "none")
    assert len(found) == (kind != "none")


@pytest.mark.parametrize("trains", [False, True])
def test_state_of_a_dataset_that_evaluations_change_is_named_once(tmp_path: Path, trains: bool) -> None:
    """Also if it is the one that is trained on."""
    rows, loop = Draws("of_torch"), make_loop()
    loop.validation_loader = DataLoader(rows, 2)
    if trains:
        loop.train_loader = loop.validation_loader
    found = warnings_of(lambda: loop.fit(num_epochs=2, callbacks=[saved(tmp_path)]))
    name = "train_loader" if trains else "validation_loader"
    assert [one.partition(". ")[0] for one in found] == [f"the training changes {name}.dataset.of_torch"]


class Numbers(IterableDataset[Any]):
    """Each pass continues after the one before it."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.position += 1
            yield torch.full((8,), float(self.position)), self.position % 2

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_stream_for_evaluations_that_does_not_continue_is_named(tmp_path: Path) -> None:
    """Checkpoints have the positions of streams that are trained on only."""

    def fit(epochs: int) -> TrainLoop:
        loop = make_loop()
        loop.validation_loader = DataLoader(Numbers(), 2)
        loop.fit(num_epochs=epochs, callbacks=[saved(tmp_path)], resume_from=tmp_path if epochs > 1 else None)
        return loop

    assert warnings_of(lambda: fit(1)) == []
    (found,) = warnings_of(lambda: fit(2))
    assert found.startswith("the checkpoint does not contain validation_loader.dataset.position, which the training")


class Counted(Sampler[int]):
    """Orders by the number of its passes, which no ``set_epoch`` sets."""

    def __init__(self, length: int) -> None:
        self.length, self.passes = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from ((i + self.passes) % self.length for i in range(self.length))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_count_of_a_sampler_is_named_if_a_resumed_run_lacks_it(tmp_path: Path, workers: int) -> None:
    def loop() -> Any:
        made = make_loop(validation=False)
        rows = made.train_loader.dataset
        made.train_loader = DataLoader(rows, 8, sampler=Counted(len(rows)), num_workers=workers)
        return made

    loop().fit(num_epochs=2, callbacks=[saved(tmp_path)])
    with pytest.warns(UserWarning, match=r"does not contain train_loader\.batch_sampler\.sampler\.passes, which"):
        loop().fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9))


class Seen:
    """Counts its calls in all processes, and makes batches by this number, as I-JEPA draws masks."""

    def __init__(self) -> None:
        self.calls = multiprocessing.Value("i", 0)

    def __call__(self, samples: list[Any]) -> Any:
        with self.calls.get_lock():
            self.calls.value += 1
        return default_collate(samples)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_value_that_processes_share_is_named_if_a_resumed_run_lacks_it(
    tmp_path: Path, workers: int, may_leave: Callable[..., None]
) -> None:
    may_leave("/pym-")  # the first value of a process makes a file that multiprocessing keeps

    def loop() -> Any:
        made = make_loop(validation=False)
        made.train_loader = DataLoader(made.train_loader.dataset, 8, collate_fn=Seen(), num_workers=workers)
        return made

    loop().fit(num_epochs=2, callbacks=[saved(tmp_path)])
    with pytest.warns(UserWarning, match=r"does not contain train_loader\.collate_fn\.calls, which"):
        loop().fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9))


class Labelled(Dataset[Any]):
    """One label for each sample, and a cache of samples."""

    def __init__(self, targets: Any) -> None:
        self.targets, self.cache = targets, [None] * len(targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = self.cache[index] or (torch.full((8,), float(index)), index)
        return self.cache[index][0], int(self.targets[index])


class Relabels(AbstractCallback):
    def on_epoch_end(self) -> None:
        rows = self.train_loop_obj.train_loader.dataset
        labels = rows.tensors[1] if isinstance(rows, TensorDataset) else rows.targets
        labels[1500] = 1 - int(labels[1500])


class Replay(IterableDataset[Any]):
    """Samples that a callback collects, in an object of their own."""

    def __init__(self, kind: type) -> None:
        row = (torch.zeros(8), 0)
        self.memory = SimpleNamespace(rows=kind([row, row]), names=kind(["a"]))

    def __iter__(self) -> Iterator[Any]:
        yield from self.memory.rows


class Plays(AbstractCallback):
    def on_epoch_begin(self) -> None:
        memory = self.train_loop_obj.train_loader.dataset.memory
        memory.rows.extend([(torch.ones(8), 1)] * 1001)
        memory.names.append("b")


class Games(Dataset[Any]):
    """A replay buffer of plain values: a state, and the result of its game."""

    def __init__(self) -> None:
        self.moves: deque[Any] = deque([([0.0] * 8, 0)] * 4, maxlen=6)
        self.seconds: deque[float] = deque([0.0], maxlen=6)  # of reading

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.seconds.append(1.0)
        state, result = self.moves[index]
        return torch.tensor(state), result


class PlaysGames(AbstractCallback):
    def on_epoch_begin(self) -> None:
        self.train_loop_obj.train_loader.dataset.moves.append(([1.0] * 8, 1))


class Collects(IterableDataset[Any]):
    def __init__(self) -> None:
        self.collected: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for i in range(4):
            self.collected.append(torch.full((8,), float(i)))
            yield self.collected[-1], 0


# Data, the hooks that change them, and the attribute that is named.
CHANGED: list[Any] = [
    (lambda: Labelled([0] * 2000), Relabels, "targets"),
    (lambda: Labelled(np.zeros(2000, dtype=np.int64)), Relabels, "targets"),
    (lambda: Labelled(torch.zeros(2000, dtype=torch.int64)), Relabels, "targets"),
    (lambda: Labelled([0] * 2000), None, None),
    (lambda: TensorDataset(torch.ones(2000, 8), torch.zeros(2000, dtype=torch.int64)), Relabels, "tensors[1]"),
    (lambda: TensorDataset(torch.ones(2000, 8), torch.zeros(2000, dtype=torch.int64)), None, None),
    (lambda: Replay(list), Plays, "memory.rows"),
    (lambda: Replay(deque), Plays, "memory.rows"),
    (Games, PlaysGames, "moves"),
    (Collects, None, "collected"),
]


@pytest.mark.parametrize("data, hooks, name", CHANGED)
def test_labels_and_samples_that_the_training_changes_are_named_once(
    tmp_path: Path, data: Any, hooks: Any, name: str | None
) -> None:
    loop = make_loop(validation=False)
    loop.train_loader = DataLoader(data(), 500)
    callbacks = [saved(tmp_path), *([hooks("hooks")] if hooks else [])]
    found = warnings_of(lambda: loop.fit(num_epochs=2, callbacks=callbacks))
    text = f"the training changes train_loader.dataset.{name}. Checkpoints"
    assert [one.startswith(text) for one in found] == [True] * (name is not None)


calls = 0  # of functions in this module


class Hook:
    def __init__(self) -> None:
        self.factor = 0.0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.factor += 0.1
        return output * (1 + self.factor)


class Collates:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, rows: Any) -> Any:
        self.seen.append(len(rows))
        return default_collate(rows)


class Follows(optim.SGD):
    norm = 0.0

    def step(self, closure: Any = None) -> Any:
        self.norm += 1.0
        return super().step(closure)


class Shared(Net):
    total = 0.0

    def get_loss(self, *args: Any) -> Tensor:
        Shared.total += 1.0
        return super().get_loss(*args)


class Changes(AbstractCallback):
    """Changes what it is told, after each batch."""

    def __init__(self, kind: str) -> None:
        super().__init__("changes")
        self.kind = kind
        self.best: dict[str, float] = {}
        self._probe = nn.Linear(2, 1)
        self.rates = itertools.cycle([0.1, 0.2])
        self.sizes = iter([8] * 99)
        self.schedule = optim.lr_scheduler.StepLR(optim.SGD(self._probe.parameters(), 0.1), 3)

    def on_batch_end(self) -> None:
        global calls
        if self.kind == "changes.best":
            self.best["loss"] = self.best.get("loss", 0.0) + 1.0
        if self.kind == "changes.sizes":
            next(self.sizes)
        if self.kind == "changes._probe.weight":
            with torch.no_grad():
                self._probe.weight += 1.0
        if self.kind == "changes.schedule.last_epoch":
            self.schedule.last_epoch += 1
        if self.kind == "fc.ratio":
            self.train_loop_obj.model.fc.ratio = getattr(self.train_loop_obj.model.fc, "ratio", 0.0) + 0.5
        if self.kind == "drop.p":
            self.train_loop_obj.model.drop.p = 0.1
        if self.kind == "_count":
            self.train_loop_obj.model._count += 1
        if self.kind == "hidden[0].weight":
            with torch.no_grad():
                self.train_loop_obj.model.hidden[0].weight += 1.0
        if self.kind == "tl.criterion":
            self.train_loop_obj.criterion = Smoothed(label_smoothing=0.1)
        if self.kind.endswith(".calls"):
            calls += 1


class Smoothed(nn.CrossEntropyLoss):
    """Assigned in the place of another class."""


class ChangesWithState(Changes):
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class ChangesOnResume(Changes):
    def on_resume(self) -> None:
        self.best = {"loss": float(self.train_loop_obj.global_step)}


def with_state_in(kind: str, callback: type[Changes] = Changes) -> Callable[..., Any]:
    """Return a function that trains, in the first fit of a process, with state of that name."""

    def fit(**arguments: Any) -> None:
        global calls
        calls, Shared.total = 0, 0.0
        model = Shared() if kind.endswith("total") else Net()
        model.fc.tally, model._count, model.drop = 0, 0, nn.Dropout(0.0)  # type: ignore[assignment]
        model.hidden, model.layers = [nn.Linear(2, 1)], [model.fc]  # type: ignore[assignment]
        loop = make_loop(model, validation=False, optimizer=Follows(model.parameters(), 0.1))
        if kind == "fc.Hook.factor":
            model.fc.register_forward_hook(Hook())
        if kind.startswith("train_loader"):
            loop.train_loader = DataLoader(loop.train_loader.dataset, 8, collate_fn=Collates())
        if kind != "optimizer.norm":
            loop.optimizer.step = lambda closure=None: optim.SGD.step(loop.optimizer, closure)  # type: ignore[method-assign]
        loop.fit(num_epochs=2, **arguments)

    return fit


PLACES = [
    *(
        "changes.best",
        "changes.rates",
        "changes.sizes",
        "changes._probe.weight",
        "changes.schedule.last_epoch",
        "optimizer.norm",
        "fc.Hook.factor",
    ),
    *("train_loader.collate_fn.seen", f"{__name__}.Shared.total", f"{__name__}.calls"),
    *("drop.p", "fc.ratio", "_count", "hidden[0].weight", "tl.criterion"),
]


@pytest.mark.parametrize("kind", PLACES)
def test_what_a_resumed_run_does_not_have_is_named(tmp_path: Path, kind: str) -> None:
    fit = with_state_in(kind)
    fit(callbacks=[Changes(kind), saved(tmp_path)])
    found = warnings_of(
        lambda: fit(callbacks=[Changes(kind), saved(tmp_path / "new")], resume_from=path_of(tmp_path, 9))
    )
    lost = [one for one in found if one.startswith("the checkpoint does not contain ")]
    assert len(lost) == 1
    assert kind in lost[0].partition(", which the training had changed")[0].partition(" contain ")[2].split(", ")


class StepsAnother(AbstractCallback):
    """Steps an optimizer of its own, or that of the model, and keeps that of the loop."""

    def __init__(self, own: Any = None) -> None:
        super().__init__("steps")
        self.own, self.kept = own, []

    def on_train_begin(self) -> None:
        self.kept = [self.train_loop_obj.optimizer]

    def on_after_optimizer_step(self) -> None:
        other = self.own or vars(self.train_loop_obj.model).get("other")
        if other is not None:
            self.train_loop_obj.model.scale.grad = torch.ones(())
            other.step()


@pytest.mark.parametrize("kind", ["other", "steps.own", f"{__name__}.<locals>.optimizers", None])
def test_state_of_an_optimizer_that_is_not_the_loop_s_is_named(tmp_path: Path, kind: str | None) -> None:
    def fit(**arguments: Any) -> None:
        model = Net()
        model.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        optimizers = {model.scale: optim.SGD([model.scale], 0.1, momentum=0.9)}
        callback = StepsAnother(optimizers[model.scale] if kind == "steps.own" else None)
        if kind == "other":
            model.other = optimizers[model.scale]  # type: ignore[assignment]

        def step(parameter: Tensor) -> None:
            model.scale.grad = torch.ones(())
            optimizers[model.scale].step()

        if kind and kind.endswith("optimizers"):
            model.fc.weight.register_post_accumulate_grad_hook(step)
        loop = make_loop(model, validation=False, optimizer=optim.Adam(model.fc.parameters(), 0.1))
        loop.fit(num_epochs=2, callbacks=[callback, saved(tmp_path)], **arguments)

    first = warnings_of(fit)
    assert [one.partition(". Checkpoints")[0] for one in first] == (
        [] if kind in ("steps.own", None) else [f"the training changes {kind}"]
    )
    found = warnings_of(lambda: fit(resume_from=path_of(tmp_path, 9)))
    lost = [one.partition(", which")[0] for one in found if "does not contain" in one]
    assert lost == ([f"the checkpoint does not contain {kind}"] if kind else [])


class Recurrent(nn.LSTM):
    """Has a private list of its parameters."""


class FusedAdam(optim.Adam):
    """Looks at the devices in its first step."""


class Lazy(Net):
    _scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self._of_length: dict[int, Tensor] = {}
        self.recurrent = Recurrent(8, 8)
        self._all = list(self.parameters())

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        if self.mask is None:
            self.mask, self._scale, self._of_length[3] = torch.ones(3), 2.0, torch.ones(3)
        return criterion(self(self.recurrent(x)[0]), y)


class Remembers(TensorDataset):
    """Keeps the place of the last sample, as with a file for many samples."""

    _last: int | None = None

    def __getitem__(self, index: int) -> Any:
        self._last = index
        return super().__getitem__(index)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("step", [9, 14])
def test_what_the_first_step_creates_once_and_what_libraries_keep_is_not_named(tmp_path: Path, step: int) -> None:
    def fit(**arguments: Any) -> None:
        model = Lazy()
        loop = make_loop(model, validation=False, optimizer=FusedAdam(model.parameters(), fused=True))
        loop.train_loader = DataLoader(Remembers(*loop.train_loader.dataset.tensors), 16)
        loop.fit(num_epochs=2, callbacks=[saved(tmp_path)], **arguments)

    fit()
    fit(resume_from=path_of(tmp_path, step))


def lazy(net: Net) -> None:
    net.fc = nn.LazyLinear(3)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        lambda net: nn.utils.spectral_norm(net.fc),
        lambda net: nn.utils.weight_norm(net.fc),
        lambda net: prune.l1_unstructured(net.fc, "weight", amount=0.5),
        lazy,
    ],
    ids=["spectral norm", "weight norm", "pruned", "lazy"],
)
def test_what_layers_of_torch_compute_of_saved_values_is_not_named(tmp_path: Path, change: Any) -> None:
    def fit() -> None:
        net = Net()
        change(net)
        make_loop(net).fit(num_epochs=1, callbacks=[saved(tmp_path)])

    assert not [one for one in warnings_of(fit) if "Checkpoints do not contain this" in one]


def test_a_count_beside_a_parameter_whose_name_has_only_a_suffix_more_is_named(tmp_path: Path) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.w_v = 0, nn.Parameter(torch.zeros(3))

        def get_loss(self, batch: Any, criterion: Any, device: Any) -> Any:
            self.w += 1
            return super().get_loss(batch, criterion, device) + 0 * self.w_v.sum()

    def fit() -> None:
        make_loop(Counts()).fit(num_epochs=1, callbacks=[saved(tmp_path)])

    assert [one for one in warnings_of(fit) if "the training changes w. Checkpoints do not contain this" in one]


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_metrics_of_the_user_are_not_named(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class OwnAccuracy(torchmetrics.classification.MulticlassAccuracy):  # type: ignore[misc, name-defined]
        """Counts its updates in a private attribute."""

    def fit(**arguments: Any) -> None:
        model = Net()
        model.own = OwnAccuracy(3)
        model.fc.register_forward_hook(lambda _, args, output: model.own.update(output.detach(), output.argmax(1)))
        make_loop(model, validation=False).fit(num_epochs=2, callbacks=[saved(tmp_path)], **arguments)

    fit()
    fit(resume_from=path_of(tmp_path, 9))


class Arguments(Net):
    """Saves a part of its attributes, as the guide does for the arguments of a constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    def get_loss(self, *args: Any) -> Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + 1
        return super().get_loss(*args)


def test_of_a_module_that_saves_a_part_of_its_state_the_rest_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_loop(Arguments(), validation=False).fit(num_epochs=2, callbacks=[saved(tmp_path)])
    with pytest.warns(UserWarning, match="the checkpoint does not contain calls, which"):
        make_loop(Arguments(), validation=False).fit(
            num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9)
        )


class Weighs(Net):
    """Gives a value to a buffer that is None at first, and changes it in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", None)

    def get_loss(self, *args: Any) -> Tensor:
        self.weight = torch.ones(()) if self.weight is None else self.weight * 1.01
        return super().get_loss(*args) * self.weight


def test_a_buffer_that_is_none_at_first_is_saved_and_not_named(tmp_path: Path) -> None:
    first = make_loop(Weighs(), validation=False)
    first.fit(num_epochs=2, callbacks=[saved(tmp_path)])
    resumed = make_loop(Weighs(), validation=False)
    found = warnings_of(
        lambda: resumed.fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9))
    )
    assert not [one for one in found if "does not contain" in one]
    assert torch.equal(resumed.model.weight, first.model.weight)


@pytest.mark.parametrize("callback", [ChangesWithState, ChangesOnResume])
def test_what_a_callback_restores_is_not_named(tmp_path: Path, callback: Any) -> None:
    fit = with_state_in("changes.best", callback)
    fit(callbacks=[callback("changes.best"), saved(tmp_path)])
    resumed = [callback("changes.best"), saved(tmp_path)]
    found = warnings_of(lambda: fit(callbacks=resumed, resume_from=path_of(tmp_path, 9)))
    assert not [one for one in found if "does not contain changes.best" in one]


class Raises:
    """An object whose methods raise errors of any kind."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __len__(self) -> int:
        raise ValueError


class RaisesAsInt(int):
    def __repr__(self) -> str:
        raise ValueError

    __index__ = __repr__  # type: ignore[assignment]


ODD: dict[str, Callable[[], Any]] = {
    "not contiguous": lambda: torch.zeros(8, 3)[:, 0],
    "expanded": lambda: torch.zeros(1).expand(8),
    "conjugate": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "freed": lambda: freed(torch.zeros(8)),
    "large number": lambda: 1 << 100_000,
    "errors": Raises,
    "number with errors": lambda: RaisesAsInt(3),
    "list with errors": lambda: [Raises()],
    "module": lambda: random,
    "mock": mock.MagicMock,
}


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


class OddRows(Dataset[Any]):
    def __init__(self, odd: Any) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        random.random()
        return torch.zeros(8), 0


@pytest.mark.parametrize("kind", ODD)
def test_odd_attributes_never_end_a_training(tmp_path: Path, kind: str) -> None:
    model, callback, odd = Net(), Changes("nothing"), ODD[kind]()
    model.fc.odd = callback.odd = odd  # type: ignore[attr-defined]
    loop = make_loop(model, validation=False)
    loop.train_loader = DataLoader(OddRows(odd), 4)
    found = warnings_of(lambda: loop.fit(num_epochs=1, callbacks=[callback, saved(tmp_path)]))
    assert found == []
    assert loop.global_step == 4


def test_an_odd_attribute_hides_no_other(tmp_path: Path) -> None:
    class Odd(AbstractCallback):
        def __init__(self) -> None:
            super().__init__("odd")
            self.gone = weakref.proxy(Pool())

    fit = with_state_in("changes.best")
    callbacks = [Odd(), Changes("changes.best")]
    fit(callbacks=[*callbacks, saved(tmp_path)])
    callbacks = [Odd(), Changes("changes.best")]
    found = warnings_of(lambda: fit(callbacks=[*callbacks, saved(tmp_path / "new")], resume_from=path_of(tmp_path, 9)))
    assert any(one.startswith("the checkpoint does not contain changes.best, ") for one in found)


def test_a_finished_run_names_what_it_lacks(tmp_path: Path) -> None:
    fit = with_state_in("changes.best")
    for _ in range(2):
        found = warnings_of(lambda: fit(callbacks=[Changes("changes.best"), saved(tmp_path)], resume_from="last"))
    assert [one[:66] for one in found] == ["the checkpoint does not contain changes.best, changes.rates, which"]


class Meter(AbstractCallback):
    """The losses of an epoch, the number of all, and a flag that alternates."""

    def __init__(self) -> None:
        super().__init__("meter")
        self.losses: list[float] | None = None
        self.count = 0
        self.trains_head = False

    def on_epoch_begin(self) -> None:
        self.losses = []
        self.trains_head = not self.trains_head

    def on_batch_end(self) -> None:
        self.losses = [*(self.losses or []), float(self.train_loop_obj.last_loss)]
        self.count += 1


@pytest.mark.parametrize(
    "step, names", [(9, "meter.losses, meter.count"), (14, "meter.count"), (21, "meter.count, meter.trains_head")]
)
def test_what_each_epoch_begins_anew_is_lost_only_within_an_epoch(tmp_path: Path, step: int, names: str) -> None:
    epochs = 3 if step == 21 else 2
    make_loop(validation=False).fit(epochs, callbacks=[Meter(), saved(tmp_path)])
    resumed: Any = {"callbacks": [Meter(), saved(tmp_path / "new")], "resume_from": path_of(tmp_path, step)}
    found = warnings_of(lambda: make_loop(validation=False).fit(epochs + 1, **resumed))
    named = [one.partition(" contain ")[2].partition(", which")[0] for one in found if one.startswith("the checkpoint")]
    assert named == [names]


class OfEpoch(Dataset[Any]):
    """A dataset that the loop tells the epoch."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.epoch = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.rows[(index + self.epoch) % len(self)]


@pytest.mark.parametrize("step", [10, 14, 21])  # within an epoch, at an epoch's end, and at the end
def test_what_set_epoch_sets_is_not_lost(tmp_path: Path, step: int) -> None:
    def loop_of() -> Any:
        loop = make_loop(validation=False)
        loop.train_loader = DataLoader(OfEpoch(loop.train_loader.dataset), 16)
        return loop

    loop_of().fit(3, callbacks=[saved(tmp_path)])
    resumed: Any = {"callbacks": [saved(tmp_path / "new")], "resume_from": path_of(tmp_path, step)}
    assert not warnings_of(lambda: loop_of().fit(3, **resumed))


# -- modules that create what they load --------------------------------------------------------------------------------


class Normalizer(nn.Module):
    """Its tensors are created when it sees data, or when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict()

    def see(self, mean: float) -> Normalizer:
        self.values["mean"] = nn.Parameter(torch.full((8,), mean), requires_grad=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x - self.values["mean"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in [name for name in state_dict if name.startswith(f"{prefix}values.")]:
            self.values[name.rpartition(".")[2]] = nn.Parameter(state_dict[name].clone(), requires_grad=False)


class Normalizes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.normalizer(x))


def normalizes(mean: float | None) -> Normalizes:
    torch.manual_seed(0)
    model = Normalizes()
    if mean is not None:
        model.normalizer.see(mean)
    return model


@pytest.mark.parametrize("mean", [0.5, None], ids=["other values", "nothing"])
def test_a_module_that_creates_what_it_loads_resumes(tmp_path: Path, mean: float | None) -> None:
    whole, resumed = normalizes(2.0), normalizes(mean)
    first, second = (
        make_loop(model, validation=False, optimizer=optim.SGD(model.fc.parameters(), 0.1, 0.9))
        for model in (whole, resumed)
    )
    first.fit(num_epochs=2, callbacks=[saved(tmp_path)])
    kept = dict(resumed.named_parameters())
    second.fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert len(resumed.state_dict()) == 3
    # Optimizers and wrappers hold these objects.
    assert all(p is kept[name] for name, p in resumed.named_parameters() if name in kept)


class LoadsAnything(Net):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


def test_a_model_that_ignores_what_it_lacks_is_still_refused(tmp_path: Path) -> None:
    make_loop(normalizes(2.0), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path)])
    with pytest.raises(CheckpointError, match=r"normalizer.values.mean is not in the model"):
        make_loop(LoadsAnything()).fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from="last")
