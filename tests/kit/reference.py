"""Hand-written PyTorch loops: what the library's numbers are compared with.

Nothing here imports trainloop. Each function is what a careful user would write for that one case, and is short enough
to be checked by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Loss = Callable[[nn.Module, Any], Tensor]  # of a batch, a mean over its samples


def by_get_loss(criterion: Any = None) -> Loss:
    """The loss that the model's own ``get_loss`` returns."""
    return lambda model, batch: model.get_loss(batch, criterion, torch.device("cpu"))  # type: ignore[operator]


def train(model: nn.Module, loader: Iterable[Any], optimizer: Optimizer, loss_of: Loss, num_epochs: int) -> list[float]:
    """The plain loop. Returns each epoch's mean loss over samples."""
    epoch_losses = []
    for _ in range(num_epochs):
        model.train()
        total, count = 0.0, 0
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch[0])
            count += len(batch[0])
        epoch_losses.append(total / count)
    return epoch_losses


def train_scheduled(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    loss_of: Loss,
    num_epochs: int,
    scheduler: LRScheduler,
    every: str,
    max_norm: float | None = None,
) -> list[float]:
    """A scheduler stepped after each optimizer step or after each epoch. Returns the learning rate of every step."""
    rates = []
    for _ in range(num_epochs):
        for batch in loader:
            loss_of(model, batch).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if every == "step":
                scheduler.step()
        if every == "epoch":
            scheduler.step()
    return rates


def groups(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` batches; the epoch's last one may be shorter."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group


def train_accumulated(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    loss_of: Loss,
    num_epochs: int,
    accumulation: int,
    max_norm: float | None = None,
) -> int:
    """One step for ``accumulation`` micro-batches, equal to that of one batch of them all. Returns the steps done."""
    steps = 0
    for _ in range(num_epochs):
        for micro_batches in groups(loader, accumulation):
            sizes = [len(batch[0]) for batch in micro_batches]
            for batch, size in zip(micro_batches, sizes):
                loss = loss_of(model, batch)
                if len(set(sizes)) == 1:
                    loss = loss / len(sizes)
                else:  # the dataset's last batch is short: each counts by its samples
                    loss = loss * (size / sum(sizes))
                loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def largest_difference(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor]) -> float:
    """The largest absolute difference between two models' (or state dicts') tensors of the same names."""
    left = a.state_dict() if isinstance(a, nn.Module) else a
    right = b.state_dict() if isinstance(b, nn.Module) else b
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    return max((left[k].double() - right[k].double()).abs().max().item() for k in left)


def identical(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor]) -> bool:
    """Whether all tensors of two models (or state dicts) are equal, bit for bit."""
    left = a.state_dict() if isinstance(a, nn.Module) else a
    right = b.state_dict() if isinstance(b, nn.Module) else b
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
