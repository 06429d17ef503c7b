"""Random states of persistent workers without a seed: told only where wanted, and no run ends for want of them."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainloop import TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.data.persistent import ask_workers
from trainloop.data.train import train_feed


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3)


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return self.fc(batch_data).pow(2).mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.fc(batch_data), batch_data, {}


def noise(**options: Any) -> Any:
    return DataLoader(Noise(), 4, num_workers=2, persistent_workers=True, **options)


def nothing_can_be_written(_: int) -> None:
    """As on a full disk: files can be made, and hold no more than a batch."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))


def test_states_of_the_epochs_begin_are_told_in_its_midst() -> None:
    loader = noise()
    list(loader)
    expected = ask_workers(loader)
    assert expected is not None
    feed = train_feed(loader)
    steps = feed.steps(1)
    next(steps)
    told, again = feed.state_dict()["workers"], feed.state_dict()["workers"]
    list(steps)
    for found in (told, again):
        assert [repr(state) for state in found] == [repr(state) for state in expected]
        assert all(torch.equal(a["packed"], b["packed"]) for a, b in zip(found, expected, strict=True))
    later = feed.state_dict()["workers"]
    assert not torch.equal(later[0]["packed"], told[0]["packed"])


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [False, True])
def test_workers_that_can_not_write(checkpoints: bool, tmp_path: Path) -> None:
    model = Net()
    tl = TrainLoop(
        model,
        noise(worker_init_fn=nothing_can_be_written),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        progress_bar=False,
    )
    began = time.monotonic()
    tl.fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path, every_n_steps=2)] if checkpoints else [])
    assert tl.epoch == 3
    assert time.monotonic() - began < 50  # nobody waits for an answer that can't come


def test_a_folder_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    loader = noise()
    feed = train_feed(loader)
    list(feed.steps(1))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    steps = feed.steps(1)  # asks for none
    next(steps)
    assert feed.state_dict()["workers"] is None
    assert len(list(steps)) == 2
