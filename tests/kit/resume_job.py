"""A training job that tests kill and resume, and a process that starts it often without importing torch each time.

All that makes runs differ is in it: shuffling, workers that draw random numbers, dropout, batch norm, Adam, a scheduler
by steps, accumulation over 3 with a shorter last step, bf16, metrics logged by the step, early stopping's counter, and
numbers drawn from Python's, numpy's and torch's generators in the loss.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, Dataset

from kit.places import IMPORTS
from trainloop import TrainLoop, TTModel
from trainloop.callbacks import AbstractCallback, EarlyStopping, LRScheduler, ModelCheckpoint

SAMPLES, BATCH, ACCUMULATION, EPOCHS = 213, 8, 3, 4  # the last global batch of two ranks: 3 and 2 samples
EVERY = 7  # steps between checkpoints
TIMEOUT_S = 100  # of a job

seen: list[int] = []  # by this process, since its last step


class Rows(Dataset[Any]):
    """Rows with noise that is drawn in the workers."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = (self.x @ torch.randn(8, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        noise = torch.randn(8) + float(np.random.rand()) + random.random()
        return i, self.x[i] + 0.1 * noise, self.y[i]


class Net(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        indices, x, y = batch_data
        if self.training:
            seen.extend(indices.tolist())
            x = x * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
        loss = criterion(self(x.to(device)).float(), y.to(device))
        if self.training:
            self.log("loss_twice", 2 * loss.detach(), on_step=True, on_epoch=True)
        return loss

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
        _, x, y = batch_data
        return self(x.to(device)), y, {}


class Witness(AbstractCallback):
    """Writes which samples each step took, on each rank, and tells the test how far training is."""

    def __init__(self, where: str, attempt: int, signal_at: tuple[int, int] | None) -> None:
        super().__init__("Witness", execution_order=-1)
        self.where, self.attempt = where, attempt
        self.signal_at = signal_at  # the rank that gets SIGTERM, and after which step

    def on_train_begin(self) -> None:
        seen.clear()

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        line = json.dumps([loop.global_step, seen])
        seen.clear()
        with open(f"{self.where}/seen-{self.attempt:03d}-{loop.rank}", "a") as file:
            file.write(line + "\n")
        if self.signal_at is not None and [loop.rank, loop.global_step] == list(self.signal_at):
            os.kill(os.getpid(), signal.SIGTERM)


def run(where: str, mode: str, attempt: int = 0, every: int | None = EVERY, ranks: int = 2, batch: int = BATCH,
        workers: int = 2, async_save: bool = False, signal_at: Any = None,
        **arguments: Any) -> None:  # fmt: skip
    """Train, going on from the newest checkpoint in ``where``; at the end write what came out to ``where/end.pt``."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": ranks} if mode == "ddp" else {}
    data, held_out = Rows(SAMPLES), Rows(53)
    tl = TrainLoop(
        model,
        DataLoader(data, batch, shuffle=True, num_workers=workers),
        DataLoader(held_out, batch),
        None,
        optimizer,
        nn.CrossEntropyLoss(),
        gpu_mode=mode,
        use_amp="bf16",
        seed=3,
        progress_bar=False,
        **options,
    )
    callbacks = [Witness(where, attempt, signal_at), LRScheduler(CosineAnnealingWarmRestarts, interval="step", T_0=50)]
    callbacks.append(EarlyStopping("val_loss", patience=100))
    if every is not None:
        callbacks.append(
            ModelCheckpoint(
                f"{where}/checkpoints", every_n_epochs=None, every_n_steps=every, keep=2, async_save=async_save
            )
        )
    resume = {"resume_from": "last"} if every is not None else {}
    tl.fit(num_epochs=EPOCHS, callbacks=callbacks, grad_accumulation=ACCUMULATION, **{**resume, **arguments})
    end = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": tl.history.state_dict(),
        "early stopping": callbacks[2].epochs_without_improvement,
        "best": callbacks[2].best,
        "counters": [tl.epoch, tl.global_step, tl.total_iteration_idx],
    }
    torch.save(end, f"{where}/end.pt.tmp")
    os.replace(f"{where}/end.pt.tmp", f"{where}/end.pt")


# -- started by the tests ----------------------------------------------------------------------------------------------


def serve() -> None:
    """Run each job that a line of standard input describes, in a fork of this process; tell its number, and its end."""
    torch.set_num_threads(1)
    faulthandler.enable()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            code = 70
            with open(json.loads(line)["where"] + "/output", "ab", buffering=0) as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            try:
                with warnings.catch_warnings():
                    run(**json.loads(line))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Jobs:
    """Starts jobs, one after the other, through one process that has imported everything."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTS}
        code = "from kit import resume_job; resume_job.serve()"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._stdin, self._stdout = self._server.stdin, self._server.stdout

    def start(self, where: Path, **arguments: Any) -> int:
        print(json.dumps({"where": str(where), **arguments}), file=self._stdin, flush=True)
        return int(self._stdout.readline())

    def wait(self) -> int:
        """Exit code of the job that was started last; negative is a signal's number."""
        if not select.select([self._stdout], [], [], TIMEOUT_S)[0]:
            self._end_job()
        return int(self._stdout.readline())

    def _end_job(self) -> None:
        """Of a job that hangs: its main process prints every thread's stack into its output, and is ended."""
        for process in psutil.Process(self._server.pid).children():
            process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        self._stdin.close()
        self._server.wait(30)
        self._stdout.close()


@contextmanager
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    try:
        yield started
    finally:
        started.close()


def steps_done(where: Path, attempt: int) -> int:
    """Steps that rank 0 has done in this attempt."""
    path = where / f"seen-{attempt:03d}-0"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_steps(where: Path, attempt: int, steps: int, pid: int, timeout_s: float = 60.0) -> None:
    """Until rank 0 has done so many steps in this attempt, or the job has ended."""
    deadline = time.monotonic() + timeout_s
    while steps_done(where, attempt) < steps and psutil.pid_exists(pid) and time.monotonic() < deadline:
        if (where / "end.pt").exists():
            return
        time.sleep(0.0005)


def batches_by_step(where: Path) -> dict[int, list[int]]:
    """The samples of each step in the sequence that counts: what a later attempt did takes the place of the earlier's.

    Of a rank that was killed, lines of a step may be missing; those steps are done again by the next attempt.
    """
    found: dict[int, list[int]] = {}
    attempts = sorted({path.name.split("-")[1] for path in where.glob("seen-*")})
    for attempt in attempts:
        steps: dict[int, list[int]] = {}
        for path in sorted(where.glob(f"seen-{attempt}-*")):
            for line in path.read_text().splitlines():
                step, indices = json.loads(line)
                steps.setdefault(step, []).extend(indices)
        if steps:
            found = {step: indices for step, indices in found.items() if step < min(steps)}
        found.update(steps)
    return {step: sorted(indices) for step, indices in found.items()}
