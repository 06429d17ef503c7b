"""The CPU time of a step with FailureRecorder, beside one without: python -m benchmarks.failure_recorder"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import work
from benchmarks.step import loop_of
from benchmarks.timing import machine, restructured
from trainloop.callbacks import FailureRecorder


def cpu_seconds(model: Any, loader: DataLoader[Any], folder: str, recorders: int) -> float:
    """CPU seconds of this process for one epoch of a copy of the model."""
    model = copy.deepcopy(model)
    loop = loop_of(model, loader, progress_bar=False)
    begun = time.process_time()
    loop.fit(num_epochs=1, callbacks=[FailureRecorder(folder) for _ in range(recorders)])
    return time.process_time() - begun


def ratios(model: nn.Module, batches: int, rounds: int) -> tuple[float, list[float], list[float]]:
    """Microseconds of a step without the callback, ratios with it, and ratios of the same run without it."""
    loader = work.loader_of(work.data_for(model, batches))
    took, own, control = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            order = [0, 1, 2] if turn % 2 else [2, 1, 0]  # without, with, without again: whichever is first changes
            seconds = {kind: cpu_seconds(model, loader, folder, int(kind == 1)) for kind in order}
            if turn:
                base = (seconds[0] + seconds[2]) / 2
                took.append(base)
                own.append(seconds[1] / base)
                control.append(seconds[order[0]] / seconds[order[2]])
    return 1e6 * statistics.median(took) / batches, sorted(own), sorted(control)


def main(rounds: int = 11) -> None:
    torch.set_num_threads(1)
    print(time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()))
    print(machine(), flush=True)
    rows = [("model", "CPU µs a step", "ratio with it", "its quartiles", "first to last without", "aim")]
    models = {"MLP": (work.MLP, 4000), "CNN": (work.CNN, 800), "Transformer": (work.Transformer, 160)}
    for name, (make, batches) in models.items():
        base, own, control = ratios(make(), batches, rounds)
        quartiles = f"{own[len(own) // 4]:.3f} to {own[3 * len(own) // 4]:.3f}"
        medians = f"{statistics.median(own):.3f}", quartiles, f"{statistics.median(control):.3f}"
        rows.append((name, f"{base:.0f}", *medians, "1.01"))
    print(restructured("A step with FailureRecorder", f"Medians of {rounds} interleaved rounds.", rows))


if __name__ == "__main__":
    main()
