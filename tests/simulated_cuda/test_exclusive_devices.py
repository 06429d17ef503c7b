"""GPUs in exclusive mode: the caller must have no context on a GPU that a rank uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainloop import TrainLoop, TTBasicModel

class Net(TTBasicModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

if __name__ == "__main__":
    for mode, devices in (("ddp", 2), ("single", 1)):
        model = Net()
        loop = TrainLoop(
            model, DataLoader(TensorDataset(torch.ones(8, 4), torch.arange(8) % 2), 2), gpu_mode=mode,
            optimizer=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss(),
            accelerator="cuda", devices=devices, auto_select_gpus=True, progress_bar=False,
        )
        loop.fit(num_epochs=1)
        loop.fit(num_epochs=2)
        print("trained", mode, flush=True)
"""


@pytest.fixture
def exclusive(tmp_path: Path) -> Iterator[str]:
    """Value of ``FAKECUDA_EXCLUSIVE``, any name, for devices of the test's own."""
    yield tmp_path.name
    for path in Path("/tmp").glob(f"fakecuda-exclusive-{tmp_path.name}-*"):
        path.unlink()


def run_python(tmp_path: Path, code: str, exclusive: str) -> list[str]:
    (tmp_path / "script.py").write_text(code)
    environ = {**os.environ, "FAKECUDA_EXCLUSIVE": exclusive, "TRAINLOOP_LEASE_DIR": str(tmp_path / "leases")}
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_exclusive_device_has_one_process(exclusive: str, tmp_path: Path) -> None:
    """nvidia-smi's manual, 'Compute Mode': EXCLUSIVE_PROCESS."""
    code = """
import subprocess, sys, torch
print(torch.ones(1, device="cuda:0").item(), torch.ones(1, device="cuda:1").item())
command = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda:0')"]
print("busy or unavailable" in subprocess.run(command, capture_output=True, text=True).stderr)
"""
    assert run_python(tmp_path, code, exclusive) == ["1.0 1.0", "True"]


def test_ranks_use_the_gpus_that_auto_select_gpus_has_tried(exclusive: str, tmp_path: Path) -> None:
    assert run_python(tmp_path, SCRIPT, exclusive) == ["trained ddp", "trained single"]
