"""Hugging Face transformers and PEFT: dict batches, padding collators, ``ModelOutput.loss``, tied weights, LoRA."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)
from world import Entry, Items, Parts, in_all_modes, in_fsdp, loaders, plain, randint, steps

from trainloop import TTModel
from trainloop.callbacks import LRScheduler

TRAIN, HELD_OUT = 37, 11
TOKENS, PAD = 19, 0


class Pretrained(TTModel):
    """Any model of transformers that returns its own loss; the batch is its keyword arguments."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: Any) -> Any:
        return self.net(**batch)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return self(**batch_data).loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(**batch_data).logits, batch_data["labels"], {}


class TokenWeighted(Pretrained):
    """The model's loss is a mean over the tokens that count."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return self(**batch_data).loss, counted(batch_data["labels"])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        labels = batch_data["labels"]
        return [r.tolist() for r in self(**batch_data).logits.argmax(-1)], [r[r != -100].tolist() for r in labels], {}


class Causal(TokenWeighted):
    """As Trainer does since 4.46: the loss is given the number of tokens."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        units = counted(batch_data["labels"][:, 1:])
        return self(**batch_data, num_items_in_batch=units).loss, units

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        lengths = batch_data["attention_mask"].sum(1).tolist()
        picked = self(**batch_data).logits.argmax(-1)
        texts = batch_data["input_ids"]
        return [r[:n].tolist() for r, n in zip(picked, lengths)], [r[:n].tolist() for r, n in zip(texts, lengths)], {}


def counted(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def sentences(number: int, *, labels: int | None = None) -> Items:
    """Token lists of 3 to 7, as a tokenizer gives them."""
    found = []
    for i in range(number):
        ids = randint(TOKENS, 3 + i % 5, low=1, seed=i).tolist()
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        if labels is not None:
            found[-1]["label"] = i % labels
    return Items(found)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(TOKENS)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0")


def pad_labels(rows: list[dict[str, Any]]) -> BatchEncoding:
    """A causal language model's batch: padding counts in neither attention nor loss."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    ids, mask = padded("input_ids", PAD), padded("attention_mask", 0)
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})


# -- GPT-2 -------------------------------------------------------------------------------------------------------------


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def warmup_and_cosine(optimizer: optim.Optimizer) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=9)


def make_gpt2(batch: int, shuffle: bool) -> Parts:
    """Tied embeddings, a schedule by steps, weights by tokens."""
    model = Causal(gpt2(dropout=0.1))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return Parts(
        model,
        optimizer=optimizer,
        callbacks=[LRScheduler(warmup_and_cosine, interval="step")],
        **loaders(sentences(TRAIN), sentences(HELD_OUT), batch, shuffle, collate_fn=pad_labels),
    )


def gpt2_by_hand(parts: Parts, epochs: int) -> None:
    scheduler = warmup_and_cosine(parts.optimizer)
    for batch in steps(parts, epochs):
        parts.model.net(**batch).loss.backward()
        parts.optimizer.step()
        scheduler.step()
        parts.optimizer.zero_grad()


def make_checkpointed(batch: int, shuffle: bool) -> Parts:
    """Activations computed again in backward."""
    net = gpt2(dropout=0.1)
    net.activation_checkpointing_enable({"use_reentrant": False})
    model = Causal(net)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return Parts(
        model,
        optimizer=optimizer,
        **loaders(sentences(TRAIN), sentences(HELD_OUT), batch, shuffle, collate_fn=pad_labels),
    )


def make_lora(batch: int, shuffle: bool) -> Parts:
    """A frozen base with adapters; only these are given to the optimizer."""
    model = Causal(get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)))
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return Parts(
        model,
        optimizer=optimizer,
        **loaders(sentences(TRAIN), sentences(HELD_OUT), batch, shuffle, collate_fn=pad_labels),
    )


# -- T5 ----------------------------------------------------------------------------------------------------------------


def make_t5(batch: int, shuffle: bool) -> Parts:
    config = T5Config(
        vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.1,
        decoder_start_token_id=PAD,
    )  # fmt: skip
    model = TokenWeighted(T5ForConditionalGeneration(config).double())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return Parts(
        model,
        optimizer=optimizer,
        **loaders(sentences(TRAIN), sentences(HELD_OUT), batch, shuffle, collate_fn=pad_labels),
    )


# -- BERT --------------------------------------------------------------------------------------------------------------


def make_bert(batch: int, shuffle: bool) -> Parts:
    """A classifier: the loss is a mean over samples; batches are padded by the library's collator."""
    config = BertConfig(
        vocab_size=TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = Pretrained(BertForSequenceClassification(config).double())
    collator = DataCollatorWithPadding(tokenizer())
    train, held_out = (sentences(n, labels=3) for n in (TRAIN, HELD_OUT))
    return Parts(
        model,
        DataLoader(train, batch, shuffle=shuffle, collate_fn=collator),
        optim.AdamW(model.parameters(), lr=1e-2),
        DataLoader(held_out, 3, collate_fn=collator),
    )


own_loss = plain(lambda model, batch: model.net(**batch).loss)

IN_FLOAT32 = 1e-5  # transformers computes a causal loss, and T5 its softmax, in float32, whatever the weights are

ENTRIES = (
    Entry("gpt2", make_gpt2, gpt2_by_hand, tolerance=IN_FLOAT32),
    Entry("gradient_checkpointing", make_checkpointed, own_loss, tolerance=IN_FLOAT32),
    Entry("lora", make_lora, own_loss, tolerance=IN_FLOAT32),
    Entry("t5", make_t5, own_loss, tolerance=IN_FLOAT32),
    Entry("bert", make_bert, own_loss),
)

test_single, test_ddp = in_all_modes(*ENTRIES)
test_fsdp = in_fsdp(*ENTRIES)
