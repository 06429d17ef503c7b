"""The cost of short epochs, of evaluations and of predictions in one process: python -m benchmarks.epochs"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import others, work
from benchmarks.pages import Size
from benchmarks.timing import BY_HAND, Table, interleaved
from trainloop import TrainLoop

CPU = torch.device("cpu")


def epochs_by_hand(
    model: nn.Module, loader: DataLoader[Any], validation_loader: DataLoader[Any] | None, epochs: int
) -> None:
    """The hand-written loop, with a validation after each epoch."""
    optimizer = others.sgd(model)
    for _ in range(epochs):
        work.train_by_hand(model, loader, optimizer, 1, CPU)
        if validation_loader is not None:
            evaluate_by_hand(model, validation_loader)


def epochs_with_trainloop(
    model: Any, loader: DataLoader[Any], validation_loader: DataLoader[Any] | None, epochs: int
) -> None:
    loop = TrainLoop(
        model,
        loader,
        validation_loader,
        optimizer=others.sgd(model),
        criterion=others.CRITERION,
        accelerator="cpu",
        progress_bar=False,
    )
    with others.shown(on_terminal=False):
        loop.fit(num_epochs=epochs)


def evaluate_by_hand(model: nn.Module, loader: DataLoader[Any]) -> None:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += others.CRITERION(model(x), y).item() * len(x)
            count += len(x)


def predict_by_hand(model: nn.Module, loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Keep the rows of all batches, and join them."""
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in loader:
            outputs.append(model(x))
            targets.append(y)
    return torch.cat(outputs), torch.cat(targets)


def short_epochs(title: str, note: str, *, validates: bool, aim: float, size: Size) -> Table:
    epochs = size.steps(1000)
    model = work.MLP()
    loader = work.loader_of(work.data_for(model, 1))
    validation_loader = DataLoader(work.data_for(model, 1), batch_size=work.BATCH) if validates else None

    def once(train: Callable[..., None]) -> None:
        train(copy.deepcopy(model), loader, validation_loader, epochs)

    return interleaved(
        {BY_HAND: partial(once, epochs_by_hand), "trainloop": partial(once, epochs_with_trainloop)},
        Table(title, note, unit="µs an epoch", steps=epochs, aims={"trainloop": aim}),
        size,
    )


def tables(size: Size) -> list[Table]:
    torch.set_num_threads(1)
    model = work.MLP()
    loader = DataLoader(work.data_for(model, size.steps(1000)), batch_size=work.BATCH)
    loop: Any = TrainLoop(model, None, criterion=others.CRITERION, accelerator="cpu", progress_bar=False)
    steps = len(loader)
    of_evaluation: dict[str, Callable[[], None]] = {
        BY_HAND: partial(evaluate_by_hand, model, loader),
        "trainloop": lambda: (loop.evaluate_model_loss(loader), None)[1],
    }
    of_predictions: dict[str, Callable[[], None]] = {
        BY_HAND: lambda: (predict_by_hand(model, loader), None)[1],
        "trainloop": lambda: (loop.predict_with_model(loader), None)[1],
    }
    return [
        short_epochs(
            "An epoch of one step",
            "The MLP for 1,000 epochs of one batch, in one call of ``fit``.",
            validates=False,
            aim=1.10,
            size=size,
        ),
        short_epochs(
            "An epoch of one step, with validation",
            "The same, with a validation of one batch after each epoch.",
            validates=True,
            aim=1.20,
            size=size,
        ),
        interleaved(
            of_evaluation,
            Table("Evaluation", "The mean loss over 1,000 batches of 32.", steps=steps, aims={"trainloop": 1.0}),
            size,
        ),
        interleaved(
            of_predictions,
            Table(
                "Predictions",
                "Predictions of 1,000 batches of 32; ``PyTorch`` keeps the rows of each batch, and joins them.",
                steps=steps,
                aims={"trainloop": 1.0},
            ),
            size,
        ),
    ]


if __name__ == "__main__":
    tables(Size(9))
