"""Loaders and datasets of other libraries."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import webdataset
from monai.transforms import Compose, EnsureTyped, MapTransform, RandFlipd, ScaleIntensityd
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from trainloop import TTModel
from world import Entry, Items, Parts, in_all_modes, plain, randint, randn

TRAIN, HELD_OUT = 37, 11


class Rows(TTModel):
    """Batches are dicts of columns ``x`` and ``y``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1).double())

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return F.cross_entropy(self(batch_data["x"]), batch_data["y"])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data["x"]), batch_data["y"], {}


by_hand = plain(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))


def columns(number: int) -> dict[str, Any]:
    return {"x": randn(number, 6, seed=number).tolist(), "y": randint(3, number, seed=number).tolist()}


def parts_of(train: Any, held_out: Any) -> Parts:
    model = Rows().double()
    return Parts(model, train, optim.Adam(model.parameters(), lr=0.01), held_out)


# -- Hugging Face datasets ---------------------------------------------------------------------------------------------


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * value for value in row["x"]]}


def make_datasets_map(batch: int, shuffle: bool) -> Parts:
    train, held_out = (
        datasets.Dataset.from_dict(columns(n)).map(doubled).with_format("torch", dtype=None) for n in (TRAIN, HELD_OUT)
    )
    return parts_of(DataLoader(train, batch, shuffle=shuffle), DataLoader(held_out, 3))


def make_datasets_iterable(batch: int, shuffle: bool) -> Parts:
    """A stream with a shuffle buffer of its own in ``single``."""
    train, held_out = (
        datasets.Dataset.from_dict(columns(n)).to_iterable_dataset(num_shards=4).map(doubled).with_format("torch")
        for n in (TRAIN, HELD_OUT)
    )
    return parts_of(DataLoader(train.shuffle(seed=1, buffer_size=8) if shuffle else train, batch), DataLoader(held_out, 3))


# -- torchdata ---------------------------------------------------------------------------------------------------------


def items(number: int) -> Items:
    table = columns(number)
    return Items([{"x": torch.tensor(x), "y": y} for x, y in zip(table["x"], table["y"])])


def make_stateful(batch: int, shuffle: bool) -> Parts:
    return parts_of(StatefulDataLoader(items(TRAIN), batch, shuffle=shuffle), StatefulDataLoader(items(HELD_OUT), 3))


# -- webdataset --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tar files of the samples; ``_shards`` says where."""
    global _shards
    _shards = tmp_path_factory.mktemp("shards")
    for name, number in (("train", TRAIN), ("held_out", HELD_OUT)):
        table = columns(number)
        with tarfile.open(_shards / f"{name}.tar", "w") as tar:
            for i, (x, y) in enumerate(zip(table["x"], table["y"])):
                buffer = io.BytesIO()
                np.save(buffer, np.array(x))
                for suffix, content in (("npy", buffer.getvalue()), ("cls", str(y).encode())):
                    info = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return


_shards: Path


def named(row: tuple[Any, int]) -> dict[str, Any]:
    return {"x": row[0], "y": row[1]}


def web(name: str) -> Any:
    pipeline = webdataset.WebDataset(str(_shards / f"{name}.tar"), shardshuffle=False)
    return pipeline.decode().to_tuple("npy", "cls").map(named)


def make_webdataset(batch: int, shuffle: bool) -> Parts:
    return parts_of(DataLoader(web("train"), batch), DataLoader(web("held_out"), 3))


# -- MONAI -------------------------------------------------------------------------------------------------------------


class Load(MapTransform):
    """Stands for LoadImaged: arrays of the sample's number."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, **{key: randn(1, 2, 3, seed=data[key]).numpy() for key in self.keys}}


def make_monai(batch: int, shuffle: bool) -> Parts:
    from monai.data import Dataset

    transform = Compose([Load(["x"]), ScaleIntensityd(["x"]), RandFlipd(["x"], prob=0.0), EnsureTyped(["x"])])
    train, held_out = (Dataset([{"x": i, "y": i % 3} for i in range(n)], transform) for n in (TRAIN, HELD_OUT))
    return parts_of(DataLoader(train, batch, shuffle=shuffle), DataLoader(held_out, 3))


# -- MixUp -------------------------------------------------------------------------------------------------------------


def mixed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """MixUp as a collator, as torchvision's v2 has it; how much is mixed depends on the rows, not on chance.

    A batch is mixed with itself shifted by one, so that what a batch holds matters.
    """
    batch = torch.utils.data.default_collate(rows)
    y = F.one_hot(batch["y"], 3).double()
    return {"x": 0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0), "y": 0.7 * y + 0.3 * y.roll(1, 0)}


test_single, test_ddp = in_all_modes(
    Entry("datasets", make_datasets_map, by_hand),
    Entry("datasets, iterable", make_datasets_iterable, by_hand),
    Entry("StatefulDataLoader", make_stateful, by_hand),
    Entry("webdataset", make_webdataset, by_hand),
    Entry("MONAI", make_monai, by_hand),
)
