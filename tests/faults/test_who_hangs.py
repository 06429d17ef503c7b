"""One rank of a ``fit`` hangs or dies where no collective notices it, or where others' errors look like the cause."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.loops import Layers, cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import WorkerFailedError

TIMEOUT_S = 4.0


def hangs_in_native_code() -> None:
    """With Python's lock held: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(1000)


def hangs_in_python() -> None:
    threading.Event().wait()


class Rows(Dataset[Any]):
    """Rows of which the last of rank 1 does something."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.place == "getitem" and index == 47:
            hangs_in_python()
        return torch.ones(8), index % 3


def net() -> Layers:
    """With buffers, which DDP exchanges before each forward."""
    return Layers(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Goes(AbstractCallback):
    """On one rank something happens in a hook, or in this callback's own state."""

    def __init__(self, place: str, on_rank: int = 1) -> None:
        super().__init__("goes")
        self.place, self.on_rank = place, on_rank

    def _at(self, place: str) -> bool:
        return self.place == place and dist.get_rank() == self.on_rank

    def state_dict(self) -> dict[str, Any]:
        if self._at("state_dict"):
            hangs_in_native_code()
        return {}

    def on_batch_begin(self) -> None:
        if self._at("abort") and self.train_loop_obj.global_step == 2:
            os.abort()

    def on_train_end(self) -> None:
        if self._at("train end"):
            hangs_in_python()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["place"] == "arrival" and os.environ.get("RANK") == "1":
            hangs_in_python()


def fit(place: str, folder: Path, ranks: int = 2, on_rank: int = 1) -> WorkerFailedError:
    torch.manual_seed(0)
    model = net()
    loop = cpu_loop(model, DataLoader(Rows(place), batch_size=4), gpu_mode="ddp", devices=ranks, timeout=TIMEOUT_S)
    keeper = [ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=2)] if place == "state_dict" else []
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[Goes(place, on_rank), *keeper])
    return caught.value


# place, ranks, who, what its stack shows
HANGS = [
    pytest.param("train end", 2, 1, "in on_train_end", id="after the last collective"),
    pytest.param(
        "train end", 3, 0, "in on_train_end", id="rank 0 of 3 after the last collective", marks=pytest.mark.slow
    ),
    pytest.param("getitem", 2, 1, "in __getitem__", id="in the dataset", marks=pytest.mark.slow),
    # Rank 0 holds the callback's state that is written.
    pytest.param(
        "state_dict", 2, 0, "in state_dict", id="in native code of a callback's state", marks=pytest.mark.slow
    ),
    pytest.param("arrival", 2, 1, "in __setstate__", id="before it joins the group", marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize(("place", "ranks", "who", "stack"), HANGS)
def test_the_rank_that_hangs_is_named_with_its_stack(
    place: str, ranks: int, who: int, stack: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    error = fit(place, tmp_path, ranks, on_rank=who)
    message = str(error)
    assert (error.rank, error.exitcode) == (who, None), message
    assert re.match(rf"rank {who} of {ranks} hangs: ranks? .* waited 4 s for it", message), message
    hanging = message.split(f"Python stack of rank {who}:")[1].split("Python stack of rank")[0]
    assert stack in hanging, message
    assert time.monotonic() - started < 90


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_aborts_is_named_and_not_who_lost_it(ranks: int, tmp_path: Path) -> None:
    for _ in range(2):
        error = fit("abort", tmp_path, ranks)
        assert (error.rank, error.exitcode) == (1, -6), error


class LeavesAThread(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("leaves a thread")

    def on_train_end(self) -> None:
        if dist.get_rank() == 1:
            threading.Thread(target=threading.Event().wait, name="never ends").start()


@pytest.mark.slow
def test_a_rank_that_is_done_but_does_not_end_costs_no_result() -> None:
    model = net()
    loop = cpu_loop(model, DataLoader(Rows(""), batch_size=4), gpu_mode="ddp", devices=2, timeout=TIMEOUT_S)
    with pytest.warns(
        RuntimeWarning, match="(?s)1 of 2 ranks did not exit within 4 s after finishing all work.*rank 1"
    ):
        assert loop.fit(num_epochs=1, callbacks=[LeavesAThread()]) is model
    assert loop.global_step == 6
