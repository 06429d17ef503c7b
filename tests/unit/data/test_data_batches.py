"""Batches of any shape: how many samples they hold, and how they are moved."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from trainloop.data import count_samples, move_to
from trainloop.data.batch.batches import pin, record_use

Pair = namedtuple("Pair", "x y")
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Record:
    name: str
    x: torch.Tensor


class Graphs:
    """As torch_geometric's batches: tensors over nodes, losses over graphs."""

    num_graphs = 3

    def __init__(self) -> None:
        self.x = torch.ones(17, 2)

    def to(self, device: torch.device) -> Graphs:
        self.x = self.x.to(device)
        return self


class Points(list[Any]):
    """A list that is not made from its items alone."""

    def __init__(self, items: list[Any], scale: int) -> None:
        super().__init__(items)
        self.scale = scale


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        pytest.param(torch.ones(5, 2), 5, id="tensor"),
        pytest.param([torch.ones(5, 2), torch.ones(5)], 5, id="list"),
        pytest.param((torch.tensor(1.0), torch.ones(4)), 4, id="a number first"),
        pytest.param({"text": ["a", "b", "c"], "x": torch.ones(3)}, 3, id="dict"),
        pytest.param({"text": ["a", "b", "c"], "id": "run"}, 3, id="dict of strings"),
        pytest.param(["a", "b"], 2, id="strings"),
        pytest.param(["ab", "cd", "ef"], 3, id="longer strings"),
        pytest.param([1, 2, 3], 3, id="numbers"),
        pytest.param([["a", "b", "c", "d"], [1, 2, 3, 4]], 4, id="columns"),
        pytest.param([{"a": 1}, {"a": 2}], 2, id="list of dicts"),
        pytest.param(np.ones((6, 2)), 6, id="array"),
        pytest.param(Pair(torch.ones(2), torch.ones(2)), 2, id="namedtuple"),
        pytest.param({"deep": [{"er": (torch.ones(7),)}]}, 7, id="nested"),
        pytest.param(UserDict(x=torch.ones(2)), 2, id="mapping"),
        pytest.param(Record("r", torch.ones(4)), 4, id="dataclass"),
        pytest.param(Graphs(), 3, id="graphs"),
        pytest.param([torch.tensor(1.0), torch.tensor(2)], 1, id="one sample"),
        pytest.param(torch.tensor(1.0), 1, id="a number"),
        pytest.param(None, 1, id="nothing"),
        pytest.param("text", 1, id="one string"),
        pytest.param([], 1, id="empty list"),
        pytest.param(torch.ones(0, 3), 0, id="no rows"),
        pytest.param(range(8), 8, id="has a length"),
    ],
)
def test_count_samples(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


class Split(Enum):
    TRAIN = 1


class Node:
    """Refers to itself, and has a shape that is no size."""

    shape = "circle"

    def __init__(self, *values: Any) -> None:
        self.parent, self.values = self, values


def test_count_samples_of_objects_that_refer_to_each_other() -> None:
    assert count_samples({"split": [Split.TRAIN] * 3, "x": torch.ones(3)}) == 3
    assert count_samples([Split.TRAIN] * 3) == 3
    assert count_samples(Node(torch.ones(4))) == 4
    assert count_samples([Node(), Node()]) == 2


def test_count_samples_falls_back_to_what_is_known() -> None:
    assert count_samples(torch.tensor(1.0), default=32) == 32
    assert count_samples(torch.ones(3), default=32) == 3


def test_move_to_keeps_the_shape_and_moves_every_tensor() -> None:
    batch = {
        "pair": Pair(torch.ones(2), [torch.ones(1), "text", 3, None]),
        "ordered": OrderedDict(x=torch.ones(2)),
        "mapping": UserDict(x=torch.ones(2)),
        "tuple": (torch.ones(2), np.ones(2)),
        "graphs": Graphs(),
    }
    moved = move_to(batch, META)
    assert [type(value) for value in moved.values()] == [Pair, OrderedDict, UserDict, tuple, Graphs]
    assert moved["pair"].x.device == moved["pair"].y[0].device == META
    assert moved["pair"].y[1:] == ["text", 3, None]
    assert moved["ordered"]["x"].device == moved["mapping"]["x"].device == moved["tuple"][0].device == META
    assert isinstance(moved["tuple"][1], np.ndarray)
    assert moved["graphs"].x.device == META
    assert batch["pair"].x.device == CPU  # type: ignore[union-attr]


def test_a_sequence_of_the_users_own_becomes_a_list_where_it_cant_be_made() -> None:
    moved = move_to(Points([torch.ones(1)], scale=2), META)
    assert type(moved) is list
    assert moved[0].device == META


def _odd_tensors() -> dict[str, torch.Tensor]:
    rows = torch.arange(12.0).reshape(3, 4)
    return {
        "sparse": rows.to_sparse(),
        "csr": rows.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "expanded": torch.ones(1, 4).expand(3, 4),
        "windows": torch.arange(6.0).unfold(0, 3, 1),
        "quantized": torch.quantize_per_tensor(rows, 0.1, 0, torch.quint8),
    }


@pytest.mark.filterwarnings("ignore:.*(CSR|nested|quantize|deprecated)")
@pytest.mark.parametrize("method", ["pin_memory", "record_stream"])
def test_only_plain_dense_tensors_are_pinned_and_recorded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no kernel for the others, though it copies them to a GPU."""
    rows = torch.arange(12.0).reshape(3, 4)
    plain = {
        "rows": rows,
        "transposed": rows.t(),
        "columns": rows[:, ::2],
        "channels": torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3).expand(2, 0, 3),
    }
    batch = {**plain, **_odd_tensors()}
    seen: list[int] = []
    monkeypatch.setattr(torch.Tensor, method, lambda self, *_: seen.append(id(self)) or self)
    if method == "pin_memory":
        assert all(value is batch[name] for name, value in pin(batch).items())
    else:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        record_use(batch, None)  # type: ignore[arg-type]
    assert [name for name, value in batch.items() if id(value) in seen] == list(plain)
