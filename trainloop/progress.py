"""What a run shows: its first lines, a bar for each epoch, a table that grows by a row an epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Progress"]

REDRAW_S = 0.1
MOST_STEPS_BETWEEN_LOOKS = 256


class Progress:
    """Shows a run on rank 0's terminal; disabled, every call returns at once.

    The bar goes to stderr and only where that is a terminal or a notebook; the table goes to stdout.

    Parameters
    ----------
    enabled : bool
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.next_look: float = float("inf")
        """Step of the epoch at which the loop should call :meth:`look` next."""
        self._bar: Any = None
        self._columns: list[str] = []
        self._epoch_began = 0.0
        self._looked = (0, 0.0)  # step and time of the last look

    def say(self, text: str) -> None:
        """Print lines without tearing the bar."""
        if self.enabled:
            if self._bar is not None:
                self._bar.clear()
            print(text, flush=True)

    def begin_epoch(self, epoch: int, num_epochs: int, num_batches: int | None) -> None:
        """Draw an empty bar."""
        if not self.enabled:
            return
        self._epoch_began = time.perf_counter()
        if not _has_screen():
            return
        from tqdm.auto import tqdm

        title = f"epoch {epoch + 1}/{num_epochs}" if num_epochs else f"epoch {epoch + 1}"
        self._bar = tqdm(total=num_batches, desc=title, leave=False, dynamic_ncols=True, mininterval=0, unit="batch")
        self._looked = (0, time.perf_counter())
        self.next_look = 1

    def look(self, step: int, batches: int, values: Callable[[], Mapping[str, str]]) -> None:
        """Redraw if it is time; decide when to be asked again, so that most steps don't even read the clock.

        Parameters
        ----------
        step : int
            Optimizer steps done in this epoch.
        batches : int
            Batches done in this epoch.
        values : callable
            Gives the metrics to show. Called only when the bar is redrawn: it waits for the device.
        """
        if self._bar is None:
            return
        now = time.perf_counter()
        elapsed = now - self._looked[1]
        steps = step - self._looked[0]
        if elapsed < REDRAW_S:
            # As many steps as the rest of the interval will take at this speed.
            wait = int(steps * (REDRAW_S - elapsed) / max(elapsed, 1e-9)) if steps else 1
            self.next_look = step + min(max(wait, 1), MOST_STEPS_BETWEEN_LOOKS)
            return
        self._bar.set_postfix(values(), refresh=False)
        self._bar.update(batches - self._bar.n)
        self._looked = (step, now)
        self.next_look = step + min(max(steps, 1), MOST_STEPS_BETWEEN_LOOKS)

    def end_epoch(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None
        self.next_look = float("inf")

    def row(self, row: Mapping[str, float]) -> None:
        """Print an epoch's row, and the head of the table where its columns are new."""
        if not self.enabled:
            return
        cells = {"epoch": str(row["epoch"])}
        cells.update((name, f"{value:.5g}") for name, value in row.items() if name != "epoch")
        cells["seconds"] = f"{time.perf_counter() - self._epoch_began:.1f}"
        if list(cells) != self._columns:
            self._columns = list(cells)
            print("  ".join(name.rjust(_width(name)) for name in cells), flush=True)
        print("  ".join(cell.rjust(_width(name)) for name, cell in cells.items()), flush=True)


def _width(name: str) -> int:
    return max(len(name), 10 if name not in ("epoch", "seconds") else 5)


def _has_screen() -> bool:
    if sys.stderr is None:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules
