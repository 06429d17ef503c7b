"""What every entry of the suite of the world is put through, in each mode.

An entry is what a user brings: a model, loaders, an optimizer, and the loop that its own community writes by hand.
Here it is trained by that loop and by :class:`TrainLoop`, killed and resumed, and evaluated:

* ``single``: the same bits as the hand-written loop;
* ``ddp`` with two CPU ranks, and where a file asks for it ``fsdp``: the hand-written loop in one process over batches
  twice as large;
* a run killed by SIGKILL after a few steps and resumed by fresh objects: the bits of one that nobody disturbed;
* predictions: every sample once, in order, and the loss is that of a plain pass over the loader.

Only the folder's tests are marked ``ecosystem``; they need the extra ``test-ecosystem``.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainloop import TrainLoop
from trainloop.callbacks import AbstractCallback, ModelCheckpoint
from trainloop.errors import WorkerFailedError

CPU = torch.device("cpu")
EVERY, KILL_AFTER = 2, 5  # steps between checkpoints; the step after which a run is killed: the last one is lost
FORK_TIMEOUT_S = 60


@dataclass
class Parts:
    """All that a run needs, made anew for each."""

    model: Any
    train: Any
    optimizer: Any
    held_out: Any = None
    """Loader of the validation set; ``None`` where there is nothing to predict."""
    criterion: Any = None
    callbacks: list[AbstractCallback] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One thing of the world."""

    name: str
    make: Callable[[int, bool], Parts]
    """``make(batch_size, shuffle)``; called after ``torch.manual_seed``."""
    by_hand: Callable[[Parts, int], None]
    """``by_hand(parts, epochs)``: the loop without trainloop."""
    batch: int = 8
    epochs: int = 2
    tolerance: float = 1e-9
    """Between ranks and the hand-written loop: 1e-9 for models in float64, 1e-5 in float32."""
    comparable: bool = True
    """Whether ``ddp`` has a counterpart in one process; not where chance is part of a batch, or a rank's own batch."""
    loop: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``fit`` in ``ddp`` only."""

    def __repr__(self) -> str:
        return self.name


def in_all_modes(*entries: Entry) -> tuple[Callable[..., None], Callable[..., None]]:
    """A file's two tests: ``test_single, test_ddp = in_all_modes(...)``."""

    def test_single(entry: Entry, folder: Path) -> None:
        check_single(entry, folder)

    def test_ddp(entry: Entry, folder: Path) -> None:
        check_ranks(entry, folder, "ddp")

    return _marked(test_single, entries), _marked(test_ddp, entries)


def in_fsdp(*entries: Entry) -> Callable[..., None]:
    """A test for models of many parts: ``test_fsdp = in_fsdp(...)``."""

    def test_fsdp(entry: Entry, folder: Path) -> None:
        check_ranks(entry, folder, "fsdp")

    return _marked(test_fsdp, entries)


