"""Folders whose files are written atomically, on a disk or behind an fsspec URL.

::

    folder("checkpoints")        a folder on a disk: temporary name, fsync, rename, fsync of the folder
    folder("s3://bucket/run")    any file system of fsspec (extra ``cloud``): visible once the upload is complete

A reader sees a complete file or none, whenever the writer is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from trainloop._support.distribution import import_extra, pip_install
from trainloop._support.platform import fcntl, running_system
from trainloop.errors import ConfigurationError

__all__ = ["Folder", "folder", "split_file", "sync_directory", "temporary_name", "why_not_writable"]

_TEMPORARY = ".tmp"
# Stores where a file opened with autocommit=False appears at its commit(): a rename needs no copy.
_COMMITTING = ("s3", "s3a", "gs", "gcs")


def folder(location: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or URL. It may not exist: the first write creates it.

    Parameters
    ----------
    location : str or path
        A path (``~`` is expanded; relative to the current folder), a ``file://`` URL, or any URL of an
        fsspec file system, such as ``s3://bucket/run``, ``gs://bucket/run`` or ``memory://run``.

    Raises
    ------
    ConfigurationError
        If ``location`` is neither, or the file system of a URL is not installed.
    """
    if not isinstance(location, (str, os.PathLike)) or not os.fspath(location):
        raise ConfigurationError(f"{location!r} is not a folder. Pass a path or a URL such as 's3://bucket/run'.")
    text = os.fspath(location)
    if "://" not in text:
        return Folder(os.path.abspath(os.path.expanduser(text)))
    if text.startswith("file://"):
        return Folder(os.path.abspath(text[len("file://") :]))
    return _RemoteFolder(text.rstrip("/"))


