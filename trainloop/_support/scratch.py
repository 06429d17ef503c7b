"""Temporary folders that are removed even if all processes that use them were killed.

A :func:`scratch_folder` is for sockets and files that multiprocessing creates for ranks and their loader workers.
By default, Python creates a folder, ``pymp-*``, for each process, and a killed process can't remove its folder. So a
launch creates one folder for all of its processes, and removes it when they have ended. The folder is locked while any
of these processes is alive. If all were killed, including the launching process, the next launch finds the folder
unlocked. The name of a file in it has the launch's token, and so have the names of the launch's semaphores. Only
unlocked folders of this user, and semaphores of their launches, are removed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from trainloop._support.platform import fcntl, process_config, user_id

PREFIX = "trainloop-mp-"
_TEMPORARY = "trainloop-tmp-"
_TOKEN = "launch-"
SHARED_MEMORY = "/dev/shm"
"""Folder in memory, in which Linux also keeps semaphores."""
_SEMAPHORES = "mp-"
_LONGEST_SOCKET = 103  # bytes of a socket's path on macOS; on Linux, 107
_SOCKET = f"/{PREFIX}12345678/pymp-12345678/listener-12345678"  # loader workers send tensors through such a socket
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


class Scratch(NamedTuple):
    """A folder, and the lock on it, which every process of the launch inherits."""

    path: str
    lock_fd: int
    """Descriptor of the lock; -1 on Windows, which can't lock folders: there, folders of killed processes remain."""


@contextlib.contextmanager
def scratch_folder(token: str) -> Iterator[Scratch]:
    """Create a launch's folder, and remove it at the end; first remove folders of launches without a living process.

    Parameters
    ----------
    token : str
        Token of the launch. Semaphores that :func:`name_semaphores` has named after this token are removed, too.
    """
    remove_dead()
    scratch = _new_folder(parent=_parent_of_sockets())
    try:
        with open(os.path.join(scratch.path, _TOKEN + token), "x"):
            pass
        yield scratch
    finally:
        remove(scratch, own=True)


def _parent_of_sockets() -> str:
    """Return the temporary folder, or ``/tmp`` if the path of a socket in it would be too long."""
    parent = tempfile.gettempdir()
    too_long = len(os.fsencode(parent) + _SOCKET.encode()) > _LONGEST_SOCKET
    return "/tmp" if too_long and os.access("/tmp", os.W_OK) else parent


def temporary_folder(prefix: str = _TEMPORARY, *, memory_bytes: int = 0) -> Scratch:
    """Create a folder; if this process and its forks end without calling :func:`remove`, a later call removes it.

    Only this user can read it. With ``memory_bytes``, it is in shared memory if half of the shared memory remains free.
    """
    remove_dead()
    return _new_folder(prefix, SHARED_MEMORY if memory_bytes > 0 and _has_room(memory_bytes) else None)


def _has_room(nbytes: int) -> bool:
    """Return True if half of the shared memory remains for others, such as loader workers."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return False
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.free - nbytes >= usage.total / 2


def _new_folder(prefix: str = PREFIX, parent: str | None = None) -> Scratch:
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        if sys.platform == "win32":
            return Scratch(path, -1)
        try:
            lock_fd = _lock_folder(path)
        except OSError:  # no locks on this file system: later launches never remove the folder
            lock_fd = _opened(path)
        if lock_fd is not None:
            return Scratch(path, lock_fd)
        # Before the folder was locked, another launch considered it abandoned and removed it.


def remove(scratch: Scratch, *, own: bool = False) -> None:
    """Remove a folder; ``own`` is True for that of a launch of this process."""
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch.path):
            if name.startswith(_TOKEN):
                _remove_semaphores(name.removeprefix(_TOKEN), tracked=own)
    shutil.rmtree(scratch.path, ignore_errors=True)
    if scratch.lock_fd >= 0:
        os.close(scratch.lock_fd)


def name_semaphores(token: str) -> None:
    """Put the launch's token into the names of the semaphores of this process and its workers.

    A rank calls this, because it may be killed: then only the names of its semaphores show which launch created them.
    Other libraries choose other names: joblib's loky does so for the whole process when it is imported.
    """
    from multiprocessing import synchronize  # keeps `import trainloop` fast

    prefix = f"/{_SEMAPHORES}{token}"
    process_config()["semprefix"] = prefix
    make = synchronize.SemLock.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Set on the instance, where it overrides a function that a library has set, or will set, on the class.
        self._make_name = lambda: f"{prefix}-{next(synchronize.SemLock._rand)}"  # type: ignore[attr-defined]
        try:
            make(self, *args, **kwargs)
        finally:
            del self._make_name

    synchronize.SemLock.__init__ = __init__  # type: ignore[method-assign]


def _remove_semaphores(token: str, *, tracked: bool) -> None:
    """Remove semaphores of killed ranks and workers; multiprocessing's tracker would do this only at process end."""
    for path in Path(SHARED_MEMORY).glob(f"sem.{glob.escape(_SEMAPHORES + token)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            if tracked:  # registered by this process's tracker, which warns about unknown names
                resource_tracker.unregister(f"/{path.name[len('sem.') :]}", "semaphore")


def _opened(path: str) -> int:
    """Return a descriptor of a new folder; remove the folder on error."""
    try:
        return os.open(path, _FOLDER_FLAGS)
    except OSError:
        os.rmdir(path)
        raise


def _lock_folder(path: str) -> int | None:
    """Return a descriptor that keeps the folder locked.

    ``None`` if another process has locked or removed the folder. Other errors are raised: on file systems without locks
    (``EOPNOTSUPP``; NFS has none for folders, ``EBADF``), or if this process has too many open files.
    """
    assert fcntl is not None
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, _FOLDER_FLAGS)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return None
        if is_same:
            undo.pop_all()
            return fd
    return None


def remove_dead() -> None:
    """Remove folders and semaphores of this user's launches that have no living process."""
    if sys.platform == "win32":
        return
    for parent in {tempfile.gettempdir(), _parent_of_sockets(), SHARED_MEMORY}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if entry.name.startswith((PREFIX, _TEMPORARY)) and _is_own_folder(entry):
                    with contextlib.suppress(OSError):
                        lock_fd = _lock_folder(entry.path)
                        if lock_fd is not None:
                            remove(Scratch(entry.path, lock_fd))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == user_id()
    return False
