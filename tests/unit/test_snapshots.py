"""Snapshots in memory: whole or not there, of now, and without what can't be pickled; and the room that they need."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from checkpoints import same
from trainloop import TrainLoop, TTBasicModel
from trainloop.errors import ResourceError, WorkerFailedError
from trainloop.launch.failures import Failure
from trainloop.resources import ResourceQuota
from trainloop.train_loop.options import RestartOptions
from trainloop.train_loop.restarts import Supervisor
from trainloop.train_loop.snapshots import steps_between
from trainloop.transfer.slots import SnapshotMemory, Snapshotter, arrived_classes


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    made = SnapshotMemory(parts=2, statuses=3)
    yield made
    made.close()


def write(memory: SnapshotMemory, number: int, part: int, value: Any, known: Any = ()) -> None:
    memory.write(number, part, 10 * number, Snapshotter(known, arrived_classes()).pack({"it": {"is": value}}))


def read(memory: SnapshotMemory, number: int, part: int, known: Any = ()) -> Any:
    return memory.read(number, part, known)["it"]["is"]


def newest(memory: SnapshotMemory) -> tuple[int, int]:
    return next(iter(memory.whole().items()))


def test_a_snapshot_is_there_when_all_of_its_parts_are(memory: SnapshotMemory) -> None:
    assert memory.whole() == {}
    large, small = torch.arange(100_000.0), {"tensor": torch.ones(300), "array": np.arange(99), "text": "small"}
    write(memory, 1, 0, large)
    assert memory.whole() == {}
    write(memory, 1, 1, small)
    assert newest(memory) == (1, 10)
    write(memory, 2, 0, small)  # of another size, and the other part is missing
    assert newest(memory) == (1, 10)
    assert same(read(memory, 1, 0), large)
    write(memory, 2, 1, small)
    assert newest(memory) == (2, 20)
    write(memory, 3, 0, small)
    write(memory, 3, 1, large)
    assert newest(memory) == (3, 30)
    again = read(memory, 3, 0)
    assert same({**again, "array": 0}, {**small, "array": 0})
    assert np.array_equal(again["array"], small["array"])
    again["tensor"].zero_()  # the reader's own
    assert newest(memory) == (3, 30)
    assert same(read(memory, 3, 1), large)


def test_what_is_damaged_or_left_over_is_no_snapshot(memory: SnapshotMemory) -> None:
    for number in (1, 2):
        for part in (0, 1):
            write(memory, number, part, torch.full((1000,), float(number)))
    os.pwrite(memory._file(2, 1), b"!", 2000)
    assert newest(memory) == (1, 10)
    memory.forget_all_but(1)
    write(memory, 2, 1, "of the next start")  # the other part is of the one before
    assert newest(memory) == (1, 10)
    os.ftruncate(memory._file(1, 0), 100)
    assert memory.whole() == {}


def test_it_is_of_now_and_refers_to_what_both_sides_have(memory: SnapshotMemory) -> None:
    shared, mine, theirs = torch.ones(1000).share_memory_(), object(), object()
    write(memory, 1, 0, [shared, mine], [mine])
    shared.zero_()
    tensor, found = read(memory, 1, 0, [theirs])
    assert tensor.sum() == 1000
    assert found is theirs


def test_what_refuses_is_left_out_and_named() -> None:
    made = SnapshotMemory(parts=1, statuses=0)
    snapshotter = Snapshotter((), arrived_classes())
    state = {"must": {"a": 1}, "may": {"callback": {"lock": threading.Lock(), "count": 3}, "other": threading.Lock()}}
    for number in (1, 2):
        made.write(number, 0, 0, snapshotter.pack(state, ["may"], {("may", "callback", "function")}))
        found = made.read(number, 0, ())
        assert found["must"] == {"a": 1}
        assert found["may"] == {"callback": {"count": 3}}
        assert ("may", "callback", "lock") in found["omitted"]
        assert ("may", "callback", "function") in found["omitted"]
    with pytest.raises(TypeError, match="pickle"):
        snapshotter.pack({"must": {"a": threading.Lock()}})
    made.close()


def test_what_refused_is_tried_again() -> None:
    made, snapshotter, part = SnapshotMemory(parts=1, statuses=0), Snapshotter((), arrived_classes()), {"a": object()}
    state: dict[Any, Any] = {"may": {"callback": part}}
    part["a"] = threading.Lock()
    snapshotter.pack(state, ["may"])
    assert snapshotter.refused_of(state) == [("may", "callback", "a", part["a"])]
    part["a"] = 1
    for number in range(1, 10):
        made.write(number, 0, 0, snapshotter.pack(state, ["may"]))
    assert made.read(9, 0, ())["may"] == {"callback": {"a": 1}}
    assert snapshotter.refused_of(state) == []
    made.close()


def test_a_bug_of_all_ranks_is_known_whichever_tells_of_it_first() -> None:
    def outcome(*failures: Failure) -> str:
        tl = TrainLoop(Wide(), DataLoader(TensorDataset(torch.zeros(4, 500), torch.zeros(4)), 2), accelerator="cpu")
        with Supervisor(tl, RestartOptions(-1, None), 2) as supervisor:
            for failure in failures:
                error = WorkerFailedError("It failed.", rank=failure.rank, exitcode=1)
                final = supervisor.failed(failure, error)
                if final is not None:
                    return final.message
                supervisor.agreed([supervisor.says()])
        return ""

    def raised(rank: int, text: str = "always", **kind: Any) -> Failure:
        return Failure(rank, 1, "LookupError", text, exitcode=1, **kind)

    assert "It came again" in outcome(raised(0), raised(1))
    assert "It came again" in outcome(raised(0), raised(0, "of another text"))
    assert outcome(raised(0), raised(1, "of another text")) == ""
    assert outcome(raised(0, consequence=True), raised(1, consequence=True)) == ""
    killed = [Failure(rank, 1, None, exitcode=-9) for rank in (0, 1)]
    assert outcome(*killed) == ""
    assert "It came again" in outcome(killed[0], killed[0])


@pytest.mark.parametrize(
    ("writing", "whole", "step", "steps"),
    [
        ([4, 6], [0, 0], 3, 200),  # the first: 6 of 600
        ([4, 6], [40, 9], 3, 300),  # one waited for the other to come, which it does at any step; 9 all have lost
        ([30, 6], [40, 9], 3, 1000),  # it has grown
        ([4], [5], 1000, 1),
        ([4], [5], 0, 500),  # a clock that stood still
    ],
)
def test_snapshots_are_as_seldom_as_their_cost_asks(
    writing: list[int], whole: list[int], step: float, steps: int
) -> None:
    assert steps_between(writing, whole, step) == steps


class Wide(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(500, 500)


@pytest.mark.parametrize(
    ("optimizer", "copies"), [(optim.SGD, 1), (optim.Adam, 3), (optim.Adagrad, 2), (optim.Adafactor, 1)]
)
def test_a_quota_without_room_for_two_is_refused(optimizer: Any, copies: int) -> None:
    """Before any process starts: also where the optimizer's state is not there yet."""
    model = Wide()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    tl = TrainLoop(
        model,
        DataLoader(TensorDataset(torch.zeros(4, 500), torch.zeros(4)), 2),
        optimizer=optimizer(model.parameters()),
        accelerator="cpu",
        resources=ResourceQuota(memory=2 * copies * nbytes),
    )
    with pytest.raises(ResourceError, match=r"max_restarts keeps two snapshots in memory, .* Raise it, or use"):
        tl.fit(num_epochs=1, max_restarts=1)
