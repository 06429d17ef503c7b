"""A folder for the sockets and files that ranks and their loaders' workers make by multiprocessing's own means.

Python makes one for each such process, ``pymp-*``, which a process that is killed can't remove. So a launch makes one
for all of its processes, and removes it when they have ended. It is locked for as long as any of them lives; where all
were killed, the launching process too, the next launch finds it unlocked. A file in it names the launch, as the names
of its semaphores do.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

__all__ = ["Scratch", "scratch_folder", "semaphore_prefix"]

# Short: the path of a socket in it has 107 characters at most.
_PREFIX = "trainloop-mp-"
_TOKEN = "launch-"


class Scratch(NamedTuple):
    """The folder, and the lock that every process of the launch holds by inheriting it."""

    path: str
    lock_fd: int


@contextlib.contextmanager
def scratch_folder(token: str) -> Iterator[Scratch]:
    """Make the folder, and remove those of launches of this user none of whose processes is alive.

    Parameters
    ----------
    token : str
        Of the launch; semaphores whose names begin with :func:`semaphore_prefix` of it are removed as well.
    """
    _remove_dead()
    scratch = _make()
    try:
        with open(os.path.join(scratch.path, _TOKEN + token), "x"):
            pass
        yield scratch
    finally:
        _remove(scratch)


def _make() -> Scratch:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        lock_fd = _locked(path)
        if lock_fd is not None:
            return Scratch(path, lock_fd)
        # Another launch, which looks for dead ones, was here before the lock.


def _remove(scratch: Scratch) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch.path):
            if name.startswith(_TOKEN):
                _remove_semaphores(name.removeprefix(_TOKEN))
    shutil.rmtree(scratch.path, ignore_errors=True)
    os.close(scratch.lock_fd)


def semaphore_prefix(token: str) -> str:
    """What the names of semaphores begin with that ranks of this launch, and their workers, make."""
    return f"/mp-{token}"


def _remove_semaphores(token: str) -> None:
    """Remove what killed ranks and workers left; the tracker that they shared would do it when this process ends."""
    for path in Path("/dev/shm").glob(f"sem.{glob.escape(semaphore_prefix(token)[1:])}-*"):  # where Linux keeps them
        with contextlib.suppress(OSError):
            path.unlink()
            resource_tracker.unregister(f"/{path.name[len('sem.') :]}", "semaphore")


def _locked(path: str) -> int | None:
    """A descriptor that holds the folder's lock; ``None`` where another process holds it, or the folder has gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove_dead() -> None:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_own_folder(entry):
                lock_fd = _locked(entry.path)
                if lock_fd is not None:
                    _remove(Scratch(entry.path, lock_fd))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False
