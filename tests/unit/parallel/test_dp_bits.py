"""In dp, bits do not depend on what the process has done before: a resumed run has those of an uninterrupted one."""

from __future__ import annotations

import subprocess
import sys

import pytest

TWO_RUNS = """
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from trainloop import TrainLoop, TTBasicModel

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gates = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    def forward(self, x):
        hidden = self.body(x)
        for _ in range(2):
            hidden = hidden + self.gates[0](hidden) * torch.sigmoid(self.gates[1](hidden))
        return self.head(hidden)

def trained():
    model, draws = Net(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=draws), torch.randint(3, (24,), generator=draws))
    loop = TrainLoop(
        model, DataLoader(data, 12), optimizer=optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        criterion=nn.CrossEntropyLoss(), gpu_mode="dp", devices=3, accelerator="cpu", progress_bar=False,
    )
    loop.fit(num_epochs=4)
    return torch.cat([p.detach().flatten() for p in model.parameters()])

torch.set_num_threads(1)
first, second = trained(), trained()
print("equal" if torch.equal(first, second) else (first - second).abs().max().item())
"""


@pytest.mark.long
def test_the_first_run_of_a_process_has_the_bits_of_the_next() -> None:
    run = subprocess.run([sys.executable, "-c", TWO_RUNS], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "equal"