def _marked(test: Callable[..., None], entries: Sequence[Entry]) -> Callable[..., None]:
    marks = [
        pytest.mark.ecosystem,
        pytest.mark.parametrize("entry", entries, ids=repr),
        # What libraries say of their own and each other's.
        pytest.mark.filterwarnings("ignore::FutureWarning"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning"),
        pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning"),
        pytest.mark.filterwarnings("ignore::ResourceWarning"),  # webdataset leaves its files to the collector
    ]
    for mark in marks:
        test = mark(test)
    return test


# -- what the entries are made of --------------------------------------------------------------------------------------


def plain(loss_of: Callable[[Any, Any], Tensor]) -> Callable[[Parts, int], None]:
    """The loop of PyTorch's tutorials, for ``loss_of(model, batch)``."""

    def by_hand(parts: Parts, epochs: int) -> None:
        for _ in range(epochs):
            parts.model.train()
            for batch in parts.train:
                parts.optimizer.zero_grad()
                loss_of(parts.model, batch).backward()
                parts.optimizer.step()

    return by_hand


class Items(Dataset[Any]):
    """A map-style dataset over a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that don't depend on what was drawn before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randint(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def loaders(data: Dataset[Any], held_out: Dataset[Any], batch: int, shuffle: bool, **arguments: Any) -> dict[str, Any]:
    """``Parts``' two loaders; the held-out one has batches of another size."""
    return {
        "train": DataLoader(data, batch, shuffle=shuffle, **arguments),
        "held_out": DataLoader(held_out, 3, **arguments),
    }


# -- the checks --------------------------------------------------------------------------------------------------------


def check_single(entry: Entry, folder: Path) -> None:
    hand = fresh(entry, entry.batch, shuffle=True)
    torch.manual_seed(7)
    entry.by_hand(hand, entry.epochs)
    ours = fresh(entry, entry.batch, shuffle=True)
    torch.manual_seed(7)
    # A hand-written loop that evaluated between epochs would draw the same numbers; these don't.
    tl = train(entry, ours, "single", end_auto_eval=False)
    assert differing(ours.model, hand.model) == {}, "single is not the hand-written loop"
    if ours.held_out is not None:
        predictions = tl.predict_on_validation_set()
        assert_evaluated(ours, predictions, tl.evaluate_loss_on_validation_set(), tolerance=0.0)

    whole = fresh(entry, entry.batch, shuffle=True)
    train(entry, whole, "single", seed=3)
    assert forked(lambda: killed(entry, "single", folder)) == -signal.SIGKILL
    assert_resumed(entry, "single", folder, whole)


def check_ranks(entry: Entry, folder: Path, mode: str) -> None:
    ours = fresh(entry, entry.batch, shuffle=False, calm=True)
    predict = Predict() if ours.held_out is not None else None
    train(entry, ours, mode, callbacks=[predict] if predict else [], seed=3)
    if entry.comparable:
        hand = fresh(entry, 2 * entry.batch, shuffle=False, calm=True)
        entry.by_hand(hand, entry.epochs)
        far = {name: by for name, by in differing(ours.model, hand.model).items() if not by <= entry.tolerance}
        worst = sorted(far.items(), key=lambda item: -item[1])[:4]
        assert far == {}, f"{mode} is not one process over the global batch: {worst}"
    if predict:
        assert_evaluated(ours, predict.predictions, predict.loss, max(entry.tolerance, 1e-6))

    with pytest.raises(WorkerFailedError) as error:
        killed(entry, mode, folder)
    assert (error.value.rank, error.value.exitcode) == (1, -signal.SIGKILL)
    assert_resumed(entry, mode, folder, ours)


def fresh(entry: Entry, batch: int, *, shuffle: bool, calm: bool = False) -> Parts:
    """New parts, always the same. ``calm``: without dropout, which draws other numbers on each rank."""
    torch.manual_seed(0)
    parts = entry.make(batch, shuffle)
    for module in parts.model.modules() if calm else ():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # nn.LSTM's, nn.MultiheadAttention's, T5's attention
            module.dropout = 0.0
    return parts


def train(
    entry: Entry, parts: Parts, mode: str, callbacks: list[AbstractCallback] | None = None, resume_from: Any = None,
    **arguments: Any,
) -> TrainLoop:  # fmt: skip
    ranks: dict[str, Any] = {} if mode == "single" else {"devices": 2}
    tl = cpu_loop(
        parts.model,
        parts.train,
        parts.optimizer,
        parts.criterion,
        validation_loader=parts.held_out,
        gpu_mode=mode,
        timeout=120,
        **{**ranks, **entry.loop, **arguments},
    )
    in_fit = entry.ddp if mode == "ddp" else {}
    tl.fit(entry.epochs, callbacks=[*parts.callbacks, *(callbacks or [])], resume_from=resume_from, **in_fit)
    return tl


def killed(entry: Entry, mode: str, folder: Path) -> None:
    parts = fresh(entry, entry.batch, shuffle=mode == "single", calm=mode != "single")
    train(entry, parts, mode, [keeper(folder), Kill(KILL_AFTER)], seed=3)


def assert_resumed(entry: Entry, mode: str, folder: Path, whole: Parts) -> None:
    """What was killed is trained to its end, by new objects, and is what nobody disturbed."""
    parts = fresh(entry, entry.batch, shuffle=mode == "single", calm=mode != "single")
    tl = train(entry, parts, mode, [keeper(folder)], resume_from="last", seed=3)
    assert tl.global_step > KILL_AFTER, "the run is too short to be killed"
    assert differing(parts.model, whole.model) == {}, "resumed is not undisturbed"


def keeper(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", every_n_epochs=None, every_n_steps=EVERY)


class Kill(AbstractCallback):
    """SIGKILL to the last rank, from within."""

    def __init__(self, step: int) -> None:
        super().__init__("Kill")
        self.step = step

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == self.step and loop.rank == loop.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Predict(AbstractCallback):
    """Predictions and loss of the ranks that trained, with the weights that training ended with, brought back."""

    def __init__(self) -> None:
        super().__init__("Predict")
        self.predictions: Any = None
        self.loss = float("nan")

    def on_train_end(self) -> None:
        self.predictions = self.train_loop_obj.predict_on_validation_set()
        self.loss = self.train_loop_obj.evaluate_loss_on_validation_set()


def differing(ours: nn.Module, theirs: nn.Module) -> dict[str, float]:
    """By how much, for each tensor that is not the same in both."""
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    return {
        name: (a[name].double() - b[name].double()).abs().max().item()
        for name in a
        if isinstance(a[name], Tensor) and not torch.equal(a[name], b[name])
    }


def assert_evaluated(parts: Parts, predictions: Any, loss: float, tolerance: float) -> None:
    """``predictions`` and ``loss`` are those of a plain pass over the held-out loader."""
    model = parts.model
    predicted, truth = [], []
    for y_pred, y_true, _ in one_pass(parts, lambda batch: model.get_predictions(batch, CPU)):
        predicted += rows(y_pred)
        truth += rows(y_true)
    sizes = [len(rows(y_true)) for _, y_true, _ in one_pass(parts, lambda batch: model.get_predictions(batch, CPU))]
    losses = one_pass(parts, lambda batch: model.get_loss_eval(batch, parts.criterion, CPU))
    # A mean over the units of the weight where there is one, else over samples; of a sum, a sample's part.
    summed = getattr(parts.criterion, "reduction", "mean") == "sum"
    weighted = [loss if isinstance(loss, tuple) else (loss, 1 if summed else n) for loss, n in zip(losses, sizes)]
    units = sum(sizes) if summed else sum(float(weight) for _, weight in weighted)
    total = sum(float(value) * float(weight) for value, weight in weighted)
    assert_same_rows(rows(predictions[1]), truth, 0.0)
    assert_same_rows(rows(predictions[0]), predicted, tolerance)
    assert loss == pytest.approx(total / units, rel=1e-6)


def one_pass(parts: Parts, what: Callable[[Any], Any]) -> list[Any]:
    """``what(batch)`` of each batch held out, by hand."""
    parts.model.eval()
    parts.model.on_evaluation_begin({})
    with torch.no_grad():
        found = [what(batch) for batch in parts.held_out]
    parts.model.on_evaluation_end({})
    return found


def rows(values: Any) -> list[Any]:
    return list(values.unbind()) if isinstance(values, Tensor) else list(values)


def assert_same_rows(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(torch.as_tensor(a), b, rtol=0, atol=tolerance)
        else:
            assert a == b


def forked(job: Callable[[], None]) -> int:
    """Exit code of ``job`` in a fork of this process; negative is a signal's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(FORK_TIMEOUT_S)
        try:
            job()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def steps(parts: Parts, epochs: int) -> Iterator[Any]:
    """Each epoch's batches, for loops that schedule by steps."""
    for _ in range(epochs):
        parts.model.train()
        yield from parts.train
