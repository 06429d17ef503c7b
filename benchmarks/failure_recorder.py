"""The CPU time of a step with FailureRecorder, beside one without: python -m benchmarks.failure_recorder"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import work
from benchmarks.pages import Page, Size, parser, size_of
from benchmarks.step import loop_of
from benchmarks.timing import restructured
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


class Frozen(nn.Module):
    """A normalisation with fixed statistics, as in networks that are fine-tuned: four small buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("scale", "shift", "mean", "spread"):
            self.register_buffer(name, torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread * self.scale + self.shift


class Buffers(work.CNN):
    """A residual network of 40 blocks, which has 160 small buffers; none of them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), Frozen(16)) for _ in range(40)
        )
        self.first, self.last = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.1 * block(x).relu()
        return self.last(x.mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP": (work.MLP, 4000),
    "CNN": (work.CNN, 800),
    "Transformer": (work.Transformer, 400),
    "160 buffers": (Buffers, 300),
}


def table(size: Size) -> str:
    rows = [("loop", "CPU µs a step", "ratio", "its quartiles", "first to last without", "aim")]
    for name, (make, batches) in MODELS.items():
        batches = size.steps(batches)
        base, own, control = ratios(make(), batches, size.rounds)
        quartiles = f"{own[len(own) // 4]:.3f} to {own[3 * len(own) // 4]:.3f}"
        medians = f"{statistics.median(own):.3f}", quartiles, f"{statistics.median(control):.3f}"
        rows.append((name, f"{base:.0f}", *medians, "1.02" if name == "160 buffers" else "1.01"))
        print(rows[-1], flush=True)
    note = (
        "The ratio is that of an epoch with the callback to one without, which runs before and after it; the last\n"
        "column but one shows the error of the method. The epochs have "
        + ", ".join(f"{size.steps(batches):,}" for _, batches in MODELS.values())
        + " steps."
    )
    return restructured("A step with FailureRecorder", note, rows)


def main() -> None:
    arguments = parser(__doc__, rounds=11).parse_args()
    size = size_of(arguments)
    torch.set_num_threads(1)
    page = Page("RECORDER", "FailureRecorder: measured", "python -m benchmarks.failure_recorder")
    note = (
        "It measures the CPU time of one\nepoch in ``single``, including the start of ``fit``: medians of "
        f"{size.rounds} interleaved rounds, with one thread."
    )
    page.write(arguments.out, size, note, [table(size)])


if __name__ == "__main__":
    main()
