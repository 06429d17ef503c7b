"""Moved to :mod:`trainloop.tools.preflight`; importable from here for one minor version."""

from __future__ import annotations

import warnings

from trainloop.tools.preflight import *  # noqa: F403

warnings.warn("trainloop.train_loop.preflight has moved to trainloop.tools.preflight.", FutureWarning, stacklevel=2)
