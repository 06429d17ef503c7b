"""Growth over time and size: imports, a long epoch's cost and memory: python -m benchmarks.growth"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import psutil
import torch

from benchmarks import others, step, work
from benchmarks.pages import Size
from benchmarks.timing import BY_HAND, Table, interleaved
from trainloop import AbstractCallback, TrainLoop

IMPORTS = "import time; b = time.perf_counter(); {}; print(time.perf_counter() - b)"


def seconds_of_import(statement: str) -> float:
    command = [sys.executable, "-c", IMPORTS.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class Meter(AbstractCallback):
    """Seconds and resident memory at each tenth of the training."""

    def __init__(self, every: int) -> None:
        super().__init__("meter")
        self.every = every
        self.readings: list[tuple[float, int]] = []

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step % self.every == 0:
            self.readings.append((time.perf_counter(), psutil.Process().memory_info().rss))


def long_epoch(size: Size) -> str:
    """Cost and memory of each tenth of an epoch of many steps, with ten metrics logged at each."""
    steps = max(10, size.steps(20_000))
    torch.set_num_threads(1)
    model = work.Logging()
    meter = Meter(steps // 10)
    loop = TrainLoop(
        model,
        work.loader_of(work.data_for(model, steps)),
        optimizer=others.sgd(model),
        criterion=others.CRITERION,
        accelerator="cpu",
        progress_bar=False,
    )
    loop.fit(num_epochs=1, callbacks=[meter])
    title = f"An epoch of {steps:,} steps"
    lines = [title, "~" * len(title), "", "Ten metrics are logged at each step, without a progress bar.", ""]
    rule = "=========== ========== =============="
    lines += [rule, "steps       µs a step  resident, MiB", rule]
    for i, ((before, _), (now, rss)) in enumerate(zip(meter.readings, meter.readings[1:]), start=2):
        lines.append(f"{i * meter.every:<11,} {(now - before) / meter.every * 1e6:<10.1f} {rss / 2**20:.0f}")
    text = "\n".join([*lines, rule, ""])
    print(text, flush=True)
    return text


def growth_with_metrics(size: Size) -> Table:
    """A step's cost by the number of metrics that are logged in it."""
    torch.set_num_threads(1)
    runs = {}
    for number in (0, 1, 10, 50):
        model = work.Logging()
        model.number = number
        loader = work.loader_of(work.data_for(model, size.steps(1000)))
        runs[f"{number or 'no'} metric{'' if number < 2 else 's'}"] = partial(step.with_trainloop, model, loader, 1)
    note = (
        "Metrics that are logged at each step, without callbacks. Ratios are relative to the same loop without\n"
        "metrics, which logs only the loss."
    )
    return interleaved(runs, Table("Metrics", note, steps=size.steps(1000), base="no metric"), size)


def tables(size: Size) -> list[Table]:
    torch.set_num_threads(1)
    imports = interleaved(
        {
            BY_HAND: partial(seconds_of_import, "import torch"),
            "import trainloop": partial(seconds_of_import, "import trainloop; trainloop.TrainLoop"),
        },
        Table(
            "Import",
            "The time of an import in a fresh interpreter. ``PyTorch`` is ``import torch``. The aim is at most 120 ms\n"
            "more than that.",
            unit="ms",
            own_process=False,
        ),
        size,
    )
    return [imports, growth_with_metrics(size)]


if __name__ == "__main__":
    tables(Size(9))
    long_epoch(Size(1))
