"""One rank of a ``fit`` goes wrong at a random step: what the caller is told, how soon, and what is left."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

import conftest
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.errors import WorkerFailedError

ENDS_WITHIN_S = 10.0
TIMEOUT_S = 5.0
STEPS = 20


class Rows(Dataset[Any]):
    """Rows, one of which can't be read."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return STEPS * 4 * 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.bad:
            raise KeyError(f"row {index} is missing")
        return torch.ones(8), index % 3


def raises() -> None:
    raise ValueError("bad batch")


def exits() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exceeds_its_memory() -> None:
    limit = psutil.Process().memory_info().vms + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(1 << 30, dtype=torch.uint8).fill_(1)


def calls_a_collective_alone() -> None:
    dist.barrier()


def does_nothing() -> None:
    pass


class Faulty(TTBasicModel):
    def __init__(self, fault: Callable[[], None], on_rank: int, folder: Path) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.fault, self.on_rank, self.folder = fault, on_rank, folder
        self.at, self.steps = random.randrange(STEPS), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if dist.get_rank() == self.on_rank and self.steps == self.at:
            (self.folder / "time").write_text(str(time.time()))
            self.fault()
        self.steps += 1
        return super().get_loss(batch_data, criterion, device)


class Connection:
    def __init__(self) -> None:
        if dist.get_rank() == 1:
            raise ConnectionError("no such server")


class Connects(AbstractCallback):
    """Makes an object in each rank, which fails on one."""

    def __init__(self) -> None:
        super().__init__("connects")

    def on_multiprocess_start(self) -> None:
        self.connection = Connection()


class Finally(AbstractCallback):
    """Notes that this rank's exception hook ran: it comes while the stack is unwound."""

    def __init__(self, folder: Path) -> None:
        super().__init__("finally")
        self.folder = folder

    def on_exception(self, exception: BaseException) -> None:
        (self.folder / f"unwound {dist.get_rank()}").touch()


class Case(NamedTuple):
    fault: Callable[[], None]
    on_rank: int
    exitcode: int | None
    says: str
    traceback: str = ""
    callbacks: tuple[type[AbstractCallback], ...] = ()
    bad_row: bool = False
    workers: int = 0


CASES = {
    "exception in get_loss": Case(raises, 1, 1, "rank 1 of 2 raised ValueError: bad batch", "in get_loss"),
    "exception in what a hook makes": Case(
        does_nothing, 1, 1, "rank 1 of 2 raised ConnectionError: no such server", "in __init__", callbacks=(Connects,)
    ),
    "exception in a worker": Case(does_nothing, 1, 1, "rank 1 of 2 raised KeyError", "row", bad_row=True, workers=1),
    "os._exit": Case(exits, 1, 3, "rank 1 of 2 ended without an error, with exit code 3"),
    "SIGKILL of rank 0": Case(is_killed, 0, -9, "rank 0 of 2 was killed by signal SIGKILL"),
    "SIGKILL of rank 1": Case(is_killed, 1, -9, "rank 1 of 2 was killed by signal SIGKILL"),
    "SIGKILL of a rank with a worker": Case(is_killed, 1, -9, "rank 1 of 2 was killed by signal SIGKILL", workers=1),
    "memory limit": Case(exceeds_its_memory, 1, 1, "Hint: memory ran out", "fill_"),
    "a collective of one rank": Case(calls_a_collective_alone, 1, None, "", ""),
}


def run(case: Case, folder: Path) -> tuple[WorkerFailedError, float]:
    """The error, and how many seconds after the fault it came."""
    model = Faulty(case.fault, case.on_rank, folder)
    # Strided: the odd rows are rank 1's.
    bad_row = 2 * 4 * random.randrange(STEPS) + 1 if case.bad_row else -1
    loader = DataLoader(Rows(bad_row), batch_size=4, num_workers=case.workers)
    loop = TrainLoop(
        model,
        loader,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        accelerator="cpu",
        devices=2,
        # Else no time-out may help: a rank that waits for a dead one has to notice that it is dead.
        timeout=TIMEOUT_S if case.fault is calls_a_collective_alone else 600.0,
        progress_bar=False,
    )
    begin = time.time()
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[*(callback() for callback in case.callbacks), Finally(folder)])
    noted = folder / "time"
    return caught.value, time.time() - (float(noted.read_text()) if noted.exists() else begin)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, times",
    [
        ("exception in what a hook makes", 1),
        ("SIGKILL of a rank with a worker", 1),
        *(pytest.param(name, 20, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_one_rank_goes_wrong(name: str, times: int, tmp_path: Path) -> None:
    case = CASES[name]
    for i in range(times):
        folder = tmp_path / str(i)
        folder.mkdir()
        before = conftest._state()
        error, seconds = run(case, folder)
        if case.fault is calls_a_collective_alone:
            assert seconds < TIMEOUT_S + ENDS_WITHIN_S
            assert "Python stack of rank 0:" in str(error), error
            assert "Python stack of rank 1:" in str(error), error
            assert "in calls_a_collective_alone" in str(error), error
        else:
            # Where nobody noted the time of the fault, the start of two ranks and a worker is in it.
            assert seconds < ENDS_WITHIN_S * (2 if case.bad_row or case.callbacks else 1)
            assert (error.rank, error.exitcode) == (case.on_rank, case.exitcode), error
            assert case.says in str(error), error
            assert case.traceback in error.traceback
            if not case.callbacks:  # else the fault comes before the other rank has begun to train
                assert (folder / f"unwound {1 - case.on_rank}").exists()
        # At once: what ends by itself later was left behind.
        left = conftest.left_behind(before, conftest._state())
        assert not [line for line in left if line.startswith(("children", "shared memory"))]
