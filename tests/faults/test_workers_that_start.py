"""A signal to the whole process group while workers of a loader are starting: they live on, as they do later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# torch's worker installs its handlers, seeds, and only then calls worker_init_fn: the signal comes between the two.
SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import worker
from trainloop import TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint

seed = torch.manual_seed

def strikes(value):
    done = seed(value)
    if os.getpid() != caller and worker._worker_info is None:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        os.kill(caller, getattr(signal, sys.argv[2]))
    return done

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, x):
        time.sleep(0.05)
        return self.fc(x)

if __name__ == "__main__":
    caller = os.getpid()
    model = Net()
    data = TensorDataset(torch.zeros(200, 4), torch.zeros(200).long())
    loop = TrainLoop(model, DataLoader(data, 2, num_workers=2), None, None, torch.optim.SGD(model.parameters(), 0.1),
                     torch.nn.CrossEntropyLoss(), accelerator="cpu", progress_bar=False)
    torch.manual_seed = strikes
    loop.fit(1, callbacks=[ModelCheckpoint(sys.argv[1], every_n_epochs=None, every_n_steps=50)])
"""


@pytest.mark.long
@pytest.mark.parametrize(("number", "ends_with"), [("SIGTERM", 143), ("SIGUSR1", 138)])
def test_workers_that_are_starting_outlive_a_signal_to_all(number: str, ends_with: int, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), number], capture_output=True, text=True)
    assert done.returncode == ends_with, done.stderr
    assert "DataLoader worker" not in done.stderr
    assert list(folder.glob("*.pt"))  # as at any other step


KEPT = """
import gc
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from trainloop import TrainLoop, TTBasicModel

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)

gc.disable()
x, kept = torch.randn(20, 2), []
for _ in range(3):
    model = Net()
    loader = DataLoader(TensorDataset(x, x[:, :1]), 4, num_workers=1, persistent_workers=True)
    tl = TrainLoop(model, loader, None, None, optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), progress_bar=False)
    tl.fit(num_epochs=1)
    kept.append(tl)
"""


@pytest.mark.long
def test_persistent_workers_that_are_left_at_exit_end_without_a_message(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