def split_file(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return a file's folder, and its name there."""
    text = os.fspath(path).rstrip("/")
    if "://" in text:
        parent, _, name = text.rpartition("/")
        return folder(parent), name
    text = os.path.abspath(os.path.expanduser(text))
    return folder(os.path.dirname(text)), os.path.basename(text)


class Folder:
    """A folder on a disk, without open files, so that it can be pickled."""

    location: str
    """Path or URL, as shown to the user."""

    def __init__(self, location: str) -> None:
        self.location = location

    def __repr__(self) -> str:
        return f"folder({self.location!r})"

    def __truediv__(self, name: str) -> Folder:
        """Return a folder inside this one."""
        return folder(self.path(name))

    def path(self, name: str) -> str:
        """Return path or URL of the file ``name``."""
        return f"{self.location.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """Return its complete files, sorted. Empty if there is no such folder."""
        return [n for n, kind in self._entries().items() if kind == "file" and not n.endswith(_TEMPORARY)]

    def folders(self) -> list[str]:
        """Return the folders in it, sorted; empty if there is no such folder."""
        return [name for name, kind in self._entries().items() if kind == "directory"]

    def _entries(self) -> dict[str, str]:
        """Return the kind of each entry by name, sorted: ``file``, ``directory`` or another; empty without a folder."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.location) as entries:
            return {
                entry.name: "file" if entry.is_file() else "directory" if entry.is_dir() else "other"
                for entry in sorted(entries, key=lambda entry: entry.name)
            }
        return {}

    def open(self, name: str) -> BinaryIO:
        """Open the file ``name`` for reading; it is seekable. Raises FileNotFoundError."""
        return open(self.path(name), "rb")

    def write(self, name: str, write: Callable[[BinaryIO], object], *, writer: str = "", durable: bool = True) -> None:
        """Create or replace the file ``name``: ``write`` is called with a file and fills it.

        If it raises, or the disk is full, nothing is left and an existing file stays complete.

        Parameters
        ----------
        name : str
        write : callable
        writer : str
            Name of the writer, for :meth:`remove_unfinished`.
        durable : bool
            Wait until the file would survive a power failure.
        """
        self._make(Path(self.location))
        temporary = self.path(temporary_name(name, writer, _kernel()))
        try:
            # open(), not tempfile: the file gets the permissions that the user's umask gives all others.
            with _new_locked(temporary) as file:
                write(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())  # before the rename: otherwise a power failure may leave an empty file
            # Atomic within a file system, and the temporary name is in the same folder.
            _patiently(os.replace, temporary, self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            sync_directory(self.location)

    def remove(self, name: str) -> None:
        """Delete the file ``name``; no error if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            _patiently(os.unlink, self.path(name))

    def remove_unfinished(self, writer: str) -> None:
        """Delete unfinished files of a killed ``writer``, and no others."""
        for name, kind in self._entries().items():
            if not _is_temporary_of(writer, name):
                continue
            if kind == "directory":
                shutil.rmtree(self.path(name), ignore_errors=True)
            else:
                self.remove(name)

    def remove_dead(self) -> None:
        """Delete unfinished files of any killed process, on local disks, if it is certainly dead."""
        if not _kernel():
            return
        mark = re.compile(rf"\..+\.{_kernel()}[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")
        names: list[str] = []
        with contextlib.suppress(OSError):  # a folder that can't be listed
            names = [name for name, kind in self._entries().items() if kind == "file" and mark.fullmatch(name)]
        for name in names:
            with contextlib.suppress(OSError):
                file = os.open(self.path(name), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if _lock(file):
                        os.unlink(self.path(name))
                finally:
                    os.close(file)

    def check_writable(self) -> None:
        """Raise ConfigurationError if certainly no file can be created here. Leaves nothing behind."""
        why = why_not_writable(self.location)
        if why:
            raise ConfigurationError(f"{self.location!r} can't be written to: {why}. Choose another folder.")

    def read_text(self, name: str) -> str:
        """Return the file ``name`` as UTF-8 text."""
        with self.open(name) as file:
            return file.read().decode("utf-8")

    def write_text(self, name: str, text: str, *, writer: str = "", durable: bool = True) -> None:
        """Create or replace the file ``name`` with this text, as :meth:`write` does."""
        self.write(name, lambda file: file.write(text.encode("utf-8")), writer=writer, durable=durable)

    def _make(self, path: Path) -> None:
        """Create the folder and its parents; each new name is synced in its parent folder."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        # Otherwise a power failure might remove the new folder, with the checkpoint in it.
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            sync_directory(str(new.parent))


def why_not_writable(location: str) -> str:
    """Return why no file can be created in a local folder, or the folder itself; empty if it can, or lacks only space.

    This tries to create and delete a file: permissions allow root to write to any folder, even in ``/proc`` or on a
    read-only disk, where it cannot.
    """
    nearest = location
    try:
        while not _is_there(nearest):
            nearest = os.path.dirname(nearest)
        if not os.path.isdir(nearest):
            return f"{nearest} is a file" if os.path.exists(nearest) else f"{nearest} is a broken link"
        probe = os.path.join(nearest, temporary_name("probe", "", _kernel()))
        if nearest == location:
            _new_locked(probe).close()
            os.unlink(probe)
        else:
            os.mkdir(probe)
            os.rmdir(probe)
    except ValueError as error:  # a null character
        return str(error)
    except OSError as error:
        # Files may be deleted during the training.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""
        # Its text would name the probe file.
        why = "no permission to write" if isinstance(error, PermissionError) else error.strerror or type(error).__name__
        return f"{why} in {nearest}"
    return ""


_OPEN_ELSEWHERE_S = 5.0


def _patiently(change: Callable[..., None], *paths: str) -> None:
    """Rename or delete a file. Windows refuses while another process (a reader, a virus scanner) has it open."""
    deadline = time.monotonic() + _OPEN_ELSEWHERE_S
    while True:
        try:
            return change(*paths)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _is_there(path: str) -> bool:
    """Return True if the name exists, even as a broken link; raises for a name that no file can have."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync_directory(path: str) -> None:
    """Wait until the names in a folder would survive a power failure."""
    if sys.platform == "win32":  # folders can't be opened there: the file system keeps names by other means
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems can't sync a folder; they keep names by other means.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _RemoteFolder(Folder):
    """A folder behind an fsspec URL. It holds no connection: fsspec caches and shares them."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._connect()  # here, so that a missing package is found when arguments are checked

    def _connect(self) -> tuple[Any, str]:
        """Return the file system, and this folder's path in it."""
        fsspec = import_extra("fsspec", f"{self.location!r} is a URL, which", "cloud")
        try:
            system, path = fsspec.core.url_to_fs(self.location)
        except ImportError as error:
            raise ConfigurationError(
                f"{self.location!r} needs a package that is not installed ({error}): {pip_install('cloud')}, "
                "or pass a local path."
            ) from error
        except ValueError as error:
            raise ConfigurationError(f"{self.location!r}: fsspec can't open this URL ({error}).") from error
        return system, path.rstrip("/")

    def _entries(self) -> dict[str, str]:
        system, path = self._connect()
        # A cached listing would not show files that other processes have written or deleted since.
        system.invalidate_cache(path)
        try:
            entries = system.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return dict(sorted((entry["name"].rstrip("/").rpartition("/")[2], entry["type"]) for entry in entries))

    def open(self, name: str) -> BinaryIO:
        system, path = self._connect()
        return cast(BinaryIO, system.open(f"{path}/{name}", "rb"))

    def write(self, name: str, write: Callable[[BinaryIO], object], *, writer: str = "", durable: bool = True) -> None:
        system, path = self._connect()
        protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
        commits = not set(protocols).isdisjoint(_COMMITTING)
        if not commits:
            system.makedirs(path, exist_ok=True)  # s3fs would create a bucket, also for a misspelt one
        target, temporary = f"{path}/{name}", f"{path}/{temporary_name(name, writer)}"
        file = system.open(target, "wb", autocommit=False) if commits else system.open(temporary, "wb")
        try:
            write(file)
            file.close()
            if commits:
                file.commit()
            else:
                system.mv(temporary, target)
        except BaseException:
            # If anything fails here, the first error is the one to raise.
            with contextlib.suppress(Exception):
                file.close()
            with contextlib.suppress(Exception):
                file.discard() if commits else system.rm_file(temporary)
            raise

    def remove(self, name: str) -> None:
        system, path = self._connect()
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")

    def remove_dead(self) -> None:
        pass  # objects have no locks

    def check_writable(self) -> None:
        pass  # the upload will show it; querying permissions may itself need a permission


def temporary_name(name: str, writer: str, kernel: str = "") -> str:
    """Return a temporary name for writing; by the writer's name, remains of a killed process are found."""
    return f".{name}.{writer or 'write'}.{kernel}{uuid4().hex[:8]}{_TEMPORARY}"


def _kernel() -> str:
    """Digits of the running system, for the names of files; empty where unknown.

    Files from the same system are locked while their writer lives, in any container. For files of another host, on a
    network disk, a missing lock proves nothing.
    """
    return running_system()[:12]


def _new_locked(path: str) -> BinaryIO:
    """Return a new file that is locked until this process ends."""
    while True:
        file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  # the caller closes it
        if _lock(file.fileno()) or os.path.exists(path):  # or the file system has no locks
            return file
        file.close()  # a search for dead files was faster than the lock


def _lock(file: int) -> bool:
    """Return True if this process got the file's lock; also ``False`` if the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_temporary_of(writer: str, name: str) -> bool:
    parts = name.split(".")  # '', the name's own parts, writer, digits, 'tmp'
    return len(parts) >= 5 and not parts[0] and parts[-3] == writer and name.endswith(_TEMPORARY)
