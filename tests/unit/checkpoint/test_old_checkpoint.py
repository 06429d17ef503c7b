"""Checkpoints of earlier commits go on: those in tests/data are older than ``trainloop.train_loop`` as a package.

They were made by running this file as a script, with the code of that commit::

    PYTHONPATH=. python tests/unit/checkpoint/test_old_checkpoint.py tests/data
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTModel, checkpoint
from trainloop.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint

DATA = Path(__file__).parents[2] / "data"
SAVED_AFTER = 7  # steps, of 5 an epoch


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        loss: Tensor = criterion(self(x.to(device)), y.to(device))
        self.log("twice", 2 * loss.detach())
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


def trained(mode: str, folder: Path, *, epochs: int = 3, **fit_arguments: Any) -> TrainLoop:
    torch.manual_seed(0)
    x = torch.randn(37, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = cpu_loop(
        model,
        DataLoader(data, batch_size=8 if mode == "single" else 4, shuffle=True),
        optimizer,
        validation_loader=DataLoader(data, batch_size=16),
        gpu_mode=mode,
        devices=2,
        seed=1,
    )
    callbacks = [
        ModelCheckpoint(folder, every_n_epochs=None, every_n_steps=SAVED_AFTER, keep=99),
        LRScheduler(StepLR(optimizer, 4)),
        EarlyStopping("val_loss", patience=9),
    ]
    loop.fit(num_epochs=epochs, callbacks=callbacks, **fit_arguments)
    return loop


@pytest.mark.parametrize("written_by", ["single", "ddp"])
def test_a_checkpoint_of_an_earlier_commit_goes_on(written_by: str, tmp_path: Path) -> None:
    resumed = trained("single", tmp_path / "resumed", resume_from=DATA / f"checkpoint_{written_by}.pt")
    whole = trained("single", tmp_path / "whole")
    assert (resumed.epoch, resumed.global_step) == (whole.epoch, whole.global_step) == (3, 15)
    assert list(resumed.history) == list(whole.history)
    if written_by == "ddp":  # dropout on two ranks draws other numbers than on one
        return
    written = checkpoint.load(DATA / "checkpoint_single.pt")["history"]["values"]["loss"]
    if whole.history["loss"][:1] != pytest.approx(written, rel=1e-4):  # PyTorch 2.6 draws other numbers for dropout
        assert torch.__version__ < TorchVersion("2.7")
        return
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())
    for name, values in whole.history.items():
        assert resumed.history[name] == pytest.approx(values, rel=1e-4), name
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


if __name__ == "__main__":
    for mode in ("single", "ddp"):
        with tempfile.TemporaryDirectory() as temporary:
            trained(mode, Path(temporary), epochs=2)
            (found,) = Path(temporary).glob(f"*step={SAVED_AFTER:08}.pt")
            shutil.copy(found, Path(sys.argv[1]) / f"checkpoint_{mode}.pt")
