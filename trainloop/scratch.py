"""A folder for the sockets and files that ranks and their loaders' workers make by multiprocessing's own means.

Python makes one for each such process, ``pymp-*``, which a process that is killed can't remove. So a launch makes one
for all of its processes, and removes it when they have ended. It is locked for as long as any of them lives; where all
were killed, the launching process too, the next launch finds it unlocked. A file in it names the launch, as the names
of its semaphores do. Removed is only what an unlocked folder of this user speaks of.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Scratch", "name_semaphores", "remove_dead", "scratch_folder"]

# Short: the path of a socket in it has 107 characters at most.
_PREFIX = "trainloop-mp-"
_TOKEN = "launch-"
_SEMAPHORES = "mp-"


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
        Of the launch; semaphores that :func:`name_semaphores` has named by it are removed as well.
    """
    remove_dead()
    scratch = _make()
    try:
        with open(os.path.join(scratch.path, _TOKEN + token), "x"):
            pass
        yield scratch
    finally:
        _remove(scratch, own=True)


def _make() -> Scratch:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        lock_fd = _locked(path)
        if lock_fd is not None:
            return Scratch(path, lock_fd)
        # Another launch, which looks for dead ones, was here before the lock.


def _remove(scratch: Scratch, *, own: bool) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch.path):
            if name.startswith(_TOKEN):
                _remove_semaphores(name.removeprefix(_TOKEN), tracked=own)
    shutil.rmtree(scratch.path, ignore_errors=True)
    os.close(scratch.lock_fd)


def name_semaphores(token: str) -> None:
    """Let the semaphores that this process and its workers make tell which launch they are of.

    For a rank, which may be killed. By their names alone they can be found then, and libraries rename them: joblib's
    loky does it for all of the process as soon as it is imported.
    """
    from multiprocessing import synchronize  # `import trainloop` is to be cheap

    prefix = f"/{_SEMAPHORES}{token}"
    multiprocessing.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]
    make = synchronize.SemLock.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # On the instance, where it comes before what a library has put, or will put, into the class.
        self._make_name = lambda: f"{prefix}-{next(synchronize.SemLock._rand)}"  # type: ignore[attr-defined]
        try:
            make(self, *args, **kwargs)
        finally:
            del self._make_name

    synchronize.SemLock.__init__ = __init__  # type: ignore[method-assign]


def _remove_semaphores(token: str, *, tracked: bool) -> None:
    """Remove what killed ranks and workers left; the tracker that they shared would do it when this process ends."""
    for path in Path("/dev/shm").glob(f"sem.{glob.escape(_SEMAPHORES + token)}-*"):  # where Linux keeps them
        with contextlib.suppress(OSError):
            path.unlink()
            if tracked:  # by this process's tracker, which complains about names of others
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


def remove_dead() -> None:
    """Remove what launches of this user left, none of whose processes is alive."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_own_folder(entry):
                lock_fd = _locked(entry.path)
                if lock_fd is not None:
                    _remove(Scratch(entry.path, lock_fd), own=False)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False
