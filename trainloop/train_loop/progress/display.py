"""Print the output of a run: its first lines, a bar for each epoch, and a table with a row per epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainloop._support.output import bar_size, has_screen
from trainloop.train_loop.progress.timings import Timings

logger = logging.getLogger("trainloop")

REDRAW_S = 0.1
_KNOWN_LENGTH = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Display:
    """Show a run's progress. If disabled, as on all ranks but 0, every call returns at once.

    The bar goes to stderr, if stderr is a terminal or a notebook; the table goes to stdout.

    Parameters
    ----------
    enabled : bool
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.next_look = math.inf
        """Value of ``time.perf_counter()`` at which the loop next calls :meth:`look`."""
        self._bar: Any = None
        self.columns: list[str] = []
        """Columns of the table, as in the header that was printed last. A row may leave some of them empty."""
        self._epoch_began = 0.0

    def write(self, text: str) -> None:
        """Print lines without breaking the bar."""
        if self.enabled:
            if self._bar is not None:
                # Otherwise the line would be appended to the bar.
                self._bar.clear()
            print(text, flush=True)

    def event(self, text: str, level: int = logging.INFO) -> None:
        """Report an event: print it above the bar, or if the display is disabled, log it at ``level``.

        A printed event is logged, too, at the level INFO, for the handlers of log files.
        """
        self.write(text)
        logger.log(logging.INFO if self.enabled else level, text)

    def begin_epoch(self, epoch: int, num_epochs: int, num_batches: int | None, batches_done: int = 0) -> None:
        """Draw an empty bar.

        Parameters
        ----------
        epoch : int
            Number of the epoch, counted from 0.
        num_epochs, num_batches : int, optional
            Totals; 0 or ``None`` if unknown.
        batches_done : int
            Batches of this epoch that were done before the run was resumed.
        """
        if not self.enabled:
            return
        self._epoch_began = time.perf_counter()
        if not has_screen():
            return
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=num_batches,
            initial=batches_done,
            desc=f"epoch {epoch + 1}/{num_epochs}" if num_epochs else f"epoch {epoch + 1}",
            leave=False,
            # Leave out tqdm's batch rate, which would push samples per second off a narrow screen.
            bar_format=_KNOWN_LENGTH if num_batches else "{desc}: {n_fmt}batch [{elapsed}{postfix}]",
            mininterval=0,  # this class decides when to draw
            **bar_size(),
        )
        self.next_look = time.perf_counter() + REDRAW_S

    def look(self, batches: int, values: Callable[[], Mapping[str, float]], timings: Callable[[], Timings]) -> None:
        """Redraw the bar.

        Parameters
        ----------
        batches : int
            Batches done in this epoch.
        values : callable
            Returns the metrics to show. On a GPU, they are those of the look before, so that the host does not wait.
        timings : callable
            Returns the timings of the epoch's steps so far.
        """
        if self._bar is not None:
            shown = {name: f"{value:.4g}" for name, value in values().items()}
            self._bar.set_postfix({**shown, **_speed(timings())}, refresh=False)
            self._bar.update(batches - self._bar.n)
            self.next_look = time.perf_counter() + REDRAW_S

    def end_epoch(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self.next_look = math.inf

    def row(self, row: Mapping[str, float], timings: Timings) -> None:
        """Print an epoch's row, and the header of the table if the row has a column that the header lacks."""
        if not self.enabled:
            return
        cells = {name: str(value) if isinstance(value, int) else f"{value:.5g}" for name, value in row.items()}
        cells["seconds"] = f"{time.perf_counter() - self._epoch_began:.1f}"
        cells |= _speed(timings)
        # A metric may appear only in some epochs, for example if evaluation runs every n epochs.
        if not set(cells).issubset(self.columns):
            self.columns = _merged(self.columns, list(cells))
            print("  ".join(name.rjust(_width(name)) for name in self.columns), flush=True)
        print("  ".join(cells.get(name, "").rjust(_width(name)) for name in self.columns), flush=True)


def _merged(before: list[str], now: list[str]) -> list[str]:
    """Return the names of both lists: those of ``now`` in their order, the others after the name they followed."""
    merged = list(now)
    for i, name in enumerate(before):
        if name not in merged:
            merged.insert(merged.index(before[i - 1]) + 1 if i else 0, name)
    return merged


def _speed(timings: Timings) -> dict[str, str]:
    speed = timings.samples_per_s
    return {
        "samples/s": f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
        "data wait": f"{timings.share('data'):.0%}",
    }


def _width(name: str) -> int:
    return max(len(name), 5 if name in _NARROW else len("-1.2345e-05"))


_NARROW = ("epoch", "seconds", "samples/s", "data wait")
