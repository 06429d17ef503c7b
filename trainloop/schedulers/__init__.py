"""Learning rate schedules as callbacks: thin wrappers of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

from trainloop.schedulers import basic, warmup
from trainloop.schedulers.basic import *  # noqa: F403
from trainloop.schedulers.warmup import *  # noqa: F403

__all__ = [*basic.__all__, *warmup.__all__]
