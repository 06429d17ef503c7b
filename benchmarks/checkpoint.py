"""The cost of a checkpoint of a 200 MB model for the loop, written at once or in a thread: python -m
benchmarks.checkpoint

The interval between checkpoints is longer than the time to write one; an earlier one would wait for the one before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint

CHECKPOINTS = 4  # of a run


class Wide(TTModel):
    """50 million parameters, 200 MB, of which a step uses few: steps are short beside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(512, 512)
        self.rest = nn.ParameterList([nn.Parameter(torch.randn(1000, 1000), False) for _ in range(50)])

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        (x,) = batch_data
        for _ in range(20):
            x = self.used(x).tanh()
        return x.square().mean()

    def get_predictions(self, batch_data: Any, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
        raise NotImplementedError


class Clock(AbstractCallback):
    """Seconds between two steps, in which checkpoints are written: from the last hook of one to the next hook."""

    def __init__(self) -> None:
        super().__init__("clock", 1001)
        self.waits: list[float] = []
        self.begin = self.ended = 0.0

    def on_batch_begin(self) -> None:
        if self.ended:
            self.waits.append(time.perf_counter() - self.ended)
        else:
            self.begin = time.perf_counter()

    def on_batch_end(self) -> None:
        self.ended = time.perf_counter()

    def on_epoch_end(self) -> None:
        self.waits.append(time.perf_counter() - self.ended)


@dataclass
class Costs:
    """Seconds, of one run or of several."""

    first: list[float] = field(default_factory=list)
    """The loop stood still for a run's first checkpoint, for which memory has to be found."""
    later: list[float] = field(default_factory=list)
    """The same for its later ones."""
    total: list[float] = field(default_factory=list)
    """A run's steps, checkpoints and all."""
    cpu: list[float] = field(default_factory=list)
    """The processor's time for it, in all threads: what the machine's other work changes least."""

    def add(self, run: Costs) -> None:
        self.first += run.first
        self.later += run.later
        self.total += run.total
        self.cpu += run.cpu


def run(where: str | None, every: int, async_save: bool = False) -> Costs:
    """Train, with a checkpoint every few steps, or none where ``where`` is None."""
    steps = CHECKPOINTS * every
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(steps * 64, 512)), batch_size=64)
    clock = Clock()
    callbacks: list[AbstractCallback] = [clock]
    if where is not None:
        callbacks.append(
            ModelCheckpoint(where, every_n_epochs=None, every_n_steps=every, keep=1, async_save=async_save)
        )
    loop = TrainLoop(model, data, optimizer=optimizer, end_auto_eval=False, progress_bar=False)
    cpu = time.process_time()
    loop.fit(num_epochs=1, callbacks=callbacks)
    cpu = time.process_time() - cpu
    waits = clock.waits[every - 1 :: every]
    return Costs(waits[:1], waits[1:], [clock.ended - clock.begin], [cpu])


def measure(rounds: int, where: str, every: int) -> dict[str, Costs]:
    """Interleaved rounds, so that a machine that slows down slows all; one more before them to warm up."""
    costs = {"no checkpoints": Costs(), "synchronous": Costs(), "async_save": Costs()}
    for turn in range(rounds + 1):
        for name, total in costs.items():
            with tempfile.TemporaryDirectory(dir=where) as folder:
                once = run(None if name == "no checkpoints" else folder, every, name == "async_save")
            if turn:
                total.add(once)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".", help="where to write: the disk that is measured (.)")
    parser.add_argument("--every", type=int, default=24, help="steps from one checkpoint to the next (24)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = measure(args.rounds, args.dir, args.every)
    load, steps = os.getloadavg()[0], CHECKPOINTS * args.every
    print(f"load {load:.1f}; {args.rounds} runs of {steps} steps, a checkpoint every {args.every}; medians")
    for name, cost in costs.items():
        first, later = (1e3 * statistics.median(seconds) for seconds in (cost.first, cost.later))
        total, cpu = statistics.median(cost.total), statistics.median(cost.cpu)
        print(
            f"{name:14}  the loop waits {later:6.1f} ms (the first time {first:6.1f}); "
            f"in all {total:5.2f} s, {cpu:5.2f} s of CPU"
        )
    idle, synchronous = (statistics.median(costs[name].later) for name in ("no checkpoints", "synchronous"))
    if synchronous < 10 * idle:
        raise RuntimeError(f"200 MB took {synchronous:.5f} s, and nothing {idle:.5f} s: the wait was not measured")
    ratio = statistics.median(costs["async_save"].later) / synchronous
    print(f"async_save stalls the loop {ratio:.1%} of what a synchronous save does (aim: under 20 %)")


if __name__ == "__main__":
    main()
