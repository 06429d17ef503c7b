"""Moved to :mod:`trainloop.train_loop.execution.restarts`; importable from here for one minor version."""

from __future__ import annotations

from trainloop._support.user_line import warn
from trainloop.train_loop.arguments.options import Restart as Restart
from trainloop.train_loop.execution.restarts import *  # noqa: F403

warn("trainloop.train_loop.restarts has moved to trainloop.train_loop.execution.restarts.", FutureWarning)
