"""Moved to :mod:`trainloop.tools.preflight`; importable from here for one minor version."""

from __future__ import annotations

from trainloop._support.user_line import warn
from trainloop.tools.preflight import *  # noqa: F403

warn("trainloop.train_loop.preflight has moved to trainloop.tools.preflight.", FutureWarning)
