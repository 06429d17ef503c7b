"""Loaders that are not torch's own: torchdata's StatefulDataLoader, webdataset's pipelines."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from world import Entry, Parts, in_all_modes
from world_rows import HELD_OUT, TRAIN, by_hand, columns, items, parts_of

# -- torchdata ---------------------------------------------------------------------------------------------------------


def make_stateful(batch: int, shuffle: bool) -> Parts:
    return parts_of(StatefulDataLoader(items(TRAIN), batch, shuffle=shuffle), StatefulDataLoader(items(HELD_OUT), 3))


# -- webdataset --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> None:
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


_shards: Path


def named(row: tuple[Any, int]) -> dict[str, Any]:
    return {"x": row[0], "y": row[1]}


def web(name: str) -> Any:
    pipeline = webdataset.WebDataset(str(_shards / f"{name}.tar"), shardshuffle=False)
    return pipeline.decode().to_tuple("npy", "cls").map(named)


def make_webdataset(batch: int, shuffle: bool) -> Parts:
    return parts_of(DataLoader(web("train"), batch), DataLoader(web("held_out"), 3))


test_single, test_ddp = in_all_modes(
    Entry("StatefulDataLoader", make_stateful, by_hand),
    Entry("webdataset", make_webdataset, by_hand),
)
