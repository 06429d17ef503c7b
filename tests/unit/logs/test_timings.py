"""Where a training's time goes: a slow loader and a slow step are told apart."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, Raises, make_loop
from torch import Tensor, optim
from torch.utils.data import DataLoader, Dataset

from trainloop import AbstractCallback, TrainLoop
from trainloop.train_loop.progress.timings import Timings

NAP = 0.02
PARTS = ("data", "step")


def nap() -> None:
    time.sleep(NAP)


class Sleepy(Net):
    """Naps once a batch where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if self.where == "step":
            nap()
        return super().get_loss(batch_data, criterion, device)


class SleepyRows(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        if i % 16 == 0:
            nap()
        return self.data[i]


def slow_loop(where: str) -> TrainLoop:
    torch.manual_seed(0)
    model = Sleepy(where)
    loop = make_loop(model, optimizer=optim.SGD(model.parameters(), lr=0.1))
    if where == "data":
        loop.train_loader = DataLoader(SleepyRows(loop.train_loader.dataset), 16)
    return loop


def check_sum(found: Timings) -> None:
    assert sum(getattr(found, part) for part in PARTS) == pytest.approx(found.seconds)
    assert all(getattr(found, part) >= 0 for part in PARTS), found


@pytest.mark.parametrize("where", PARTS)
def test_the_part_that_is_slow_is_found(where: str) -> None:
    loop = slow_loop(where)
    begun = time.perf_counter()
    loop.fit(num_epochs=2)
    took = time.perf_counter() - begun
    found = loop.timings
    assert (found.steps, found.samples, len(found.epochs)) == (2 * STEPS_PER_EPOCH, 2 * 101, 2)
    check_sum(found)
    slept = 2 * STEPS_PER_EPOCH * NAP
    assert slept <= getattr(found, where) <= found.seconds <= took
    assert found.seconds - getattr(found, where) <= took - slept  # and no nap is counted elsewhere
    assert 202 / took < found.samples_per_s < 202 / slept
    assert found.share(where) == max(found.share(part) for part in PARTS)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == list(PARTS)
    assert lines[-1].startswith("14 steps in ")


def test_a_running_epoch_can_be_read_from_anywhere() -> None:
    """In a hook, and in ``get_loss`` itself."""
    seen: list[Timings] = []

    class Looks(Sleepy):
        def get_loss(self, *args: Any) -> Tensor:
            loss = super().get_loss(*args)
            seen.append(loop.timings)
            return loss

    class Reads(AbstractCallback):
        def on_batch_end(self) -> None:
            seen.append(self.train_loop_obj.timings)

    loop = make_loop(Looks("step"), validation=False)
    assert loop.timings == Timings()
    loop.fit(num_iterations=3, callbacks=[Reads()])
    # In the first step's get_loss there is no step yet that could be told about.
    assert [found.steps for found in seen] == [0, 0, 1, 1, 2, 2]
    for found in seen[2:]:
        check_sum(found)
        assert found.step >= NAP
    again = make_loop()
    with pytest.raises(KeyError):
        again.fit(num_epochs=2, callbacks=[Raises(KeyError("no more"), "on_batch_begin", step=STEPS_PER_EPOCH + 2)])
    assert again.timings.steps == STEPS_PER_EPOCH + 2  # with the finished steps of the last epoch
