"""Decide at which steps a checkpoint is due: every n steps, or some minutes after the last one."""

from __future__ import annotations

import time
from typing import Literal

from trainloop import distributed

__all__ = ["DueSteps"]

_ASKS_PER_INTERVAL = 20
_LONGEST_PAUSE_S = 86400.0  # an interval may be endless


class DueSteps:
    """The steps at which a checkpoint is due, the same on all ranks."""

    def __init__(self) -> None:
        self._saved_time = 0.0
        self._ask_step = 0  # the next step at which rank 0 reads its clock
        self._asked = (0.0, 0)  # the last reading, and its step

    def restart(self, step: int) -> None:
        """Count the minutes from now: a checkpoint of this step is being written, or training begins."""
        self._saved_time = time.monotonic()
        self._ask_step, self._asked = step + 1, (self._saved_time, step)

    def reason(self, step: int, every_n_steps: int | None, minutes: float | None) -> Literal["steps", "time"] | None:
        """Return why a checkpoint is due after a step; None if it is not. All ranks call it after each step."""
        if every_n_steps is not None and step % every_n_steps == 0:
            return "steps"
        return "time" if minutes is not None and self._time_is_up(step, 60 * minutes) else None

    def _time_is_up(self, step: int, interval_s: float) -> bool:
        """Return True if the interval has passed by rank 0's clock.

        Each reading of the clock needs an exchange between ranks, so the clock is read only about twenty times per
        interval, and at the interval's end. Rank 0 estimates the next step at which to read it from the duration of
        steps, and sends it to the other ranks.
        """
        if step < self._ask_step:
            return False
        now = time.monotonic()
        left_s = self._saved_time + interval_s - now
        step_s = max((now - self._asked[0]) / max(step - self._asked[1], 1), 1e-6)
        pause = max(1, int(min(left_s, interval_s / _ASKS_PER_INTERVAL, _LONGEST_PAUSE_S) / step_s))
        is_up, pause = distributed.exchange_ints([int(left_s <= 0), pause])[0]
        self._ask_step, self._asked = step + pause, (now, step)
        return bool(is_up)
