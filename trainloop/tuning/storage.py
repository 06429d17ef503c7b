"""Store a search in files with versions and checksums, so that finished folds outlive the process that runs it.

::

    search.json                     identity of the search; a call that resumes the search must have the same one
    folds.pkl                       the folds, if bagging is used
    trial-0003/params.pkl, .json    the trial's parameters, exact and readable
    trial-0003/fold-1/log.txt       the child's output
                      result.pkl    score, seconds, ...; written last, so a fold with this file is finished
                      predictions.pkl  predictions for the rows held out
                      model.pkl     the trained model
                      error.txt     reason why there is no result

Every file is written under a temporary name and then renamed. Pickles are read only if no other user could have written
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainloop import __version__
from trainloop._support.platform import absolute_path, grp, pwd, user_id, user_name
from trainloop._transfer.unpicklable import explain
from trainloop.errors import CheckpointError, ConfigurationError, UnpicklableError

if TYPE_CHECKING:
    import filelock

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def dumps(value: object, root: str = "") -> bytes:
    """Pickle ``value`` for another process. Definitions in ``__main__`` and notebooks are pickled by value.

    Raises
    ------
    UnpicklableError
        If an object can't be pickled. The message has the path from ``root`` to it.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UnpicklableError(explain({root: value}, error)) from error


def write(path: Path, value: object, root: str = "") -> None:
    """Pickle ``value`` into a file, atomically."""
    write_bytes(path, dumps(value, root))


def read(path: Path, *, trusted: bool = False) -> Any:
    """Read a pickle that :func:`write` wrote. Unless ``trusted``, reject a file that other users could have written."""
    data = read_own(path, trusted=trusted)
    try:
        return pickle.loads(data)
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} can't be read ({type(error).__name__}: {error}). Install the libraries that it needs. If it is "
        f"damaged, delete the folder {str(path.parent)!r} and repeat the search."
    )


def read_own(path: Path, *, trusted: bool = False) -> bytes:
    """Return the bytes of a file that can execute code when it is unpickled.

    Parameters
    ----------
    trusted : bool
        Skip the checks.

    Raises
    ------
    ConfigurationError
        If anyone but this user and root owns the file or its folder, or other users may write to them.
    """
    with open(path, "rb") as file:
        if not trusted:
            # Check the open file, not the path, which may refer to another file by now.
            _check_owner(path, os.fstat(file.fileno()))
            _check_owner(path.parent, os.stat(path.parent))
        return file.read()


def _check_owner(path: Path, found: os.stat_result) -> None:
    if user_id() is None:  # this system has no user IDs
        return
    is_folder = stat.S_ISDIR(found.st_mode)
    if found.st_uid not in (user_id(), 0):
        wrong, remedy = f"is owned by user {_name(found.st_uid)}", "Copy trusted files to a folder that you own"
    # In a folder that all users can write to, such as /tmp, the sticky bit protects files from other users.
    elif is_folder and found.st_mode & stat.S_ISVTX:
        return
    elif stat.S_IMODE(found.st_mode) & 0o002 or (stat.S_IMODE(found.st_mode) & 0o020 and not _is_private(found)):
        wrong = f"is writable by other users (mode {stat.S_IMODE(found.st_mode):o})"
        remedy = f"Run chmod go-w {str(path)!r}"
    else:
        return
    what = "folder" if is_folder else "file"
    raise ConfigurationError(
        f"{str(path)!r}: this {what} {wrong}, and reading it can execute arbitrary code. {remedy}, or pass "
        "trusted=True if you know who wrote it."
    )


def _is_private(found: os.stat_result) -> bool:
    """Return True if the file's group is the user's private group, with the user's name and no other members."""
    assert grp is not None
    assert pwd is not None
    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return user.pw_gid == found.st_gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}


def _name(uid: int) -> str:
    name = user_name(uid)
    return str(uid) if name is None else repr(name)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically. Other users can't write to it, regardless of the umask."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | _NO_LINK, 0o644)) as file:
            file.write(data)
            file.flush()
            # With fsync, a search can be resumed even after a power failure.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, not writable by other users. Existing folders are left unchanged."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)


def write_checked(path: Path, what: str, layout: int, value: object, root: str) -> None:
    """Pickle ``value`` into a file with a header: its kind, its layout, and the version that wrote it.

    Parameters
    ----------
    what : str
        Kind of the file, in lower case: ``'tabular predictor'``.
    layout : int
        Number of the layout of ``value``; increased when :func:`read_checked` can't use older files.
    """
    body = dumps(value, root)
    digest = hashlib.sha256(body).hexdigest()
    write_bytes(path, f"trainloop {what} {layout} by {__version__}\n{digest}\n".encode() + body)


