"""pytorch/examples with sequences: time sequences, mnist_rnn, minGPT, language translation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from world import Entry, Items, Parts, in_all_modes, loaders, plain, randint, randn, steps

from trainloop import TTBasicModel, TTModel
from trainloop.callbacks import LRScheduler

TRAIN, HELD_OUT = 37, 11
TOKENS = 11
PAD = 0


# -- mnist_rnn ---------------------------------------------------------------------------------------------------------


class MnistRnn(TTBasicModel):
    """Rows of an image through an LSTM; its weights are one flat buffer, and it holds weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(input_size=6, hidden_size=8, num_layers=2, batch_first=True, dropout=0.2)
        self.batchnorm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return F.log_softmax(self.fc(self.batchnorm(output[:, -1])), dim=1)


def make_mnist_rnn(batch: int, shuffle: bool) -> Parts:
    model = MnistRnn().double()
    data, held_out = (TensorDataset(randn(n, 5, 6), randint(10, n)) for n in (TRAIN, HELD_OUT))
    optimizer = optim.Adadelta(model.parameters(), lr=0.1)
    return Parts(
        model,
        optimizer=optimizer,
        criterion=nn.NLLLoss(),
        callbacks=[LRScheduler(StepLR, step_size=1, gamma=0.7)],
        **loaders(data, held_out, batch, shuffle),
    )


def mnist_rnn_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = StepLR(parts.optimizer, step_size=1, gamma=0.7)
    for _ in range(epochs):
        parts.model.train()
        for x, y in parts.train:
            parts.optimizer.zero_grad()
            F.nll_loss(parts.model(x), y).backward()
            parts.optimizer.step()
        scheduler.step()


# -- time_sequence_prediction ------------------------------------------------------------------------------------------


class TimeSequence(TTBasicModel):
    """LSTM cells over the time steps, all sequences at once, and an optimizer that asks for the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 9)
        self.lstm2 = nn.LSTMCell(9, 9)
        self.linear = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(len(x), 9)
        h1 = c1 = h2 = c2 = zeros
        outputs = []
        for step in x.split(1, dim=1):
            h1, c1 = self.lstm1(step, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def make_time_sequence(batch: int, shuffle: bool) -> Parts:
    model = TimeSequence().double()
    sines = torch.sin(torch.arange(9).double() / 3 + randint(60, 11, 1).double())
    data = TensorDataset(sines[:, :-1], sines[:, 1:])
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    # The whole set is one batch, whichever number of ranks shares it.

    return Parts(
        model,
        DataLoader(data, len(sines)),
        optimizer,
        DataLoader(data, 3),
        nn.MSELoss(),
    )


def time_sequence_by_hand(parts: Parts, epochs: int) -> None:
    for x, y in steps(parts, epochs):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            parts.optimizer.zero_grad()
            loss = F.mse_loss(parts.model(x), y)
            loss.backward()
            return loss

        parts.optimizer.step(closure)


# -- minGPT ------------------------------------------------------------------------------------------------------------


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, dim=2)
        )
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return x + self.mlp(self.ln_2(x))


class MinGpt(TTModel):
    """Weight decay in groups; the output layer is the embedding (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(TOKENS, 16)
        self.wpe = nn.Parameter(torch.zeros(6, 16))
        self.blocks = nn.ModuleList(GptBlock(16, 2) for _ in range(2))
        self.ln_f = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, TOKENS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        idx, targets = batch_data
        return F.cross_entropy(self(idx).flatten(0, 1), targets.flatten())

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        idx, targets = batch_data
        return self(idx), targets, {}


def make_mingpt(batch: int, shuffle: bool) -> Parts:
    model = MinGpt().double()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    data, held_out = (TensorDataset(*(randint(TOKENS, n, 6, seed=s) for s in (0, 1))) for n in (TRAIN, HELD_OUT))
    return Parts(model, optimizer=optimizer, **loaders(data, held_out, batch, shuffle))


def mingpt_by_hand(parts: Parts, epochs: int) -> None:
    for idx, targets in steps(parts, epochs):
        loss = F.cross_entropy(parts.model(idx).flatten(0, 1), targets.flatten())
        parts.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 1.0)
        parts.optimizer.step()


# -- language_translation ----------------------------------------------------------------------------------------------


class Translator(TTModel):
    """Pairs of sentences of any length, padded by the collator; padding counts in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, dropout=0.1,
            batch_first=True,
        )  # fmt: skip
        self.source, self.target = nn.Embedding(TOKENS, 16), nn.Embedding(TOKENS, 16)
        self.generator = nn.Linear(16, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        hidden = self.transformer(
            self.source(source) * math.sqrt(16),
            self.target(target) * math.sqrt(16),
            tgt_mask=causal,
            src_key_padding_mask=additive(source == PAD),
            tgt_key_padding_mask=additive(target == PAD),
            memory_key_padding_mask=additive(source == PAD),
        )
        return self.generator(hidden)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        source, target = batch_data
        logits, truth = self(source, target[:, :-1]), target[:, 1:]
        return criterion(logits.flatten(0, 1), truth.flatten()), (truth != PAD).sum()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        source, target = batch_data
        lengths = (target != PAD).sum(1).tolist()
        picked = self(source, target[:, :-1]).argmax(-1)
        return (
            [row[: n - 1].tolist() for row, n in zip(picked, lengths)],
            [row[:n].tolist() for row, n in zip(target, lengths)],
            {},
        )


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return tuple(pad_sequence(list(side), batch_first=True, padding_value=PAD) for side in zip(*pairs))  # type: ignore[return-value]


def make_translation(batch: int, shuffle: bool) -> Parts:
    model = Translator().double()
    data, held_out = (
        Items(
            [(randint(TOKENS, 3 + i % 4, low=1, seed=i), randint(TOKENS, 3 + i % 5, low=1, seed=-i)) for i in range(n)]
        )
        for n in (TRAIN, HELD_OUT)
    )
    return Parts(
        model,
        optimizer=optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9),
        criterion=nn.CrossEntropyLoss(ignore_index=PAD),
        **loaders(data, held_out, batch, shuffle, collate_fn=collate),
    )


def translation_loss(model: Any, batch: Any) -> Tensor:
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


test_single, test_ddp = in_all_modes(
    Entry("mnist_rnn", make_mnist_rnn, mnist_rnn_by_hand, loop={"sync_batchnorm": True}),
    Entry("time_sequence_prediction", make_time_sequence, time_sequence_by_hand, epochs=6),
    Entry("minGPT", make_mingpt, mingpt_by_hand, loop={"gradient_clip_norm": 1.0}),
    Entry("language_translation", make_translation, plain(translation_loss)),
)
