"""pytorch/examples' word_language_model: state carried from batch to batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from world import Entry, Parts, in_all_modes, randint

from trainloop import TTModel
from trainloop.data import SplitBatches

TOKENS = 11


class WordModel(TTModel):
    """One long text, cut into columns; the state after a chunk is the beginning of the next (truncated BPTT)."""

    carried_state = {"hidden": 1}

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2)
        self.decoder = nn.Linear(8, TOKENS)
        self.hidden: Any = None

    def on_epoch_begin(self) -> None:
        self.hidden = None

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.kept, self.hidden = self.hidden, None

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.hidden = self.kept

    def forward(self, x: Tensor) -> Tensor:
        output, hidden = self.rnn(self.encoder(x), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return self.decoder(output)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return criterion(self(x).flatten(0, 1), y.flatten()), y.numel()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return list(self(x).transpose(0, 1)), list(y.T), {}


def make_word_model(batch: int, shuffle: bool) -> Parts:
    """Whatever the number of ranks, the batches are those of all columns together. The last chunk is short."""
    model = WordModel().double()
    chunks = []
    for seed, length in ((1, 5 * 5 + 3), (2, 12)):
        text = randint(TOKENS, length + 1, 5, seed=seed)
        chunks.append([(text[i : i + 5], text[i + 1 : i + 6][: length - i]) for i in range(0, length, 5)])
    train, held_out = ([(x[: len(y)], y) for x, y in part] for part in chunks)
    return Parts(
        model,
        SplitBatches(train, dim=1),
        optim.SGD(model.parameters(), lr=1.0),
        SplitBatches(held_out, dim=1),
        nn.CrossEntropyLoss(),
    )


def word_model_by_hand(parts: Parts, epochs: int) -> None:
    model = parts.model
    for _ in range(epochs):
        model.train()
        hidden = None
        for x, y in parts.train:
            model.zero_grad()
            output, hidden = model.rnn(model.encoder(x), hidden)
            F.cross_entropy(model.decoder(output).flatten(0, 1), y.flatten()).backward()
            hidden = tuple(state.detach() for state in hidden)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            parts.optimizer.step()


test_single, test_ddp = in_all_modes(
    Entry("word_language_model", make_word_model, word_model_by_hand, loop={"gradient_clip_norm": 0.25}),
)
