"""Folders whose files are written atomically, and locked, on a disk or behind an fsspec URL.

::

    folder("checkpoints")        a folder on a disk: temporary name, fsync, rename, fsync of the folder
    folder("s3://bucket/run")    any file system of fsspec (extra ``cloud``): visible once the upload is complete

A reader sees the complete file or no file, even if the writer is killed.
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

_TEMPORARY = ".tmp"
# Protocols whose files become visible at commit() if they are opened with autocommit=False. So no rename is needed; it
# would copy the file.
_COMMITTING = ("s3", "s3a", "gs", "gcs")


def folder(location: str | os.PathLike[str] | Folder) -> Folder:
    """Return the folder at a path or URL. If it does not exist, the first write creates it.

    Parameters
    ----------
    location : str, path or Folder
        A path (relative to the current folder, ``~`` is expanded), a ``file://`` URL, or a URL of any fsspec file
        system, such as ``s3://bucket/run``, ``gs://bucket/run`` or ``memory://run``. A ``Folder`` is returned as it is.

    Raises
    ------
    ConfigurationError
        If ``location`` is neither a path nor a URL, or the file system of a URL is not installed.
    """
    if isinstance(location, Folder):
        return location
    if not isinstance(location, (str, os.PathLike)) or not os.fspath(location):
        raise ConfigurationError(f"{location!r} is not a folder. Pass a path or a URL such as 's3://bucket/run'.")
    text = os.fspath(location)
    if "://" not in text:
        return Folder(os.path.abspath(os.path.expanduser(text)))
    if text.startswith("file://"):
        return Folder(os.path.abspath(text[len("file://") :]))
    return _RemoteFolder(text.rstrip("/"))


def split_file(path: str | os.PathLike[str]) -> tuple[Folder, str]:
    """Return the folder of a file, and the file's name in it."""
    text = os.fspath(path).rstrip("/")
    if "://" in text:
        parent, _, name = text.rpartition("/")
        return folder(parent), name
    text = os.path.abspath(os.path.expanduser(text))
    return folder(os.path.dirname(text)), os.path.basename(text)


class Folder:
    """A folder on a disk. It has no open files, so it can be pickled."""

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
        """Return the path or URL of the file ``name``."""
        return f"{self.location.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """Return the names of the folder's complete files, sorted; empty if the folder does not exist."""
        return [n for n, kind in self.entries().items() if kind == "file" and not n.endswith(_TEMPORARY)]

    def folders(self) -> list[str]:
        """Return the names of the folders in this one, sorted; empty if this folder does not exist."""
        return [name for name, kind in self.entries().items() if kind == "directory"]

    def entries(self) -> dict[str, str]:
        """Return each entry's kind (``file``, ``directory``, ...) by name, sorted; empty if the folder is missing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.location) as entries:
            return {entry.name: _kind_of_entry(entry) for entry in sorted(entries, key=lambda entry: entry.name)}
        return {}

    def exists(self) -> bool:
        """Return True if the folder exists."""
        return os.path.isdir(self.location)

    def claim(self) -> bool:
        """Create the folder. Return False if it existed: of several processes, one gets True.

        If it can't be created, the first write raises the error.
        """
        with contextlib.suppress(OSError):
            try:
                Path(self.location).mkdir(parents=True)
            except FileExistsError:
                return False
        return True

    def open(self, name: str) -> BinaryIO:
        """Open the file ``name`` for reading and seeking. Raise FileNotFoundError if it does not exist."""
        return open(self.path(name), "rb")

    def write(self, name: str, write: Callable[[BinaryIO], object], *, writer: str = "", durable: bool = True) -> None:
        """Create or replace the file ``name``. ``write`` is called with an open file to write to.

        If ``write`` raises, or the disk is full, no partial file is left, and an existing file stays complete.

        Parameters
        ----------
        name : str
        write : callable
        writer : str
            Name of the writer, for :meth:`remove_unfinished`.
        durable : bool
            If True, return only when the file would survive a power failure.
        """
        self._make_folder(Path(self.location))
        temporary = self.path(temporary_name(name, writer, _kernel()))
        try:
            # Uses open() instead of tempfile, so that the file gets permissions according to the umask.
            with _new_locked(temporary) as file:
                write(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())  # before the rename; otherwise a power failure may leave an empty file
            # Renaming is atomic within a file system. The temporary file is in the same folder.
            put_in_place(temporary, self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            sync_directory(self.location)

    def remove(self, name: str) -> None:
        """Delete the file ``name``; no error if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            _retried(os.unlink, self.path(name))

    def remove_unfinished(self, writer: str) -> None:
        """Delete unfinished files of a killed ``writer``, and no other files."""
        for name, kind in self.entries().items():
            if not _is_temporary_of(writer, name):
                continue
            if kind == "directory":
                shutil.rmtree(self.path(name), ignore_errors=True)
            else:
                self.remove(name)

    def remove_dead(self) -> None:
        """Delete unfinished files of processes on this system that have certainly ended."""
        if not _kernel():
            return
        mark = re.compile(rf"\..+\.{_kernel()}[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")
        names: list[str] = []
        with contextlib.suppress(OSError):  # the folder can't be listed
            names = [name for name, kind in self.entries().items() if kind == "file" and mark.fullmatch(name)]
        for name in names:
            with contextlib.suppress(OSError):
                file = os.open(self.path(name), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
                try:
                    if _lock_file(file):
                        os.unlink(self.path(name))
                finally:
                    os.close(file)

    def check_writable(self) -> None:
        """Raise ConfigurationError if no file can be created in this folder. No file is left."""
        why = why_not_writable(self.location)
        if why:
            raise ConfigurationError(f"{self.location!r} can't be written to: {why}. Choose another folder.")

    def read_text(self, name: str) -> str:
        """Return the file ``name`` as UTF-8 text."""
        with self.open(name) as file:
            return file.read().decode("utf-8")

    def write_text(self, name: str, text: str, *, writer: str = "", durable: bool = True) -> None:
        """Create or replace the file ``name`` with this text, as :meth:`write` does."""
        data = text.encode("utf-8", "backslashreplace")  # names of files may have bytes that are no UTF-8
        self.write(name, lambda file: file.write(data), writer=writer, durable=durable)

    def _make_folder(self, path: Path) -> None:
        """Create the folder and its missing parents, and sync the parent of each new folder."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        # Without the sync, a power failure could remove the new folder with the checkpoint in it.
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            sync_directory(str(new.parent))


def _kind_of_entry(entry: os.DirEntry[str]) -> str:
    with contextlib.suppress(OSError):  # a link that leads back to itself, or to a disk that does not respond
        return "file" if entry.is_file() else "directory" if entry.is_dir() else "other"
    return "other"


def why_not_writable(location: str) -> str:
    """Return the reason why no file can be created in a local folder, or an empty string. Lack of space does not count.

    The function creates and deletes a file or folder. Permissions are not enough to decide: they allow root to write to
    any folder, even in ``/proc`` or on a read-only disk.
    """
    nearest = location
    try:
        while not _exists(nearest):
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
    except ValueError as error:  # the path contains a null character
        return str(error)
    except OSError as error:
        # Space may become free during the training.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""
        # The error's own text would name the probe file.
        why = "no permission to write" if isinstance(error, PermissionError) else error.strerror or type(error).__name__
        return f"{why} in {nearest}"
    return ""


def put_in_place(temporary: str, path: str) -> None:
    """Rename a complete file, which may replace another file. Root could replace even a device, such as /dev/null."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", path)
    _retried(os.replace, temporary, path)


