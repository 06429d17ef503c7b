"""Loaders of torchdata, webdataset and Hugging Face: two ranks see and learn what one process does.

Run with ``-m ecosystem`` where the libraries are; a missing one fails its test by name.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.loader_kinds import FEATURES, ROWS, make_rows
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]

X, Y, INDEX = make_rows()


class Linear(TTModel):
    """Logs which rows it saw, as sums that depend on their order in time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(FEATURES, 1).double()

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> torch.Tensor:
        x, y, _ = columns(batch_data)
        return criterion(self.fc(x.double()).squeeze(1), y.double())

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y, i = columns(batch_data)
        return self.fc(x.double()).squeeze(1), y, {"index": torch.as_tensor(i)}


def columns(batch: Any) -> Any:
    return (batch["x"], batch["y"], batch["i"]) if isinstance(batch, dict) else batch


def torchdata_shuffled(folder: Path, size: int) -> Any:
    torch.manual_seed(random.randrange(2**31))  # its sampler seeds itself when it is made: no order may come from that
    loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(TensorDataset(X, Y, INDEX), size, shuffle=True)


def shards(folder: Path) -> str:
    wds = importlib.import_module("webdataset")
    if not (folder / "3.tar").exists():
        for shard in range(4):
            with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
                for i in range(shard * 11, min((shard + 1) * 11, ROWS)):
                    row = {"x.npy": X[i].numpy(), "y.npy": np.array(float(Y[i])), "i.cls": i}
                    writer.write({"__key__": f"{i:04d}", **row})
    return str(folder) + "/{0..3}.tar"


def as_tensors(sample: Any) -> Any:
    return torch.tensor(sample[0]), torch.tensor(float(sample[1])), sample[2]


def pipeline(folder: Path, **options: Any) -> Any:
    wds = importlib.import_module("webdataset")
    return wds.WebDataset(shards(folder), **{"shardshuffle": False, **options}).shuffle(10).decode()


def rows_of(pipe: Any) -> Any:
    return pipe.to_tuple("x.npy", "y.npy", "i.cls").map(as_tensors)


def webdataset_plain(folder: Path, size: int) -> Any:
    return DataLoader(rows_of(pipeline(folder)), batch_size=size)


def webdataset_detshuffle(folder: Path, size: int) -> Any:
    return DataLoader(rows_of(pipeline(folder, shardshuffle=4, detshuffle=True, seed=3)), batch_size=size)


def webloader(folder: Path, size: int) -> Any:
    wds = importlib.import_module("webdataset")
    return wds.WebLoader(rows_of(pipeline(folder)).batched(4), batch_size=None).unbatched().shuffle(20).batched(size)


def hugging_face(folder: Path) -> Any:
    rows = {"x": X.tolist(), "y": Y.tolist(), "i": list(range(ROWS))}
    return importlib.import_module("datasets").Dataset.from_dict(rows)


def hugging_face_map(folder: Path, size: int) -> Any:
    return DataLoader(hugging_face(folder).with_format("torch"), size, shuffle=True)


def hugging_face_iterable(folder: Path, size: int) -> Any:
    stream = hugging_face(folder).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=10)
    return DataLoader(stream.with_format("torch"), batch_size=size)


LOADERS: list[Callable[[Path, int], Any]] = [
    torchdata_shuffled,
    webdataset_plain,
    webdataset_detshuffle,
    webloader,
    hugging_face_map,
    hugging_face_iterable,
]


def fit(make: Callable[[Path, int], Any], ranks: int, data: Path, keep: Path, resume_from: Any = None) -> TrainLoop:
    model = Linear()
    loop = cpu_loop(
        model,
        make(data, 8 // ranks),
        optim.SGD(model.parameters(), lr=0.05),
        nn.MSELoss(),
        test_loader=make(data, 5),
        gpu_mode="single" if ranks == 1 else "ddp",
        devices=ranks,
        seed=3,
        timeout=100,
    )
    keeper = ModelCheckpoint(keep, every_n_epochs=None, every_n_steps=1, keep=100)
    loop.fit(num_epochs=2, callbacks=[keeper], resume_from=resume_from)
    return loop


@pytest.mark.parametrize("make", LOADERS, ids=lambda make: make.__name__)
def test_two_ranks_equal_one_process_and_resume_to_the_same_bits(
    make: Callable[[Path, int], Any], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    alone, pair = fit(make, 1, data, tmp_path / "1"), fit(make, 2, data, tmp_path / "2")
    torch.testing.assert_close(list(pair.model.parameters()), list(alone.model.parameters()), rtol=0, atol=1e-9)
    assert pair.history["loss"] == pytest.approx(alone.history["loss"], abs=1e-9)
    assert pair.history["test_loss"] == pytest.approx(alone.history["test_loss"], abs=1e-9)
    rows = alone.predict_on_test_set()[2]["index"].tolist()
    assert sorted(rows) == list(range(ROWS))

    for ranks, loop in ((1, alone), (2, pair)):
        middle = sorted((tmp_path / str(ranks)).iterdir())[8]  # in the second epoch of 6 steps
        again = fit(make, ranks, data, tmp_path / f"again-{ranks}", middle)
        torch.testing.assert_close(list(again.model.parameters()), list(loop.model.parameters()), rtol=0, atol=0)
