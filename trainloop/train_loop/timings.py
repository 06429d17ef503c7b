"""Moved to :mod:`trainloop.train_loop.progress.timings`; importable from here for one minor version."""

from __future__ import annotations

import warnings

from trainloop.train_loop.progress.timings import *  # noqa: F403

warnings.warn(
    "trainloop.train_loop.timings has moved to trainloop.train_loop.progress.timings.", FutureWarning, stacklevel=2
)
