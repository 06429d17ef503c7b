"""Moved to :mod:`trainloop.train_loop.progress.timings`; importable from here for one minor version."""

from __future__ import annotations

from trainloop._support.user_line import warn
from trainloop.train_loop.progress.timings import *  # noqa: F403

warn("trainloop.train_loop.timings has moved to trainloop.train_loop.progress.timings.", FutureWarning)
