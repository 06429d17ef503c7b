"""A recurrent model that carries its state from chunk to chunk, and the loop of word_language_model by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainloop import TTModel

SYMBOLS, WIDTH, TIME = 11, 6, 5


def chunks(columns: int, length: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """``(input, target)`` pieces of a text in columns, each shaped (time, column); the last one is shorter."""
    text = torch.randint(SYMBOLS, (length + 1, columns), generator=torch.Generator().manual_seed(seed))
    return [(text[i : min(i + TIME, length)], text[i + 1 : min(i + TIME, length) + 1]) for i in range(0, length, TIME)]


class Recurrent(TTModel):
    carried_state = {"hidden": 0}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.hidden: Any = None
        self.double()

    def on_epoch_begin(self) -> None:
        self.hidden = None

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.kept, self.hidden = self.hidden, None

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.hidden = self.kept

    def forward(self, text: Tensor) -> Tensor:
        output, hidden = self.unroll(text, self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return output

    def unroll(self, text: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        outputs = []
        for symbol in self.embed(text):
            hidden = self.cell(symbol, hidden)
            outputs.append(hidden[0])
        return self.head(torch.stack(outputs)), hidden

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        text, target = batch_data
        return criterion(self(text).view(-1, SYMBOLS), target.view(-1)), target.numel()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        text, target = batch_data
        return self(text).argmax(2).T, target.T, {}  # a row for each column


def make_model() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


def train_by_hand(
    model: Recurrent, train: list[Any], held_out: list[Any], epochs: int, lr: float
) -> tuple[list[float], list[float]]:
    """PyTorch's own example, reduced; training and validation loss of each epoch, over all tokens."""
    criterion = nn.CrossEntropyLoss()
    losses: tuple[list[float], list[float]] = [], []
    for _ in range(epochs):
        for which, data in enumerate((train, held_out)):
            hidden, total, tokens = None, 0.0, 0
            with torch.set_grad_enabled(which == 0):
                for text, target in data:
                    output, hidden = model.unroll(text, hidden)
                    hidden = tuple(state.detach() for state in hidden)
                    loss = criterion(output.view(-1, SYMBOLS), target.view(-1))
                    if which == 0:
                        model.zero_grad()
                        loss.backward()
                        with torch.no_grad():
                            for parameter in model.parameters():
                                parameter.add_(parameter.grad, alpha=-lr)  # type: ignore[arg-type]
                    total += loss.item() * target.numel()
                    tokens += target.numel()
            losses[which].append(total / tokens)
    return losses
