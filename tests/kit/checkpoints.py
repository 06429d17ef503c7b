"""Checkpoints for tests: a state, files of it, a small disk, and as much of a loop as ModelCheckpoint sees."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conftest import make_data
from kit.places import ROOT
from trainloop import TrainLoop, TTBasicModel, checkpoint
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint
from trainloop.checkpoint import CheckpointInfo, folder
from trainloop.history import History


def make_state(number: float = 0.0) -> dict[str, Any]:
    return {
        "model": OrderedDict(w=torch.full((50, 40), number), b=torch.arange(3)),
        "optimizer": {"state": {0: {"exp_avg": torch.full((50, 40), -number), "step": torch.tensor(number)}}},
        "history": {"loss": [0.5, 0.25], "nan": [float("nan")]},
        "rng": {"python": (3, (1, 2, 3), None), "torch": torch.arange(20, dtype=torch.uint8)},
        "place": {"epoch": int(number), "batch": 3},
    }


def write_some(where: Path, count: int = 3) -> list[Path]:
    """``count`` checkpoints, oldest first; the number of each is in its state."""
    paths = []
    for i in range(1, count + 1):
        info = CheckpointInfo(epoch=i, step=10 * i, run="r", stamp=i)
        path = where / checkpoint.checkpoint_name(info)
        checkpoint.save(path, make_state(i), info)
        checkpoint.mark_newest(folder(where), path.name)
        paths.append(path)
    return paths


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def in_small_tmpfs(code: str, where: Path, megabytes: int) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with a tmpfs of that size at ``where``, a mount that only this process sees."""
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(where)], capture_output=True)
    if probe.returncode:
        pytest.skip("needs root and unshare to mount a small tmpfs")
    script = f'mount -t tmpfs -o size={megabytes}m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(where), sys.executable, textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


class StandIn:
    """As much of a loop as ModelCheckpoint sees: counters, a history, a state."""

    end_auto_eval: Any = True
    validation_loader: Any = object()
    is_global_zero = True
    gpu_mode = "single"
    left_behind = False
    criterion: Any = None

    def __init__(self, *callbacks: ModelCheckpoint, size: int = 4) -> None:
        self.model = nn.Linear(size, size, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.epoch = self.global_step = self.history_epoch = 0
        self.history = History()
        self.callbacks = callbacks
        self.states = 0
        for callback in callbacks:
            callback.register_train_loop_object(self)

    def checkpoint_state(self) -> dict[str, Any]:
        self.states += 1
        return {
            "model": self.model.state_dict(),
            "history": self.history.state_dict(),
            "place": {"epoch": self.epoch, "step": self.global_step},
            "callbacks": [callback.state_dict() for callback in self.callbacks],
        }

    def run(self, epochs: int, steps: int = 5, values: Any = (), name: str = "val_loss") -> StandIn:
        values = list(values)
        for callback in self.callbacks:
            callback.on_train_begin()
        for _ in range(epochs):
            self.run_epoch(steps, **({name: values.pop(0)} if values else {}))
        for callback in self.callbacks:
            callback.on_train_end()
        return self

    def run_epoch(self, steps: int = 5, **values: float) -> None:
        for _ in range(steps):
            self.step()
        for name, value in values.items():
            self.history.record(name, value, self.epoch)
        for callback in self.callbacks:
            callback.on_epoch_end()
        self.epoch += 1

    def note(self, **values: Any) -> None:
        self.__dict__.update(values)

    def step(self) -> None:
        self.history_epoch = self.epoch
        self.global_step += 1
        with torch.no_grad():
            self.model.weight.fill_(self.global_step)
        for callback in self.callbacks:
            callback.save_due()


def written(where: Path) -> list[tuple[int, int, str]]:
    """Epoch, step and reason of each whole checkpoint, oldest first."""
    return [(c.info.epoch, c.info.step, c.info.reason) for c in checkpoint.checkpoints(where) if c.info is not None]


def steps(where: Path) -> list[int]:
    return [step for _, step, _ in written(where)]


def resumed(keeper: ModelCheckpoint) -> StandIn:
    """A loop that goes on from the newest checkpoint, as another process would."""
    state = keeper.last_state()
    assert state is not None
    loop = StandIn(keeper)
    keeper.on_train_begin()
    keeper.load_state_dict(state["callbacks"][0])
    loop.epoch, loop.global_step = state["place"]["epoch"] + 1, state["place"]["step"]
    loop.history.load_state_dict(state["history"])
    return loop


class Distilled(TTBasicModel):
    """A student beside a frozen teacher, which checkpoints may leave out."""

    def __init__(self, teacher_seed: int = 1, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.student = nn.Linear(8, 3)
        torch.manual_seed(teacher_seed)
        self.teacher = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))
        self.teacher.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        found = self(x)
        return criterion(found, y) + nn.functional.mse_loss(found, self.teacher(x))


def distilled_loop(model: Any = None, **options: Any) -> TrainLoop:
    model = Distilled() if model is None else model
    optimizer = torch.optim.Adam(model.student.parameters(), lr=0.01)
    loader = DataLoader(make_data(), batch_size=16, shuffle=True)
    options = {"accelerator": "cpu", "progress_bar": False, "seed": 0, **options}
    return TrainLoop(model, loader, loader, None, optimizer, nn.CrossEntropyLoss(), **options)
