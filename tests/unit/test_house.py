"""What a reader of one step meets, counted: frames, files and calls; and that no imports go in a circle."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainloop
from trainloop import TrainLoop, TTModel

PACKAGE = Path(trainloop.__file__).parent


# -- one step, traced --------------------------------------------------------------------------------------------------


class Net(TTModel):
    """Notes the stack in ``get_loss``, and which batch it got."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.stack: list[str] = []
        self.batches: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        frame: FrameType | None = sys._getframe(1)
        self.stack = []
        while frame is not None:
            if is_own(frame.f_code.co_filename):
                self.stack.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else "?")
            frame = frame.f_back
        self.batches.append(x)
        return criterion(self(x), y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        raise NotImplementedError


def is_own(file: str) -> bool:
    return file.startswith(str(PACKAGE))


def holds(value: Any, batch: Tensor, depth: int = 3) -> bool:
    """Whether a value is a batch, or a tuple or list with it inside."""
    if value is batch:
        return True
    return depth > 0 and isinstance(value, (tuple, list)) and any(holds(part, batch, depth - 1) for part in value)


class Tracer:
    """Own functions that are called, step by step, and which of them have the step's batch in hand."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self.steps: list[list[FrameType]] = [[]]
        self.calls: list[list[str]] = [[]]
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not is_own(frame.f_code.co_filename):
            return
        if event == "call":
            self.calls[-1].append(frame.f_code.co_name)
            if frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith("training.py"):
                self.calls.append([])
        batches = self.model.batches
        values = [arg, *frame.f_locals.values()]
        self.candidates.append((frame.f_code.co_filename, values)) if not batches else self._note(frame, values)

    candidates: list[Any] = []

    def _note(self, frame: FrameType, values: list[Any]) -> None:
        if any(holds(value, batch) for batch in self.model.batches[-1:] for value in values):
            self.files.add(frame.f_code.co_filename)


def train(tracer_of: Any = None) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    loop = TrainLoop(
        model,
        DataLoader(data, batch_size=8, shuffle=True),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        accelerator="cpu",
        progress_bar=False,
    )
    tracer = Tracer(model)
    sys.setprofile(tracer)
    try:
        loop.fit(num_epochs=1)
    finally:
        sys.setprofile(None)
    return model, tracer
