"""Moved to :mod:`trainloop.tools.replay`; importable from here for one minor version."""

from __future__ import annotations

from trainloop._support.user_line import warn
from trainloop.tools.replay import *  # noqa: F403

warn("trainloop.train_loop.replay has moved to trainloop.tools.replay.", FutureWarning)
