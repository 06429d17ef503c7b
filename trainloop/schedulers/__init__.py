"""Learning rate schedules with a warm-up, as callbacks. ``callbacks.LRScheduler`` accepts any torch scheduler."""

from __future__ import annotations

from trainloop.schedulers import warmup
from trainloop.schedulers.warmup import *  # noqa: F403

__all__ = warmup.__all__
