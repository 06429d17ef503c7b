"""Moved to :mod:`trainloop.tools.replay`; importable from here for one minor version."""

from __future__ import annotations

import warnings

from trainloop.tools.replay import *  # noqa: F403

warnings.warn("trainloop.train_loop.replay has moved to trainloop.tools.replay.", FutureWarning, stacklevel=2)
