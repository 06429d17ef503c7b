"""Batches of the kinds that libraries make: how many samples they have, and how they move."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from trainloop.data import count_samples, move_to
from trainloop.train_loop.arguments.checks import check_loader

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    text: list[str]
    x: torch.Tensor
    mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.x = self.x + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    label: None
    x: torch.Tensor


class Slots:
    """As of attrs' define."""

    __slots__ = ("mask", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.mask = x, None

    def to(self, device: torch.device) -> Slots:
        return Slots(self.x.to(device))


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(5), torch.ones(3)], layout=layout)


BATCHES: dict[str, tuple[Any, int]] = {
    "dataclass": (Record(["a", "b"], torch.ones(2, 3)), 2),
    "dataclass with slots": (Slotted(None, torch.ones(4, 3)), 4),
    "class with slots": (Slots(torch.ones(7, 3)), 7),
    "UserDict, as BatchEncoding": (UserDict(input_ids=torch.ones(3, 7), labels=None), 3),
    "named tuple with None": (Pair(None, torch.ones(5)), 5),
    "jagged": ({"x": nested(torch.jagged), "y": torch.ones(3)}, 3),
    "sparse": ((torch.eye(6).to_sparse(), torch.ones(6)), 6),
    "nothing but None and text": ({"x": None, "text": ["a", "b", "c"]}, 3),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_are_counted(kind: str) -> None:
    batch, samples = BATCHES[kind]
    assert count_samples(batch) == samples


@pytest.mark.parametrize("kind", BATCHES)
def test_moved_batches_keep_their_type(kind: str) -> None:
    batch, samples = BATCHES[kind]
    moved = move_to(batch, torch.device("cpu"))
    assert type(moved) is type(batch)
    assert count_samples(moved) == samples


def test_fields_of_dataclasses_move() -> None:
    record, slotted = BATCHES["dataclass"][0], BATCHES["dataclass with slots"][0]
    meta = torch.device("meta")
    moved = move_to(record, meta)
    assert (moved.x.device, record.x.device.type) == (meta, "cpu")
    assert moved.text == record.text
    assert torch.equal(move_to(record, torch.device("cpu")).x, torch.full((2, 3), 2.0))  # no second __post_init__
    assert move_to(slotted, meta).x.device == meta


@pytest.mark.parametrize("kind", BATCHES)
def test_a_list_of_batches_is_a_loader(kind: str) -> None:
    batches = [BATCHES[kind][0]]
    assert check_loader(batches, "train_loader") is batches