def read_checked(path: Path, what: str, layout: int, writer: str, *, trusted: bool) -> Any:
    """Read a file that :func:`write_checked` wrote, under the rules of :func:`read`.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind, or from an incompatible version.
    ConfigurationError
        If other users could have written the file.
    """
    try:
        data = read_own(path, trusted=trusted)
    except OSError as error:
        raise CheckpointError(f"no {what} at {str(path)!r} ({error}). Pass the path that save() wrote.") from error
    head = data[:200].partition(b"\n")[0]
    # Files of version 0.1.0 up to layout 2 don't contain the version that wrote them.
    found = re.fullmatch(rf"trainloop {what} (\d+)(?: by (\S+))?", head.decode(errors="replace"))
    if found is None:
        raise CheckpointError(f"{str(path)!r} is not a {what}. Pass a file that {writer} wrote.")
    by = f"trainloop {found[2]}" if found[2] else "an earlier version of trainloop"
    remedy = "Load it with the version that wrote it, or train again and save with this one."
    if int(found[1]) != layout:
        raise CheckpointError(
            f"{str(path)!r} was written by {by} in file layout {found[1]}, but trainloop {__version__} reads only "
            f"layout {layout}. {remedy}"
        )
    start = len(head) + 1
    digest, body = data[start : start + 64], data[start + 65 :]
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum is wrong. Save the predictor again.")
    try:
        return pickle.loads(body)
    except Exception as error:  # for example, a class was moved, or a library is not installed
        raise CheckpointError(
            f"{str(path)!r} was written by {by}, and trainloop {__version__} can't read it here "
            f"({type(error).__name__}: {error}). Install the libraries that its models need. {remedy}"
        ) from error


class Storage:
    """The folder of one search, open in one process at a time."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, trusted: bool = False) -> None:
        self.folder = Path(absolute_path(folder))
        self.trusted = trusted
        make_folder(self.folder)
        if not trusted:  # other users must not be able to add pickles
            _check_owner(self.folder, os.stat(self.folder))
        self._lock = self._locked()
        try:
            self.identity = self._checked_identity(dict(identity))
        except BaseException:
            self.close()
            raise

    def _locked(self) -> filelock.BaseFileLock:
        import filelock

        lock = filelock.FileLock(str(self.folder / "lock"), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ConfigurationError(
                f"storage={str(self.folder)!r}: another process is using this folder. Wait until it ends, or use "
                "another folder."
            ) from None
        return lock

    def close(self) -> None:
        """Close the folder, so that another process can open it."""
        self._lock.release()

    def _checked_identity(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Write and return the identity of a new search, or check and return the identity of the stored search.

        The returned identity contains the seed.
        """
        path = self.folder / "search.json"
        if not path.exists():
            if identity["seed"] is None:
                identity["seed"] = secrets.randbelow(2**31)
            write_bytes(path, json.dumps(identity, indent=2).encode())
            return identity
        try:
            begun: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise _damaged(path, error) from error
        for name, value in identity.items():
            # If no seed is given, the seed of the stored search is used. Earlier versions stored less.
            if (name == "seed" and value is None) or (name in ("fit_args", "searcher", "data") and name not in begun):
                continue
            if begun.get(name) != json.loads(json.dumps(value)):
                raise ConfigurationError(
                    f"storage={str(self.folder)!r} contains a search with {name}={begun.get(name)!r}, but this call "
                    f"has {name}={value!r}. Pass the same arguments to resume it, or another folder for a new search."
                )
        return begun

    # -- trials and folds --------------------------------------------------------------------------------------------

    def trial_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def fold_folder(self, number: int, fold: int) -> Path:
        return self.trial_folder(number) / f"fold-{fold}"

    def params(self, number: int) -> dict[str, Any] | None:
        """Return the parameters of a trial; None if the trial has not begun."""
        path = self.trial_folder(number) / "params.pkl"
        return dict(read(path, trusted=self.trusted)) if path.exists() else None

    def begin_trial(self, number: int, params: Mapping[str, Any]) -> None:
        folder = self.trial_folder(number)
        try:
            text = json.dumps(params, indent=2, default=repr)
        except TypeError:  # JSON has no keys such as tuples
            text = json.dumps({name: repr(value) for name, value in params.items()}, indent=2)
        write_bytes(folder / "params.json", text.encode())
        write(folder / "params.pkl", dict(params))

    def choices(self, number: int) -> dict[str, int]:
        """Return the indices of a trial's choices, as the searcher gave them; empty if there are none."""
        path = self.trial_folder(number) / "choices.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def write_choices(self, number: int, indices: Mapping[str, int]) -> None:
        """Write the indices of a trial's choices."""
        write_bytes(self.trial_folder(number) / "choices.json", json.dumps(dict(indices)).encode())

    def result(self, number: int, fold: int) -> dict[str, Any] | None:
        """Return a fold's result without predictions and model; None if the fold has not finished."""
        path = self.fold_folder(number, fold) / "result.pkl"
        return read(path, trusted=self.trusted) if path.exists() else None

    def forget_models(self, number: int) -> None:
        """Delete the models of a trial."""
        for path in self.trial_folder(number).glob("fold-*/model.pkl"):
            with contextlib.suppress(OSError):
                path.unlink()

    def clean_fold(self, number: int, fold: int) -> Path:
        """Create and return an empty folder for a fold."""
        folder = self.fold_folder(number, fold)
        # Remove files that a killed process left in the folder.
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        return folder
