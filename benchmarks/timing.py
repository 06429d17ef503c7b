"""Interleaved rounds: contenders take turns, so that a machine that slows down slows them all."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection

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
    """Of the contender's process, all its threads: what it used itself, however busy the machine is."""
    steps: int = 1
    own_process: bool = True
    """Whether each contender has a process of its own. False for contenders that start processes themselves."""
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


Own = float | tuple[float, float] | None
"""The seconds that a contender took, or these and its CPU seconds; None if its caller is to measure them."""


def interleaved(contenders: Mapping[str, Callable[[], Own]], table: Table, size: Size, *, warm_up: int = 1) -> Table:
    """Time each contender once a round, in an order that turns by one each round.

    A contender does ``table.steps`` steps. What one leaves in its process, another must not pay for: once torch has
    compiled anything, for example, it patches all optimizers, and later steps take 3 to 5 % longer.
    """
    names = list(contenders)
    warm_up = 0 if size.tiny else warm_up
    with contextlib.ExitStack() as processes:
        timed: dict[str, Callable[[], tuple[float, float | None]]] = {
            name: processes.enter_context(_in_own_process(run)) if table.own_process else partial(_timed, run)
            for name, run in contenders.items()
        }
        for turn in range(size.rounds + warm_up):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds, cpu = timed[name]()
                if turn < warm_up:
                    continue
                table.seconds.setdefault(name, []).append(seconds)
                if cpu is not None:
                    table.cpu_seconds.setdefault(name, []).append(cpu)
    print(table.text(), flush=True)
    return table


def _timed(contender: Callable[[], Own]) -> tuple[float, float | None]:
    """Return the seconds that a contender takes, and its CPU seconds if they are known."""
    gc.collect()
    start, cpu_start = time.perf_counter(), time.process_time()
    own = contender()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    if isinstance(own, tuple):
        return own
    return (seconds, cpu) if own is None else (own, None)


@contextlib.contextmanager
def _in_own_process(contender: Callable[[], Own]) -> Iterator[Callable[[], tuple[float, float | None]]]:
    """Yield a function that times the contender, which stays in one child of this process."""
    context = multiprocessing.get_context("fork")  # with the contender's data, and without what another has left
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(contender, ours, theirs))
    child.start()
    theirs.close()

    def time_once() -> tuple[float, float | None]:
        ours.send(None)
        answer: tuple[float, float | None] = ours.recv()
        return answer

    try:
        yield time_once
    finally:
        ours.close()
        child.join()


def _serve(contender: Callable[[], Own], ours: Connection, theirs: Connection) -> None:
    """Time the contender each time that the parent asks, until it closes its end of the pipe."""
    ours.close()
    while True:
        try:
            theirs.recv()
        except EOFError:
            return
        theirs.send(_timed(contender))