_RETRY_S = 5.0


def _retried(change: Callable[..., None], *paths: str) -> None:
    """Rename or delete a file. On Windows, retry for a few seconds if another process has the file open."""
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            return change(*paths)
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _exists(path: str) -> bool:
    """Return True if the path exists, even as a broken link. Raise an error if no file can have this path."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync_directory(path: str) -> None:
    """Sync a folder, so that the names in it would survive a power failure."""
    if sys.platform == "win32":  # folders can't be opened on Windows, whose file system protects names by itself
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems can't sync a folder, but protect names by themselves.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _RemoteFolder(Folder):
    """A folder behind an fsspec URL. It has no connection of its own: fsspec caches and shares connections."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._connect()  # raises an error about a missing package when arguments are checked

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

    def entries(self) -> dict[str, str]:
        system, path = self._connect()
        # A cached listing would not show recent changes by other processes.
        system.invalidate_cache(path)
        try:
            entries = system.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return dict(sorted((entry["name"].rstrip("/").rpartition("/")[2], entry["type"]) for entry in entries))

    def exists(self) -> bool:
        system, path = self._connect()
        return bool(system.isdir(path))

    def claim(self) -> bool:
        return not self.exists()  # object stores create no folders

    def open(self, name: str) -> BinaryIO:
        system, path = self._connect()
        return cast(BinaryIO, system.open(f"{path}/{name}", "rb"))

    def write(self, name: str, write: Callable[[BinaryIO], object], *, writer: str = "", durable: bool = True) -> None:
        system, path = self._connect()
        protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
        commits = not set(protocols).isdisjoint(_COMMITTING)
        if not commits:
            system.makedirs(path, exist_ok=True)  # not with s3fs, which would create even a misspelt bucket
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
            # Errors in cleaning up are suppressed, so that the first error is raised.
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
        pass  # the first upload shows if writing is allowed; querying permissions may need further permissions


def temporary_name(name: str, writer: str, kernel: str = "") -> str:
    """Return a temporary file name. The writer's name in it identifies unfinished files of a killed process."""
    return f".{name}.{writer or 'write'}.{kernel}{uuid4().hex[:8]}{_TEMPORARY}"


def _kernel() -> str:
    """Return an identifier of the running system for file names; empty if it is unknown.

    A temporary file of this system is locked while its writer runs, in any container. If a file of another host is not
    locked here, its writer may still be running.
    """
    return running_system()[:12]


def _new_locked(path: str) -> BinaryIO:
    """Create and open a file that stays locked until it is closed."""
    while True:
        file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115  # the caller closes it
        if _lock_file(file.fileno()) or os.path.exists(path):  # or the file system has no locks
            return file
        file.close()  # remove_dead of another process has deleted the file before it was locked


def _lock_file(file: int) -> bool:
    """Lock a file. Return False if another process has locked it, or the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_temporary_of(writer: str, name: str) -> bool:
    parts = name.split(".")  # '', the parts of the file's final name, writer, digits, 'tmp'
    return len(parts) >= 5 and not parts[0] and parts[-3] == writer and name.endswith(_TEMPORARY)
