"""The name of the running system, which processes of one host have in common."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["running_system"]


@functools.cache
def running_system() -> str:
    """Digits of the running system since its start, the same in all its containers; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""
