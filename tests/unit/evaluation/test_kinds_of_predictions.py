"""Predictions of any kind are joined row by row, or an error names the kind; in one process and in replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TTModel
from trainloop.errors import ConfigurationError
from trainloop.train_loop.run.rows import check_rows, with_tuples_of_columns

X = torch.arange(21.0).reshape(7, 3)


class Net(TTModel):
    def __init__(self, kind: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.kind = kind

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return self.w.sum()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        rows = [row[: 1 + int(row[0]) % 3] for row in batch_data[0]]
        return self.kind(rows), None, {}


def predicted(kind: Callable[[list[Tensor]], Any], *, stream: bool = False, **mode: Any) -> Any:
    loader = DataLoader(TensorDataset(X), batch_size=3)
    loop = cpu_loop(Net(kind), None, criterion=None, validation_loader=loader, **mode)
    if not stream:
        return loop.predict_on_validation_set()[0]
    return [y for y, _, _ in loop.predict_with_model(loader, stream=True)]


ROWS = [row[: 1 + int(row[0]) % 3].tolist() for row in X]
AS_ROWS: dict[str, Callable[[list[Tensor]], Any]] = {
    "generator": lambda rows: (row for row in rows),
    "map": lambda rows: map(torch.clone, rows),
    "packed": lambda rows: pack_sequence(rows, enforce_sorted=False),
    "packed in a dict": lambda rows: {"a": pack_sequence(rows, enforce_sorted=False)},
    "nested": lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged),
    "deque": deque,
    "values": lambda rows: dict(enumerate(rows)).values(),
}
MODES: list[dict[str, Any]] = [{}, {"gpu_mode": "dp", "devices": 2}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", AS_ROWS)
def test_rows(name: str, mode: dict[str, Any]) -> None:
    found = predicted(AS_ROWS[name], **mode)
    found = found["a"] if isinstance(found, dict) else found
    assert [row.tolist() for row in found] == ROWS
    if not mode and "dict" not in name:
        streamed = predicted(AS_ROWS[name], stream=True)
        assert [row.tolist() for batch in streamed for row in batch] == ROWS


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_compressed_sparse_rows(mode: dict[str, Any]) -> None:
    found = predicted(lambda rows: torch.stack([row[:1] for row in rows]).to_sparse_csr(), **mode)
    assert found.to_dense().tolist() == [row[:1] for row in ROWS]


class Pairs(Net):
    """Rows as zip(*samples) makes them, beside outputs of two heads."""

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        rows = [row[: 1 + int(row[0]) % 2] for row in batch_data[0]]
        boxes = [{"boxes": row[:, None], "image": int(row[0])} for row in rows]
        heads = batch_data[0], batch_data[0] + 1
        return heads, tuple(rows), {"lists": tuple(row.tolist() for row in rows), "dicts": tuple(boxes)}


@pytest.mark.parametrize("batch_size", [3, 7, 2, 1])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_tuple_with_an_entry_for_each_sample_is_rows_and_one_of_columns_is_not(
    mode: dict[str, Any], batch_size: int
) -> None:
    data = TensorDataset(X[:6] if batch_size == 3 else X)  # batches of equal size, too
    loop = cpu_loop(Pairs(tuple), None, criterion=None, **mode)
    (first, second), rows, metadata = loop.predict_with_model(DataLoader(data, batch_size))
    expected = [row[: 1 + int(row[0]) % 2].tolist() for row in data.tensors[0]]
    assert torch.equal(first + 1, second)
    assert torch.equal(first, data.tensors[0])
    assert [row.tolist() for row in rows] == expected
    assert metadata["lists"] == expected
    assert [image["image"] for image in metadata["dicts"]] == [row[0] for row in expected]


class Targets(Net):
    """Two targets, in the list that default_collate makes of a tuple."""

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        _, targets = batch_data
        return list(targets), targets, {}


@pytest.mark.parametrize("batch_size", [3, 7, 2])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_the_list_of_targets_that_default_collate_makes_is_columns(
    mode: dict[str, Any], batch_size: int, stream: bool
) -> None:
    rows: Any = [(x, (x[0], x[1].long())) for x in X]
    loop = cpu_loop(Targets(list), None, criterion=None, **mode)
    if stream:
        batches = list(loop.predict_with_model(DataLoader(rows, batch_size), stream=True))
        y_pred, y_true = (tuple(torch.cat([batch[i][k] for batch in batches]) for k in (0, 1)) for i in (0, 1))
    else:
        y_pred, y_true, _ = loop.predict_with_model(DataLoader(rows, batch_size))
    for columns in (y_pred, y_true):
        assert isinstance(columns, tuple)
        assert torch.equal(columns[0], X[:, 0])
        assert torch.equal(columns[1], X[:, 1].long())


@pytest.mark.parametrize(
    "lengths, samples",
    [
        pytest.param([[3, 3, 3], [3, 3]], [3, 2], id="a row for each sample, as long as the first batch"),
        pytest.param([[2, 2, 2, 2], [2, 2]], [2, 1], id="two rows for each sample"),
        pytest.param([[1, 1], [1, 1]], [1, 1], id="two rows for the only sample"),
    ],
)
def test_a_list_of_equal_rows_is_not_columns(lengths: list[list[int]], samples: list[int]) -> None:
    batches: Any = [list(map(torch.zeros, batch)) for batch in lengths]
    assert with_tuples_of_columns(batches, samples) is batches


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("of_batch", [torch.Tensor.numpy, torch.Tensor.clone], ids=["array", "tensor"])
def test_rows_that_are_padded_to_the_longest_of_their_part(of_batch: Any, mode: dict[str, Any]) -> None:
    found = predicted(lambda rows: of_batch(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)), **mode)
    assert [row.tolist()[: len(expected)] for row, expected in zip(found, ROWS, strict=True)] == ROWS


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_tables(mode: dict[str, Any]) -> None:
    pd = pytest.importorskip("pandas")
    series = predicted(lambda rows: pd.Series([float(row[0]) for row in rows]), **mode)
    assert series.tolist() == X[:, 0].tolist()
    assert series.index.tolist() == list(range(7))
    table = predicted(
        lambda rows: pd.DataFrame({"a": [len(row) for row in rows]}, index=[str(r[0]) for r in rows]), **mode
    )
    assert table["a"].tolist() == [len(row) for row in ROWS]
    assert table.index[0] == "tensor(0.)"
    # A part of one sample has as many tables as samples.
    (column,) = predicted(lambda rows: (pd.Series([float(row[0]) for row in rows]),), **mode)
    assert column.tolist() == X[:, 0].tolist()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "kind",
    [set, lambda rows: {"a": frozenset([1])}, lambda rows: Matrix(), lambda rows: Output(torch.zeros(3))],
    ids=["set", "in", "own", "dataclass"],
)
def test_kinds_that_have_no_rows(kind: Any, mode: dict[str, Any]) -> None:
    alone = r"returned a \S*(builtins.set|frozenset|Matrix|Output) in y_pred, whose rows"
    with pytest.raises(ConfigurationError, match=rf"{alone}|returned .* without rows for a part of a batch, and"):
        predicted(kind, **mode)


class Matrix:
    shape = (3, 3)


@dataclass
class Output:
    logits: Tensor


def test_one_value_per_batch_stays() -> None:
    assert predicted(lambda rows: "text") == ["text"] * 3


@pytest.mark.parametrize("one", [np.float64(1.0), 1.0, torch.tensor(1.0), np.array(1.0)])
def test_one_number_per_batch_is_told(one: Any) -> None:
    with pytest.raises(ConfigurationError, match="y_pred is a single number for a batch of 3 samples"):
        predicted(lambda rows: one)


@pytest.mark.parametrize("column", [[1], torch.zeros(2), np.zeros(5), []])
def test_metadata_of_another_length_are_told(column: Any) -> None:
    said = rf"batch of 3 samples, y_pred has 3 rows, metadata\['ids'\] has {len(column)} rows?\."
    with pytest.raises(ConfigurationError, match=said):
        check_rows((torch.zeros(3), None, {"ids": column}), 3)
    with pytest.raises(ConfigurationError, match="y_pred has 3 rows, y_true has 2 rows"):
        check_rows(([1, 2, 3], torch.zeros(2), {}), 3)
    check_rows((torch.zeros(6), torch.zeros(6), {"ids": [1, 2, 3], "rows": torch.zeros(6), "norm": 0.5}), 3)


def test_entries_of_dicts_have_a_row_for_each_sample() -> None:
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ConfigurationError, match=r"3 samples, y_pred\['a'\] has 3 rows, y_pred\['b'\] has 2 rows\."):
        check_rows(({"a": three, "b": two}, None, {}), 3)
    with pytest.raises(ConfigurationError, match=r"y_pred has 3 rows, y_true\['a'\]\['b'\] has 2 rows\."):
        check_rows((three, {"a": {"b": two}}, {}), 3)
    with pytest.raises(
        ConfigurationError, match=r"metadata\['a'\] has 2 rows\. .*a list with one item for each sample"
    ):
        check_rows((three, None, {"a": [1, 2]}), 3)
    check_rows((three, None, {"settings": {"layers": [64, 32]}}), 3)
    check_rows(({"a": torch.zeros(6), "b": [1] * 6, "loss": torch.tensor(1.0)}, None, {"ids": [1, 2, 3]}), 3)
