"""Memory that several processes map: a file without a name, and arrays moved into it in place."""

from __future__ import annotations

import os
import tempfile

__all__ = ["anonymous_file", "anonymous_path"]


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file that has no name, so that nothing is left of it when its users end, however.

    In memory where the system can (``memfd_create``: not counted against ``/dev/shm``, which is 64 MiB in many
    containers), else an unlinked temporary file. Not inherited by programs that are started unless passed to them.

    Parameters
    ----------
    name : str
        What ``/proc/<pid>/maps`` shows.
    """
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(f"trainloop-{name}", os.MFD_CLOEXEC)
        except OSError:  # forbidden by a sandbox's filter
            pass
    fd, path = tempfile.mkstemp(prefix=f"trainloop-{name}-")
    os.unlink(path)
    return fd


def anonymous_path(fd: int) -> str:
    """A path under which this process can open the file of ``fd`` anew, with a position of its own."""
    return f"/proc/self/fd/{fd}"
