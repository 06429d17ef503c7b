"""Train in one mode, and use what belongs to it, on macOS or Windows: ``python modes.py ddp``, or all of ``MODES``.

``make test-platforms`` runs them on systems that sitecustomize.py pretends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import EarlyStopping, GradientClipping, ModelCheckpoint, TensorBoard, TimeLimit
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.resources import ResourceQuota
from trainloop.tuning import tune

WINDOWS = sys.platform == "win32"


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Raises(AbstractCallback):
    """Raise once."""

    def __init__(self, folder: Path) -> None:
        super().__init__("raises")
        self.marker = folder / "has_raised"

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 3 and loop.is_global_zero and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("on purpose")


class Interrupts(AbstractCallback):
    """Send this process a signal at a step."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupts")
        self.number = number

    def on_batch_end(self) -> None:
        if self.train_loop_obj.global_step == 3:
            signal.raise_signal(self.number)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(101, 8, generator=torch.Generator().manual_seed(0)), torch.arange(101) % 3)


def make_loop(batch_size: int = 16, **arguments: Any) -> TrainLoop[Net]:
    torch.manual_seed(0)
    model = Net()
    loaders = [DataLoader(data(), batch_size=batch_size, shuffle=shuffle) for shuffle in (True, False, False)]
    options = {"accelerator": "cpu", "seed": 0, "progress_bar": False, **arguments}
    return TrainLoop(model, *loaders, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **options)


def trained(folder: Path, epochs: int = 2, fit: dict[str, Any] | None = None, **arguments: Any) -> TrainLoop[Net]:
    """Return a loop that has trained, with callbacks, a checkpoint an epoch and TensorBoard."""
    loop = make_loop(**arguments)
    train(loop, folder, epochs, **(fit or {}))
    return loop


def train(loop: TrainLoop[Net], folder: Path, epochs: int = 2, **fit: Any) -> None:
    callbacks = [
        ModelCheckpoint(folder / "checkpoints", keep=1),
        TensorBoard(folder / "board"),
        EarlyStopping(monitor="val_loss", patience=5),
        GradientClipping(1.0),
        TimeLimit(600),
    ]
    loop.fit(num_epochs=epochs, callbacks=callbacks, **fit)


def check(loop: TrainLoop[Net], folder: Path) -> None:
    """Check that a loop has trained, evaluates each sample once, and has written what it should."""
    assert loop.history["loss"][-1] < loop.history["loss"][0]
    predictions, targets, _ = loop.predict_on_test_set()
    assert predictions.shape == (101, 3)
    assert torch.equal(torch.as_tensor(targets), torch.arange(101) % 3)
    assert loop.evaluate_loss_on_test_set() > 0
    rows = [len(part[0]) for part in loop.predict_with_model(loop.test_loader, stream=True)]
    assert sum(rows) == 101
    assert len(list((folder / "checkpoints").glob("*.pt"))) == 1, list((folder / "checkpoints").iterdir())
    assert list((folder / "board").rglob("*tfevents*"))


def check_resumed(folder: Path, **arguments: Any) -> None:
    """Check that a training resumes with the numbers of one that was never interrupted."""
    whole = trained(folder / "whole", 3, **arguments)
    trained(folder / "parts", 2, **arguments)
    resumed = trained(folder / "parts", 3, {"resume_from": "last"}, **arguments)
    assert torch.equal(whole.model.fc.weight, resumed.model.fc.weight)


def single(folder: Path) -> None:
    loop = trained(folder)
    check(loop, folder)
    check_resumed(folder)
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        try:
            make_loop().fit(num_epochs=5, callbacks=[ModelCheckpoint(folder / "interrupted"), Interrupts(number)])
        except kind:
            continue
        raise AssertionError(f"{number!r} did not end fit")
    assert list((folder / "interrupted").glob("*.pt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(resources=ResourceQuota(num_cpus=1)).fit(num_epochs=1)
    texts = " ".join(str(warning.message) for warning in caught)
    assert "limits only threads" in texts
    assert ("not leased on Windows" in texts) == WINDOWS


def workers(folder: Path) -> None:
    loop = make_loop()
    loop.train_loader = DataLoader(data(), batch_size=16, num_workers=1)
    loop.fit(num_epochs=1)
    assert len(loop.history["loss"]) == 1


def dp(folder: Path) -> None:
    check(trained(folder, gpu_mode="dp", devices=2), folder)


def ddp(folder: Path) -> None:
    alone = trained(folder / "alone", gpu_mode="dp", devices=2)
    loop = make_loop(gpu_mode="ddp", devices=2, batch_size=8)
    with loop.ranks():
        train(loop, folder)
        assert torch.allclose(loop.model.fc.weight, alone.model.fc.weight, atol=1e-6)
        check(loop, folder)


def failures(folder: Path) -> None:
    loop = make_loop(gpu_mode="ddp", devices=2)
    with pytest.raises(WorkerFailedError, match="rank 0 of 2 raised RuntimeError: on purpose"):
        loop.fit(num_epochs=1, callbacks=[Raises(folder)])
    loop = make_loop()
    (folder / "has_raised").unlink()
    loop.fit(num_epochs=2, callbacks=[Raises(folder)], max_restarts=1)
    assert len(loop.restarts) == 1


def fsdp(folder: Path) -> None:
    if WINDOWS:
        with pytest.raises(ConfigurationError, match=r"^gpu_mode='fsdp' does not work on Windows\."):
            make_loop(gpu_mode="fsdp", devices=2).fit(num_epochs=2)
        return
    loop = make_loop(gpu_mode="fsdp", devices=2)
    loop.fit(num_epochs=2)
    assert loop.history["loss"][-1] < loop.history["loss"][0]


def make_trial(params: dict[str, Any], fold: Any) -> TrainLoop[Net]:
    model = Net()
    loader = DataLoader(data(), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return TrainLoop(model, loader, loader, None, optimizer, nn.CrossEntropyLoss(), accelerator="cpu")


def tuning(folder: Path) -> None:
    result = tune(
        make_trial,
        {"lr": [0.5, 1e-4]},
        num_trials=2,
        searcher="grid",
        seed=0,
        metric="val_loss",
        mode="min",
        total=ResourceQuota(num_cpus=1),
        fit_args={"num_epochs": 1},
        storage=folder / "search",
        progress=False,
    )
    assert result.best_params == {"lr": 0.5}


def doctor(folder: Path) -> None:
    command = [sys.executable, "-m", "trainloop", "doctor", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {check["name"]: check["status"] for check in json.loads(said.stdout)["checks"]}
    # pip check misses what packages require on the pretended system.
    assert [name for name, status in found.items() if status == "problem"] in ([], ["requirements"]), said.stdout
    assert "/dev/shm" not in found
    assert ("file descriptors" in found) != WINDOWS


MODES = {f.__name__: f for f in (single, workers, dp, ddp, failures, fsdp, tuning, doctor)}


if __name__ == "__main__":
    assert sys.platform == os.environ.get("PRETEND_PLATFORM", sys.platform)
    torch.set_num_threads(1)
    # A shell's background jobs ignore Ctrl-C, as does then the training that it is to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        tempfile.tempdir = temporary
        for mode in sys.argv[1:] or MODES:
            place = Path(temporary) / mode
            place.mkdir()
            MODES[mode](place)
            print(f"{sys.platform} {mode}: ok", flush=True)
