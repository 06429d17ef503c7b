"""Which processes are on one running system: its name, and who can look into whom."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

__all__ = ["neighbourhood", "running_system"]


@functools.cache
def running_system() -> str:
    """Digits of the running system since its start, the same in all its containers; empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""


def neighbourhood() -> str:
    """A name that processes have in common which reach each other through ``/proc``: one system, one set of ids."""
    system = running_system()
    if system:
        with contextlib.suppress(OSError):
            return f"{system} {os.readlink('/proc/self/ns/pid')}"
    # Without /proc no other process can: a neighbourhood of its own.
    return f"process {os.getpid()}"
