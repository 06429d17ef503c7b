"""A training that strikes itself down at planned moments, and all that can be known of it afterwards."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from kit.event_files import read
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import EarlyStopping, ExponentialMovingAverage, LRScheduler, ModelCheckpoint, TensorBoard
from trainloop.checkpoint import file

ROWS, BATCH, EPOCHS = 92, 12, 2
PATIENCE_S, TIMEOUT_S = 60.0, 8.0  # for a rank; where one hangs

Plan = tuple[int, str, int, str]
"""Rank, place, step that it is at or past, and what happens there; once."""


# -- what happens ------------------------------------------------------------------------------------------------------


class SoftError(Exception):
    pass


def strike(what: str) -> None:
    if what == "raises":
        raise SoftError("by plan")
    if what == "out of memory":
        raise MemoryError("by plan")
    if what == "exits":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(4)
    elif what == "hangs":
        time.sleep(1000)
    elif what == "hangs in native code":
        while True:  # a signal ends the call
            ctypes.PyDLL(None).sleep(1000)  # with Python's lock held
    elif what == "loses its connections":
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    ctypes.CDLL(None).shutdown(int(name), 2)
    elif what == "a worker dies":
        for child in multiprocessing.active_children():
            child.kill()
    else:
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(1000)


class Strikes(AbstractCallback):
    """Carries out a plan, and remembers what it saw."""

    PLACES = (
        "on_train_begin on_epoch_begin on_batch_begin on_after_gradient_update on_after_optimizer_step on_batch_end "
        "on_evaluation_begin on_evaluation_end on_epoch_end on_train_end on_restart"
    ).split()

    def __init__(self, folder: str, plan: list[Plan]) -> None:
        super().__init__("Strikes")
        self.folder, self.plan = folder, plan
        Path(folder, "pid-of-caller").write_text(str(os.getpid()))
        self.losses: list[tuple[int, float]] = []
        self.no_room = any(what == "no room for restarts" for *_, what in plan)
        self.lock: Any = None  # of this process

    def at(self, place: str) -> None:
        loop = self.train_loop_obj
        for number, (rank, planned, step, what) in enumerate(self.plan):
            done = Path(self.folder, f"done-{number}")
            if (loop.rank, place) == (rank, planned) and loop.global_step >= step and not done.exists():
                done.touch()
                caller = int(Path(self.folder, "pid-of-caller").read_text())
                if what == "SIGTERM to the caller":
                    os.kill(caller, signal.SIGTERM)
                else:
                    strike(what)

    def state_dict(self) -> dict[str, Any]:
        self.at("state_dict")
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])

    def on_multiprocess_start(self) -> None:
        self.lock = threading.Lock()
        Path(self.folder, f"pid-{self.train_loop_obj.rank}").write_text(str(os.getpid()))
        self.at("on_multiprocess_start")
        places = {place for _, place, _, _ in self.plan}
        if "at exit" in places:
            atexit.register(self.at, "at exit")
        if self.no_room or places & {"checkpoint is half written", "restart checkpoint is half written"}:
            write = file._write_with_checksums

            def half(target: Any, body: Any, info: Any) -> None:
                for_restarts = info.reason == "restart"
                if for_restarts and self.no_room:
                    raise OSError("no room by plan")
                target.write(b"half")
                target.flush()
                self.at("restart checkpoint is half written" if for_restarts else "checkpoint is half written")
                target.seek(0)
                write(target, body, info)

            file._write_with_checksums = half

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        assert self.lock is not None
        self.losses.append((loop.global_step, float(loop.last_loss)))
        self.at("on_batch_end")

    def on_exception(self, exception: BaseException) -> None:
        self.lock = None  # or it could not come back

    def on_train_end(self) -> None:
        self.lock = None
        self.at("on_train_end")


def _hook(name: str) -> Callable[..., None]:
    def run(self: Strikes, *args: Any) -> None:
        self.at(name)

    return run


for _name in Strikes.PLACES:
    if _name not in vars(Strikes):
        setattr(Strikes, _name, _hook(_name))


# -- what is trained ---------------------------------------------------------------------------------------------------


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


class Rows(Dataset[Any]):
    """Augmented from all three global generators."""

    def __init__(self) -> None:
        self.x, self.y = rows()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(np.random.rand()), self.y[i]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        inner = Rows()
        for i in range(ROWS):
            yield inner[i]


class PairedLengths(BatchSampler):
    """Batches of 4 or 8 rows, of neighbours, in an order that is drawn."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return 14

    def __iter__(self) -> Iterator[list[int]]:
        starts = [6 * i for i in range(14)]
        for i in torch.randperm(14).tolist():
            yield list(range(starts[i], starts[i] + (4 if i % 2 else 8)))[: ROWS - starts[i]]


