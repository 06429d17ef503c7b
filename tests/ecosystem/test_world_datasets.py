"""Hugging Face datasets: by index, and as streams."""

from __future__ import annotations

from typing import Any

import datasets
from torch.utils.data import DataLoader
from world import Entry, Parts, in_all_modes
from world_rows import HELD_OUT, TRAIN, by_hand, columns, parts_of


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * value for value in row["x"]]}


def make_datasets_map(batch: int, shuffle: bool) -> Parts:
    train, held_out = (
        datasets.Dataset.from_dict(columns(n)).map(doubled).with_format("torch", dtype=None) for n in (TRAIN, HELD_OUT)
    )
    return parts_of(DataLoader(train, batch, shuffle=shuffle), DataLoader(held_out, 3))


def make_datasets_iterable(batch: int, shuffle: bool) -> Parts:
    """A stream; in ``single`` with the library's own shuffling, which ``set_epoch`` changes."""
    train, held_out = (
        datasets.Dataset.from_dict(columns(n)).to_iterable_dataset(num_shards=4).map(doubled).with_format("torch")
        for n in (TRAIN, HELD_OUT)
    )
    return parts_of(
        DataLoader(train.shuffle(seed=1, buffer_size=8) if shuffle else train, batch), DataLoader(held_out, 3)
    )


def iterable_by_hand(parts: Parts, epochs: int) -> None:
    for epoch in range(epochs):
        parts.train.dataset.set_epoch(epoch)
        by_hand(parts, 1)


test_single, test_ddp = in_all_modes(
    Entry("datasets", make_datasets_map, by_hand),
    Entry("datasets, iterable", make_datasets_iterable, iterable_by_hand),
)
