"""Interleaved rounds: contenders take turns, so that a machine that slows down slows them all."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from benchmarks.pages import Size

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
    floor: str | None = None
    """The contender that does the same work by public calls of torch and nothing else."""
    floor_aims: dict[str, float] = field(default_factory=dict)
    """What a contender's ratio to the floor is meant to stay under, of CPU time."""

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str | None = None) -> float:
        return self.median(name) / self.median(base or self.base)

    def cpu_ratio(self, name: str, base: str | None = None) -> float:
        return statistics.median(self.cpu_seconds[name]) / statistics.median(self.cpu_seconds[base or self.base])

    def text(self) -> str:
        """The table as reStructuredText, cheapest first."""
        scale = 1e6 / self.steps if self.unit.startswith("µs") else 1e3 if self.unit.startswith("ms") else 1.0
        to_floor = ("to the floor", "of CPU time") if self.floor else ()
        rows = [("loop", self.unit, "ratio", "its quartiles", "ratio of CPU time", *to_floor, "aim")]
        base = self.median(self.base)
        for name in sorted(self.seconds, key=self.median):
            values = sorted(s / base for s in self.seconds[name])
            low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
            aims = [f"{self.aims[name]:.2f}"] if name in self.aims else []
            if name in self.floor_aims:
                aims.append(f"{self.floor_aims[name]:.2f} of the floor")
            has_cpu = name in self.cpu_seconds
            floors: tuple[str, ...] = ()
            if self.floor:
                compared = name == self.floor or name in self.floor_aims
                floors = (
                    f"{self.ratio(name, self.floor):.2f}" if compared else "",
                    f"{self.cpu_ratio(name, self.floor):.2f}" if compared and has_cpu else "",
                )
            rows.append(
                (
                    name,
                    f"{self.median(name) * scale:.1f}",
                    f"{self.ratio(name):.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{self.cpu_ratio(name):.2f}" if has_cpu else "",
                    *floors,
                    ", ".join(aims),
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
    rule = rule_of(widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([title, "~" * len(title), "", note, "", rule, lines[0], rule, *lines[1:], rule, ""])


def rule_of(widths: Sequence[int]) -> str:
    """The line above and below a table's head."""
    return " ".join("=" * width for width in widths)


def interleaved(
    contenders: Mapping[str, Callable[[], float | tuple[float, float] | None]],
    table: Table,
    size: Size,
    *,
    warm_up: int = 1,
) -> Table:
    """Time each contender once a round, in an order that turns by one each round.

    A contender does ``table.steps`` steps. It may return the seconds that it took, or these and its CPU seconds, where
    it knows better than its caller (a rank in another process, say).
    """
    names = list(contenders)
    warm_up = 0 if size.tiny else warm_up
    for turn in range(size.rounds + warm_up):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            own = contenders[name]()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            if turn < warm_up:
                continue
            if isinstance(own, tuple):
                seconds, cpu = own
            elif own is not None:
                seconds = own
            table.seconds.setdefault(name, []).append(seconds)
            if isinstance(own, tuple) or (own is None and table.in_process):
                table.cpu_seconds.setdefault(name, []).append(cpu)
    print(table.text(), flush=True)
    return table
