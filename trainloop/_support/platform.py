"""Functions of the operating system; the only module that imports POSIX modules.

A module that the system lacks is ``None`` here. Docstrings say what each function does on other systems.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    fcntl = grp = pwd = resource = None
else:
    import fcntl
    import grp
    import pwd
    import resource

__all__ = [
    "absolute_path",
    "affinity",
    "blocked_signals",
    "fcntl",
    "grp",
    "loopback_interface",
    "process_config",
    "process_exists",
    "pwd",
    "read_into",
    "resource",
    "set_affinity",
    "set_blocked_signals",
    "signals_blocked",
    "unblock_signals",
    "usable_cpus",
    "user_id",
    "user_name",
    "write_at",
    "running_system",
]


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path with ``~`` expanded that stays valid if the current folder changes; a URL is returned unchanged."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


# -- processes and users -----------------------------------------------------------------------------------------------


def process_config() -> dict[str, Any]:
    """Return multiprocessing's settings for this process, to read or change; its child processes inherit them.

    ``tempdir`` is the folder of sockets and temporary files, ``semprefix`` the beginning of semaphores' names.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config


def process_exists(pid: int) -> bool:
    """Return True if a process has this ID."""
    import psutil

    return bool(psutil.pid_exists(pid))


def user_id() -> int | None:
    """Return this process's effective user ID; ``None`` on Windows."""
    if sys.platform == "win32":
        return None
    return os.geteuid()


def user_name(uid: int) -> str | None:
    """Return the name of a user; ``None`` if the system has no name for the ID."""
    if pwd is not None:
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
    return None


# -- CPUs --------------------------------------------------------------------------------------------------------------


def affinity(thread: int = 0) -> list[int]:
    """Return the CPUs that a thread may use, in order; empty if the system does not report them (macOS, Windows)."""
    return sorted(os.sched_getaffinity(thread)) if hasattr(os, "sched_getaffinity") else []


def usable_cpus() -> list[int]:
    """Return the CPUs that this process may use; all CPUs if the system does not report them."""
    return affinity() or list(range(os.cpu_count() or 1))


def set_affinity(cpus: Iterable[int], thread: int = 0) -> None:
    """Set the CPUs that a thread may use; does nothing on macOS and Windows."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, cpus)


# -- signals -----------------------------------------------------------------------------------------------------------


def blocked_signals() -> list[int]:
    """Return the signals that this thread blocks; empty on Windows."""
    return sorted(map(int, _changed_mask("SIG_BLOCK", [])))


def set_blocked_signals(numbers: Iterable[int]) -> None:
    """Set the signals that this thread blocks; does nothing on Windows."""
    _changed_mask("SIG_SETMASK", numbers)


def unblock_signals(numbers: Iterable[int]) -> None:
    """Unblock signals for this thread; does nothing on Windows."""
    _changed_mask("SIG_UNBLOCK", numbers)


@contextlib.contextmanager
def signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in the context, and in processes started there; does nothing on Windows."""
    before = _changed_mask("SIG_BLOCK", numbers)
    try:
        yield
    finally:
        _changed_mask("SIG_SETMASK", before)


def _changed_mask(how: str, numbers: Iterable[int]) -> set[int]:
    """Change the signals that this thread blocks, and return those that it blocked before; empty on Windows."""
    if sys.platform == "win32":
        return set()
    return signal.pthread_sigmask(getattr(signal, how), numbers)


# -- files and the network ---------------------------------------------------------------------------------------------


_AT_ONCE = 1 << 30  # maximum bytes per call; macOS and Windows refuse 2**31


def write_at(fd: int, data: memoryview, place: int) -> int:
    """Write bytes at an offset of a file; return the number of bytes written.

    On Windows, this moves the descriptor's position.
    """
    if sys.platform == "win32":
        os.lseek(fd, place, os.SEEK_SET)
        return os.write(fd, data[:_AT_ONCE])
    return os.pwrite(fd, data[:_AT_ONCE], place)


def read_into(fd: int, view: memoryview, place: int) -> int:
    """Read bytes at an offset of a file; return the number of bytes read.

    On Windows, this moves the descriptor's position.
    """
    if sys.platform == "win32":
        os.lseek(fd, place, os.SEEK_SET)
        data = os.read(fd, min(view.nbytes, _AT_ONCE))
        view[: len(data)] = data
        return len(data)
    return os.preadv(fd, [view[:_AT_ONCE]], place)


def loopback_interface() -> str | None:
    """Return the name of the loopback network interface; ``None`` if the system gives it no name."""
    if sys.platform == "linux":
        return "lo"
    if sys.platform == "win32":
        return None
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


@functools.cache
def running_system() -> str:
    """Return the system's boot ID, which is the same in all its containers; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return ""
