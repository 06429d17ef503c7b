"""Interleaved rounds: contenders take turns, so that a machine that slows down slows them all."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

BY_HAND = "PyTorch"


@dataclass
class Table:
    """Medians of one comparison; ratios are to ``PyTorch``, mostly."""

    title: str
    note: str
    unit: str = "µs a step"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of this process, all its threads: what the contender itself used, however busy the machine is."""
    steps: int = 1
    in_process: bool = True
    """Whether the work is done in this very process, so that its CPU time can be told."""
    aims: dict[str, float] = field(default_factory=dict)
    """What a contender's ratio is meant to stay under."""
    base: str = BY_HAND
    """Whom the ratios are to."""

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        return self.median(name) / self.median(self.base)

    def cpu_ratio(self, name: str) -> float:
        return statistics.median(self.cpu_seconds[name]) / statistics.median(self.cpu_seconds[self.base])

    def text(self) -> str:
        """The table as reStructuredText, cheapest first."""
        scale = 1e6 / self.steps if self.unit.startswith("µs") else 1e3 if self.unit.startswith("ms") else 1.0
        rows = [("loop", self.unit, "ratio", "its quartiles", "ratio of CPU time", "aim")]
        base = self.median(self.base)
        for name in sorted(self.seconds, key=self.median):
            values = sorted(s / base for s in self.seconds[name])
            low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
            aim = f"{self.aims[name]:.2f}" if name in self.aims else ""
            cpu = f"{self.cpu_ratio(name):.2f}" if name in self.cpu_seconds else ""
            rows.append(
                (
                    name,
                    f"{self.median(name) * scale:.1f}",
                    f"{self.ratio(name):.2f}",
                    f"{low:.2f} to {high:.2f}",
                    cpu,
                    aim,
                )
            )
        return restructured(self.title, self.note, rows)


@dataclass
class PairedTable:
    """Contenders that take turns of a block of steps each, within a second or two of one another.

    A ratio is the median over all turns of a block's time to that of the base's block of the same turn: what slows the
    machine for longer than a turn slows both. Its range is that of 90 % of resamples of whole starts, since what
    differs from one start to the next (where memory and threads came to lie) is in all blocks of a start.
    """

    title: str
    note: str
    steps: int
    """Of a block."""
    base: str
    aims: dict[str, float] = field(default_factory=dict)
    starts: list[dict[str, list[tuple[float, float]]]] = field(default_factory=list)
    """Of each start, of each contender, its blocks' seconds by the clock and of CPU time."""

    def ratio(self, name: str, clock: int) -> tuple[float, float, float]:
        """By the clock (0) or of CPU time (1): the median, and its range."""
        pairs = [
            [own[clock] / base[clock] for own, base in zip(start[name], start[self.base])] for start in self.starts
        ]
        draw = random.Random(0)
        drawn = sorted(statistics.median(chain(*draw.choices(pairs, k=len(pairs)))) for _ in range(1000))
        return statistics.median(chain(*pairs)), drawn[50], drawn[950]

    def text(self) -> str:
        """The table as reStructuredText."""
        rows = [("loop", "µs a step", "ratio", "its range", "ratio of CPU time", "its range", "aim")]
        for name in self.starts[0]:
            of_step = statistics.median(seconds for start in self.starts for seconds, _ in start[name]) / self.steps
            figures = []
            for clock in (0, 1):
                ratio, low, high = self.ratio(name, clock)
                figures += [f"{ratio:.3f}", "" if name == self.base else f"{low:.3f} to {high:.3f}"]
            rows.append((name, f"{1e6 * of_step:.1f}", *figures, f"{self.aims[name]:.2f}" if name in self.aims else ""))
        return restructured(self.title, self.note, rows)


def restructured(title: str, note: str, rows: Sequence[Sequence[str]]) -> str:
    """A title, a note, and a table whose first row is its head, as reStructuredText."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = " ".join("=" * width for width in widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([title, "~" * len(title), "", note, "", rule, lines[0], rule, *lines[1:], rule, ""])


def interleaved(
    contenders: Mapping[str, Callable[[], float | None]], table: Table, *, rounds: int = 9, warm_up: int = 1
) -> Table:
    """Time each contender once a round, in an order that turns by one each round.

    A contender does ``table.steps`` steps, and may return the seconds it took where it knows better than its caller
    (a rank in another process, say).
    """
    names = list(contenders)
    for turn in range(rounds + warm_up):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            own = contenders[name]()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            if turn >= warm_up:
                table.seconds.setdefault(name, []).append(seconds if own is None else own)
                if own is None and table.in_process:
                    table.cpu_seconds.setdefault(name, []).append(cpu)
    print(table.text(), flush=True)
    return table


def machine() -> str:
    """The machine of this run: processor, cores, memory, versions."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = {}
    for name in ("torch", "numpy", "lightning", "accelerate", "pytorch-ignite"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    packages["torch"] = torch.__version__
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"* {model}, {cores} cores; load at the start: {os.getloadavg()[0]:.1f}",
        f"* Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "* " + ", ".join(f"{name} {version}" for name, version in packages.items()),
        f"* GPUs: {', '.join(gpus) if gpus else 'none'}",
    ]
    return "\n".join(lines)
