"""A ``StopIteration`` on one rank ends the run with an error that says where; others don't wait for the time-out."""

from __future__ import annotations

import time

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from trainloop import TTBasicModel
from trainloop.errors import WorkerFailedError


class Stops(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 13:  # rank 1's
            index = next(iter([]))
        return torch.full((3,), float(index)), torch.tensor(float(index))


class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        return self.fc(x).squeeze(1)


@pytest.mark.long
def test_one_ranks_stop_iteration_ends_the_run():
    model = Net()
    loop = cpu_loop(
        model,
        DataLoader(Stops(), 4),
        optim.SGD(model.parameters(), lr=0.01),
        nn.MSELoss(),
        gpu_mode="ddp",
        devices=2,
        timeout=600,
    )
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match="StopIteration") as caught:
        loop.fit(num_epochs=1)
    assert time.monotonic() - start < 300  # less than `timeout`
    assert caught.value.rank == 1
    assert "index = next(iter([]))" in caught.value.traceback
