"""The private folder of a run that restarts after failures, and what it tells the ranks that start again."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np

from trainloop.train_loop.arguments.options import Restart


class RestartOrder(NamedTuple):
    """Information for ranks that start after a failure."""

    restart: Restart
    failed_ns: int
    """Time of the failure (monotonic clock)."""
    limit: str
    """Text with the number of the restart and the limit."""
    checkpoint: str
    """Path of the checkpoint to resume from; empty to begin like the first start."""


class RestartFolder:
    """The private folder of a run that restarts: its checkpoints, the progress of its ranks, and the latest order.

    Parameters
    ----------
    path : str
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.checkpoints = os.path.join(path, "checkpoints")
        """The folder of the checkpoints."""
        self._progress, self._order = os.path.join(path, "progress"), os.path.join(path, "order")

    def begin(self, ranks: int, step: int, order: RestartOrder | None) -> None:
        """Record, before ranks start, that all ranks are at this step and do not train yet."""
        np.array([(0, 0), *[(step, 0)] * ranks], np.int64).tofile(self._progress)
        if order is not None:
            with open(self._order, "w") as file:
                json.dump(order, file)

    def order(self) -> RestartOrder | None:
        """Return the latest order; ``None`` for the first start."""
        try:
            with open(self._order) as file:
                restart, *others = json.load(file)
        except FileNotFoundError:
            return None
        return RestartOrder(Restart(*restart), *others)

    def progress(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return an array in memory shared by all processes of the run.

        Row 0: the time (monotonic clock) at which the first step after a restart was done, or 0. Row ``1 + r``: the
        number of steps that local rank ``r`` has done, and 1 once this rank trains.
        """
        return np.memmap(self._progress, np.int64, "r+").reshape(-1, 2)


def restart_line(restart: Restart, limit: str) -> str:
    """Return the line to print about a restart."""
    steps = f"{restart.steps_repeated} step{'' if restart.steps_repeated == 1 else 's'}"
    return (
        f"trainloop: rank {restart.rank} {restart.cause}; training was resumed from step {restart.step} ({steps} "
        f"repeated), {restart.seconds:.1f} s after the failure. {limit}"
    )
