"""Transforms and collators: MONAI's dict transforms, and MixUp over the batch."""

from __future__ import annotations

from typing import Any

import torch
from monai.data import Dataset
from monai.transforms import Compose, EnsureTyped, MapTransform, RandFlipd, ScaleIntensityd
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate
from world import Entry, Parts, in_all_modes, randn
from world_rows import HELD_OUT, TRAIN, by_hand, items, parts_of


class Load(MapTransform):
    """Stands for LoadImaged: the array with the sample's number."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, **{key: randn(1, 2, 3, seed=data[key]).numpy() for key in self.keys}}


def make_monai(batch: int, shuffle: bool) -> Parts:
    """``RandFlipd`` draws from a generator of its own; here it flips always, so that ranks may draw as they like."""
    transform = Compose([Load(["x"]), ScaleIntensityd(["x"]), RandFlipd(["x"], prob=1.0), EnsureTyped(["x"])])
    train, held_out = (Dataset([{"x": i, "y": i % 3} for i in range(n)], transform) for n in (TRAIN, HELD_OUT))
    return parts_of(DataLoader(train, batch, shuffle=shuffle), DataLoader(held_out, 3))


def mixup(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """torchvision's v2.MixUp as a collator: each row mixed with the one before it in its batch, by chance."""
    batch = default_collate(rows)
    y = F.one_hot(batch["y"], 3).double()
    share = torch.distributions.Beta(1.0, 1.0).sample((len(y), 1)).double()
    return {"x": share * batch["x"] + (1 - share) * batch["x"].roll(1, 0), "y": share * y + (1 - share) * y.roll(1, 0)}


def make_mixup(batch: int, shuffle: bool) -> Parts:
    return parts_of(DataLoader(items(TRAIN), batch, shuffle=shuffle, collate_fn=mixup), DataLoader(items(HELD_OUT), 3))


test_single, test_ddp = in_all_modes(
    Entry("MONAI", make_monai, by_hand),
    # Which rows are mixed depends on the batch, a rank's own in ddp.
    Entry("MixUp", make_mixup, by_hand, comparable=False),
)
