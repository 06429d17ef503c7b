"""Models and data that the benchmarks train, and the hand-written PyTorch loop that all are compared with."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainloop import TTBasicModel

BATCH = 32


class MLP(TTBasicModel):
    """32-64-10: so small that the cost of the loop itself shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CNN(TTBasicModel):
    """Two convolutions over 16 x 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Transformer(TTBasicModel):
    """Two layers, width 64, sequences of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


class Logging(MLP):
    """Ten metrics logged each step."""

    number = 10

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        loss = super().get_loss(batch_data, criterion, device)
        value = loss.detach()
        for i in range(self.number):
            self.log(f"metric_{i}", value)
        return loss


class RowByRow(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset of Python code that can't be read a batch at a time."""

    def __init__(self, data: TensorDataset) -> None:
        self.x, self.y = data.tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def data_for(model: nn.Module, batches: int) -> TensorDataset:
    torch.manual_seed(0)
    rows = batches * BATCH
    y = torch.randint(10, (rows,))
    if isinstance(model, CNN):
        return TensorDataset(torch.randn(rows, 3, 16, 16), y)
    if isinstance(model, Transformer):
        return TensorDataset(torch.randint(64, (rows, 32)), y)
    return TensorDataset(torch.randn(rows, 32), y)


def loader_of(data: Dataset[Any], **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, shuffle=True, **arguments)


def train_by_hand(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, epochs: int, device: torch.device
) -> None:
    """The loop of PyTorch's own tutorials, with the epoch's mean loss and without a bar."""
    criterion = nn.CrossEntropyLoss()
    model.train()
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        (total / len(loader)).item()


def train_at_the_floor(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, epochs: int, metrics: int = 0
) -> None:
    """The same training by public calls of torch and nothing else, for rows of tensors in memory.

    One indexing operation for each tensor of a batch, forward, backward, ``step()`` and ``zero_grad()``. Losses stay on
    the device.
    With ``metrics``, each step writes that many values by TensorBoard's own writer, as one event.
    """
    criterion = nn.CrossEntropyLoss()
    inputs, targets = loader.dataset.tensors  # type: ignore[attr-defined]
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        writer = EventFileWriter(folder) if metrics else None
        model.train()
        for _ in range(epochs):
            losses, values = [], []
            for index in torch.randperm(len(inputs)).split(BATCH):
                loss = criterion(model(inputs[index]), targets[index])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                values += losses[-1:] * metrics
                if writer is not None and len(losses) % 128 == 0:
                    step = _write(writer, values, metrics, step)
            if writer is not None:
                step = _write(writer, values, metrics, step)
            torch.stack(losses).mean().item()
        if writer is not None:
            writer.close()


def _write(writer: EventFileWriter, values: list[Tensor], metrics: int, step: int) -> int:
    """Write the values of each step as one event; empty the list, and return the next step."""
    numbers = torch.stack(values).tolist() if values else []
    values.clear()
    for first in range(0, len(numbers), metrics):
        pairs = [Summary.Value(tag=f"metric_{i}", simple_value=numbers[first + i]) for i in range(metrics)]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=pairs)))
        step += 1
    return step