LOADERS: dict[str, Callable[[int], Any]] = {
    "rows": lambda batch: DataLoader(Rows(), batch, shuffle=True),
    "workers": lambda batch: DataLoader(Rows(), batch, shuffle=True, num_workers=1, persistent_workers=True),
    "in memory": lambda batch: DataLoader(TensorDataset(*rows()), batch, shuffle=True),
    "batch sampler": lambda batch: DataLoader(Rows(), batch_sampler=PairedLengths()),
    "wrapped sampler": lambda batch: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), batch, False)
    ),
    "stream": lambda batch: DataLoader(Stream(), batch),
    "stream with a worker": lambda batch: DataLoader(Stream(), batch, num_workers=1),
}


class Net(TTBasicModel):
    """Draws in the loss, and counts in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        if self.training:
            self.calls += 1
            self.seen += len(x)
            x = x * (1 + 0.01 * random.random() + 0.001 * math.sin(int(self.calls)) + 1e-5 * self.seen)
        loss = criterion(self(x), y)
        if self.training:
            self.log("loss_twice", 2 * loss.detach(), on_step=True, on_epoch=True)
        return loss


def train(folder: Path, mode: str, ranks: int, kind: str, plan: list[Plan], seed: int | None = 3, **fit: Any) -> Any:
    """One training in ``folder``; its loop and callbacks, with the facts by name. ``ranks``: on this host."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = BATCH // (ranks * fit.get("num_nodes", 1)) if mode in ("ddp", "fsdp") else BATCH
    tl = TrainLoop(
        model,
        LOADERS[kind](batch),
        LOADERS[kind](batch) if kind == "workers" else DataLoader(TensorDataset(*rows()), batch),
        None,
        optimizer,
        nn.CrossEntropyLoss(),
        gpu_mode=mode,
        accelerator="cpu",
        devices=1 if mode == "single" else ranks,
        seed=seed,
        timeout=TIMEOUT_S if any(what.startswith("hangs") for *_, what in plan) else PATIENCE_S,
        progress_bar=False,
    )
    strikes = Strikes(str(folder), plan)
    stopping, average = EarlyStopping("val_loss", patience=100), ExponentialMovingAverage(apply_on_train_end=False)
    scheduler = LRScheduler(CosineAnnealingWarmRestarts, interval="step", T_0=50)
    board = TensorBoard(folder / "events", log_every_n_steps=1)
    keeper = ModelCheckpoint(folder / "checkpoints", every_n_steps=5, keep=2)
    length = {} if "num_iterations" in fit else {"num_epochs": EPOCHS}
    tl.fit(callbacks=[strikes, stopping, average, scheduler, board, keeper], **length, **fit)
    facts = {
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "history": tl.history.state_dict(),
        "what a callback saw": strikes.losses,
        "early stopping": stopping.state_dict(),
        "average": average.average,
        "schedule": scheduler.state_dict(),
        "counters": [tl.epoch, tl.global_step, tl.total_iteration_idx],
        "events": events(folder / "events"),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("*")),
        "drawn next": [torch.rand(3), random.random(), float(np.random.rand())],
    }
    return tl, facts


def events(folder: Path) -> list[tuple[str, int, float]]:
    """All scalars that TensorBoard shows."""
    if not folder.exists():  # of a host without rank 0
        return []
    return [(tag, step, value) for tag, shown in sorted(read(folder).items()) for step, value in shown]
