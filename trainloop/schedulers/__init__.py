"""Learning rate schedules as callbacks: warm-ups. ``callbacks.LRScheduler`` takes any torch scheduler."""

from __future__ import annotations

from trainloop.schedulers import warmup
from trainloop.schedulers.warmup import *  # noqa: F403

__all__ = warmup.__all__
