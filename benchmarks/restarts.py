"""The cost of max_restarts without a failure, and the time of a restart.

python -m benchmarks.restarts [--rounds 5] [--only mlp]
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import work
from benchmarks.ddp import make_loop
from benchmarks.timing import Table
from trainloop import AbstractCallback, TrainLoop

PLAIN, SURVIVES = "max_restarts=0", "max_restarts=3"


class Clock(AbstractCallback):
    """Seconds, and CPU seconds, of rank 0's second epoch; when the first step was done."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.seconds = self.cpu_seconds = 0.0
        self.first_step = 0.0

    def on_after_optimizer_step(self) -> None:
        self.first_step = self.first_step or time.monotonic()

    def on_epoch_begin(self) -> None:
        self.begin, self.cpu_begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self.begin, time.process_time() - self.cpu_begin


class Kill(AbstractCallback):
    """Kills rank 1 once, after its 20th step."""

    def __init__(self, folder: str) -> None:
        super().__init__("kill")
        self.done = Path(folder, "done")

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.rank == 1 and loop.global_step == 20 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fit(model: Any, batches: int, callbacks: list[Any], epochs: int, **arguments: Any) -> TrainLoop[Any]:
    loop = make_loop(model, batches)
    loop.fit(num_epochs=epochs, callbacks=callbacks, **arguments)
    return loop


def cost(kind: Any, batches: int, rounds: int) -> list[Table]:
    """Two tables of the same runs: by the clock, and by CPU time, which says more on a machine that others use."""
    title, note = (
        f"{kind.__name__}, two ranks",
        f"{batches} steps of the second epoch on rank 0, restart_every_steps=None",
    )
    wall = Table(title, f"By the clock: {note}.", steps=batches, base=PLAIN, aims={SURVIVES: 1.02})
    cpu = Table(f"{title}, CPU time", f"CPU time: {note}.", steps=batches, base=PLAIN, aims={SURVIVES: 1.02})
    for turn in range(rounds + 1):
        for name in (PLAIN, SURVIVES)[:: 1 if turn % 2 else -1]:
            clock = Clock()
            fit(kind(), batches, [clock], 2, max_restarts=3 if name == SURVIVES else 0)
            if turn:
                wall.seconds.setdefault(name, []).append(clock.seconds)
                cpu.seconds.setdefault(name, []).append(clock.cpu_seconds)
    return [wall, cpu]


def recovery(rounds: int) -> Table:
    """From the call to the first step, and from a kill to the first step after it."""
    table = Table(
        "From a failure to the next step, two ranks",
        "``start-up`` is from the call of fit to its first step, its ranks from a warm fork server.",
        unit="ms",
        base="start-up",
        aims={"restart": 1.3},
    )
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            clock, begin = Clock(), time.monotonic()
            fit(work.MLP(), 50, [clock], 1)
            loop = fit(work.MLP(), 50, [Kill(folder)], 1, max_restarts=1)
        if turn:
            table.seconds.setdefault("start-up", []).append(clock.first_step - begin)
            table.seconds.setdefault("restart", []).append(loop.restarts[0].seconds)
    return table


PARTS: dict[str, Callable[[int], list[Table]]] = {
    "recovery": lambda rounds: [recovery(rounds)],
    "mlp": lambda rounds: cost(work.MLP, 2000, rounds),
    "cnn": lambda rounds: cost(work.CNN, 200, rounds),
}


def tables(rounds: int = 5, parts: Iterable[str] = PARTS) -> list[Table]:
    torch.set_num_threads(1)
    found = []
    for part in parts:
        for table in PARTS[part](rounds):
            print(table.text(), flush=True)
            found.append(table)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS, help="one part")
    arguments = parser.parse_args()
    tables(arguments.rounds, [arguments.only] if arguments.only else PARTS)
