"""The cost of a training step in one process: python -m benchmarks.step"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import others, work
from benchmarks.pages import Size
from benchmarks.timing import BY_HAND, Table, interleaved
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import TensorBoard

CPU = torch.device("cpu")


def by_hand(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
    work.train_by_hand(model, loader, others.sgd(model), epochs, CPU)


def at_the_floor(model: nn.Module, loader: DataLoader[Any], epochs: int, *, metrics: int = 0) -> None:
    work.train_at_the_floor(model, loader, others.sgd(model), epochs, metrics)


def with_trainloop(
    model: Any, loader: DataLoader[Any], epochs: int, *, tensorboard: bool = False, **options: Any
) -> None:
    options.setdefault("progress_bar", False)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [TensorBoard(folder, log_every_n_steps=1)] if tensorboard else []
        loop = loop_of(model, loader, **options)
        with others.shown(on_terminal=options["progress_bar"]):
            loop.fit(num_epochs=epochs, callbacks=callbacks)


def loop_of(model: Any, loader: DataLoader[Any], **options: Any) -> TrainLoop[Any]:
    """A loop on the CPU, with the optimizer and criterion of the other libraries' trainings."""
    return TrainLoop(
        model, loader, optimizer=others.sgd(model), criterion=others.CRITERION, accelerator="cpu", **options
    )


class SecondsAfter(AbstractCallback):
    """Seconds of the steps after the first ones, in which a step is compiled."""

    def __init__(self, first: int) -> None:
        super().__init__("seconds after")
        self.first, self.began, self.seconds = first, 0.0, 0.0

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step == self.first:
            self.began = time.perf_counter()

    def on_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.began


def as_one_graph(model: Any, loader: DataLoader[Any], epochs: int) -> float:
    """``compile='step'``, without the time that it takes to compile."""
    clock = SecondsAfter(max(1, len(loader) // 10))
    loop = loop_of(model, loader, progress_bar=False, compile="step")
    loop.fit(num_epochs=epochs, callbacks=[clock])
    return clock.seconds * len(loader) / (len(loader) - clock.first)


def with_ten_scalars(model: nn.Module, loader: DataLoader[Any], epochs: int) -> None:
    """A hand-written loop with ten metrics a step with ``add_scalar``: what a user would write."""
    from torch.utils.tensorboard import SummaryWriter

    optimizer = others.sgd(model)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        step = 0
        for _ in range(epochs):
            for x, y in loader:
                loss = others.CRITERION(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                for i in range(10):
                    writer.add_scalar(f"metric_{i}", loss.detach(), step)
                step += 1


def compare(
    title: str,
    note: str,
    make_model: Callable[[], nn.Module],
    contenders: dict[str, Callable[..., float | None]],
    size: Size,
    *,
    batches: int,
    make_data: Callable[[Any], Any] = lambda data: data,
    **aims: Any,
) -> Table:
    """Train copies of one model for an epoch, by each contender in turn."""
    model, batches = make_model(), size.steps(batches)
    loader = work.loader_of(make_data(work.data_for(model, batches)))
    runs = {name: partial(_once, train, model, loader) for name, train in contenders.items()}
    return interleaved(runs, Table(title, note, steps=batches, **aims), size)


def _once(train: Callable[..., float | None], model: nn.Module, loader: DataLoader[Any]) -> float | None:
    return train(copy.deepcopy(model), loader, 1)


FLOOR, FLOOR_WITH_TENSORBOARD = "public torch calls", "public torch calls, TensorBoard"


def tables(size: Size) -> list[Table]:
    torch.set_num_threads(1)
    lightning = importlib.util.find_spec("lightning") is not None
    in_memory: dict[str, Callable[..., float | None]] = {
        BY_HAND: by_hand,
        FLOOR: at_the_floor,
        "trainloop": with_trainloop,
        "trainloop, bar": partial(with_trainloop, progress_bar=True),
        "trainloop, compile='step'": as_one_graph,
        **others.installed(),
    }
    if lightning:
        in_memory["Lightning, bar"] = others.later(partial(others.with_lightning, bar=True))
    logging: dict[str, Callable[..., float | None]] = {
        BY_HAND: by_hand,
        FLOOR_WITH_TENSORBOARD: partial(at_the_floor, metrics=10),
        "PyTorch, 10 add_scalar": with_ten_scalars,
        "trainloop, 10 metrics": with_trainloop,
        "trainloop, 10 metrics, TensorBoard": partial(with_trainloop, tensorboard=True),
    }
    if lightning:
        logging["Lightning, 10 metrics"] = others.later(partial(others.with_lightning, metrics=10))
    pair: dict[str, Callable[..., float | None]] = {BY_HAND: by_hand, "trainloop": with_trainloop}
    return [
        compare(
            "MLP, in memory",
            "An MLP with layers of size 32, 64 and 10, batches of 32 from a shuffled TensorDataset, and SGD; 2,000\n"
            f"steps in one call of ``fit``. The floor, ``{FLOOR}``, does the same training by one indexing operation\n"
            "for each tensor of a batch, forward, backward, ``step()`` and ``zero_grad()``. Losses stay on the device.",
            work.MLP,
            in_memory,
            size,
            batches=2000,
            floor=FLOOR,
            floor_aims={"trainloop": 1.05},
            aims={"trainloop, bar": 0.75, "trainloop, compile='step'": 0.40},
        ),
        compare(
            "MLP, ten metrics a step",
            "The same training; ``PyTorch`` logs nothing. The floor writes ten values a step by TensorBoard's own\n"
            "``EventFileWriter``, as one event.",
            work.Logging,
            logging,
            size,
            batches=2000,
            floor=FLOOR_WITH_TENSORBOARD,
            floor_aims={"trainloop, 10 metrics, TensorBoard": 1.10},
        ),
        compare(
            "MLP, a Dataset that is read row by row",
            "The dataset has a Python ``__getitem__``, so no library can read a whole batch at once.",
            work.MLP,
            pair,
            size,
            batches=2000,
            aims={"trainloop": 1.03},
            make_data=work.RowByRow,
        ),
        compare(
            "CNN",
            "Two convolutions over 16 x 16 images.",
            work.CNN,
            {**pair, FLOOR: at_the_floor},
            size,
            batches=300,
            aims={"trainloop": 0.95},
            floor=FLOOR,
            floor_aims={"trainloop": 1.05},
        ),
        compare(
            "Transformer",
            "Two layers, width 64, sequences of 32.",
            work.Transformer,
            pair,
            size,
            batches=60,
            aims={"trainloop": 1.0},
        ),
    ]


if __name__ == "__main__":
    tables(Size(9))
