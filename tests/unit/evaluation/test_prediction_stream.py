"""Predictions batch by batch: the rows of ``predict_with_model(loader)``, and nothing left behind."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainloop import TrainLoop, TTModel
from trainloop.errors import ConfigurationError

SAMPLES = 41


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]), i


class Own:
    """No plain data."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


class Net(TTModel):
    """Rows of every kind: tensors, text, ragged lists, tensors whose rows differ in shape, objects."""

    fails_at: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(1, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        raise NotImplementedError

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, index = batch_data
        ids = index.tolist()
        if self.fails_at in ids:
            raise ValueError("at this batch")
        ragged = torch.zeros(len(ids), max(ids) % 5 + 1) + index[:, None]
        metadata = {"text": [str(i) for i in ids], "lists": [[i] * (i % 3) for i in ids], "own": [Own(i) for i in ids]}
        return ragged, 2 * x, metadata


def loop_over(batch_size: int = 4, **arguments: Any) -> TrainLoop:
    loader = DataLoader(Numbers(), batch_size, **arguments)
    return cpu_loop(Net(), None, criterion=None, test_loader=loader)


def rows_of(batches: Any) -> list[Any]:
    """One entry a row, whatever its batch was."""
    rows = []
    for y_pred, y_true, metadata in batches:
        for i, y in enumerate(y_true):
            rows.append((y_pred[i].tolist(), y.tolist(), *(metadata[key][i] for key in ("text", "lists", "own"))))
    return rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where temporary files go; empty again at the end, and no file is open."""
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"batch_size": 50}, {"drop_last": True}], ids=str)
def test_the_rows_of_a_prediction_at_once(arguments: dict[str, Any], folder: Path) -> None:
    tl = loop_over(**arguments)
    torch.manual_seed(0)
    expected = tl.predict_with_model(tl.test_loader)
    for _ in range(2):
        torch.manual_seed(0)  # the same batches, which decide the lengths of rows
        stream = tl.predict_with_model(tl.test_loader, stream=True)
        assert list(folder.iterdir()) == []  # the disk is given back even if the process is killed now
        batches = list(stream)
        assert rows_of(batches) == rows_of([expected])
        assert [len(y_true) for _, y_true, _ in batches[:-1]] == [4] * (len(batches) - 1)
        assert list(stream) == []


def test_a_stream_that_is_not_read_to_its_end_frees_its_files() -> None:
    tl = loop_over()
    before = set(os.listdir("/proc/self/fd"))
    gc.disable()  # the files are closed without it
    try:
        for y_pred, _, _ in tl.predict_with_model(tl.test_loader, stream=True):
            assert len(y_pred) == 4
            break
        assert set(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()
    with tl.predict_with_model(tl.test_loader, stream=True) as stream:
        next(stream)
    assert list(stream) == []
    assert rows_of([tl.predict_with_model(tl.test_loader)])[0][1] == [0.0]  # the loop works as before


def test_an_error_on_the_way_leaves_no_file() -> None:
    tl = loop_over()
    tl.model.fails_at = 17  # type: ignore[assignment]
    with pytest.raises(ValueError, match="at this batch"):
        tl.predict_with_model(tl.test_loader, stream=True)


def test_only_a_batch_is_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pass goes on, and while it is read: each batch's tensors are gone when the next is there."""
    import weakref

    alive: list[Any] = []
    most = 0
    tl = loop_over()
    original = tl.model.get_predictions

    def watched(batch: Any, device: torch.device) -> Any:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        rows = original(batch, device)
        alive.append(weakref.ref(rows[0]))
        return rows

    monkeypatch.setattr(tl.model, "get_predictions", watched)
    for y_pred, _, _ in tl.predict_with_model(tl.test_loader, stream=True):
        alive.append(weakref.ref(y_pred))
        most = max(most, sum(reference() is not None for reference in alive))
    assert most <= 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rows_to": "rank 0"}, r"rows_to='rank 0': must be 'main' \(rank 0\), 'all' \(all ranks\) or None."),
        ({"stream": "yes"}, "stream='yes'"),
    ],
    ids=str,
)
def test_refused(arguments: Any, message: str) -> None:
    tl = loop_over()
    with pytest.raises(ConfigurationError, match=message):
        tl.predict_with_model(tl.test_loader, **arguments)


class OtherRows(Net):
    """Numbers of rows that differ from the numbers of samples, and predictions in a tuple."""

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        index = batch_data[1]
        if self.fails_at is None:
            return tuple(index.tolist()), index, {}
        return (index.repeat_interleave(2), None, {"sample": index}) if self.fails_at else (index[index > 9], None, {})


@pytest.mark.parametrize("which", [None, 0, 1], ids=["tuple", "fewer", "more"])
def test_rows_of_a_shuffled_loader_are_not_repeated(which: int | None) -> None:
    """If a sample does not have exactly one row, all columns stay in the loader's order."""
    loop = loop_over(shuffle=True, generator=torch.Generator().manual_seed(0))
    loop.model = OtherRows()
    loop.model.fails_at = which
    batches = list(loop.predict_with_model(loop.test_loader, stream=True))
    rows = [int(row) for y_pred, *_ in batches for row in y_pred]
    if which is None:
        assert rows == list(range(SAMPLES))
        return
    assert sorted(rows) == sorted([*range(SAMPLES)] * 2 if which else range(10, SAMPLES))
    loop.test_loader.generator.manual_seed(0)
    y_pred, _, metadata = loop.predict_on_test_set()
    assert y_pred.tolist() == rows
    if which:
        assert metadata["sample"].tolist() == rows[::2]
