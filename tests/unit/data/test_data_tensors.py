"""Batches of a ``TensorDataset`` in memory, compared with those of torch's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from trainloop.data.source.tensors import TensorRows, loader_batches


@pytest.mark.parametrize("number", [0, 1, 7, 8, 7 * 256, 7 * 256 + 3, 4 * 7 * 256 + 7])
@pytest.mark.parametrize("subset", [False, True], ids=["all rows", "a subset"])
def test_batches_of_many_indices_are_those_of_a_batch_sampler(number: int, subset: bool) -> None:
    data = TensorDataset(torch.arange(10_000), torch.arange(10_000) / 7)
    dataset = Subset(data, range(9_999, 1_999, -1)) if subset else data
    order = torch.randperm(8_000, generator=torch.Generator().manual_seed(0))[:number]
    rows = TensorRows.of(DataLoader(dataset, 7))
    assert rows is not None
    found = list(rows.take(order, 7))
    expected = list(DataLoader(dataset, batch_sampler=BatchSampler(order.tolist(), 7, drop_last=False)))
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, batch, other))


@pytest.mark.parametrize(
    "indices",
    [
        [(4, 0), (1, 2), (0, 0)],
        [slice(0, 2), slice(3, 5)],
        [torch.tensor([1, 2]), torch.tensor([4, 0])],
        [np.uint8(3), np.uint8(1)],
        [np.int32(-1), np.int32(1)],
        [True, True],
        [None, None],
    ],
    ids=["a row and a column", "slices", "tensors", "uint8", "int32", "bools", "None"],
)
def test_indices_of_any_kind_are_those_of_the_dataset(indices: list[Any]) -> None:
    image = TensorDataset(torch.arange(30).view(5, 3, 2), torch.arange(15).view(5, 3))
    loader = DataLoader(image, batch_sampler=[indices])
    rows = TensorRows.of(loader)
    assert rows is not None
    ((expected, found),) = zip(loader, loader_batches(rows, loader), strict=True)
    assert all(map(torch.equal, expected, found))


def test_tensors_that_a_script_collates_otherwise_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(TensorDataset(torch.arange(5)), 2)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map=None: -torch.stack(batch))
    assert TensorRows.of(loader) is None


ORDER = [7, 2, 9, 0, 11, 4, 1, 8, 3, 10, 5, 6]
KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "tensor": torch.tensor,
    "column": lambda batch: pytest.importorskip("pandas").Series(batch, index=range(len(batch) - 1, -1, -1)),
    "generator": lambda batch: (index for index in batch),
    "set": set,
}


class Batches:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        yield KINDS[self.kind]([3, 4, 5])  # consecutive ones are read as a slice
        for begin in range(0, len(ORDER), 3):
            yield KINDS[self.kind](ORDER[begin : begin + 3])


def equal(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    return all(torch.equal(a, b) for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_iterable_of_indices_are_torchs(kind: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(12), torch.arange(12) / 7), batch_sampler=Batches(kind))  # type: ignore[arg-type]
    rows = TensorRows.of(loader)
    assert rows is not None
    assert equal(loader_batches(rows, loader), loader)


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "tensor"])
def test_rows_of_a_subset_by_any_indices_in_order(kind: str) -> None:
    loader = DataLoader(Subset(TensorDataset(torch.arange(12)), KINDS[kind](ORDER)), 5)
    rows = TensorRows.of(loader)
    assert rows is not None
    assert equal(loader_batches(rows, loader), loader)


def test_a_subset_by_a_column_of_pandas_is_left_to_torch_which_finds_labels() -> None:
    column = KINDS["column"](ORDER)
    assert TensorRows.of(DataLoader(Subset(TensorDataset(torch.arange(12)), column), 5)) is None
