"""Read an ID of the running system, which is the same for all processes of a host."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["running_system"]


@functools.cache
def running_system() -> str:
    """Return the ID of the system since it was booted, the same in all its containers; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""
