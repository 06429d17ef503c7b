"""A search on disk: what is finished stays finished, whatever happens to the process that runs it.

::

    search.json                     what the search is; a search that goes on must be the same
    folds.pkl                       the folds, where there is bagging
    trial-0003/params.pkl, .json    its parameters, exact and readable
    trial-0003/fold-1/job.json      where and how the child runs
                      log.txt       what it printed
                      result.pkl    score, seconds, predictions; written last, so that a fold with one is finished
                      model.pkl     the trained model
                      error.txt     why there is no result

Every file is written beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainloop.errors import ConfigurationError, UnpicklableError

if TYPE_CHECKING:
    import filelock

__all__ = ["Storage", "dumps", "loads", "read", "write", "write_bytes"]


def dumps(value: object, root: str = "") -> bytes:
    """``value`` for another process, today or later; what ``__main__`` and notebooks define travels by value.

    Raises
    ------
    UnpicklableError
        With the path from ``root`` to what can't be sent.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        from trainloop.transfer.unpicklable import explain

        raise UnpicklableError(explain({root: value}, error)) from error


def loads(data: bytes) -> Any:
    """What :func:`dumps` made. It can run any code, so it must come from a file that is trusted."""
    import pickle

    return pickle.loads(data)


def write(path: Path, value: object, root: str = "") -> None:
    """Pickle ``value`` into a file that is whole or absent."""
    write_bytes(path, dumps(value, root))


def read(path: Path) -> Any:
    """What :func:`write` wrote."""
    return loads(path.read_bytes())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


class Storage:
    """The folder of one search, open in one process at a time."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        try:
            self.identity = self._checked(dict(identity))
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
                f"storage={str(self.folder)!r}: another process searches there now. Wait until it ends, or use another "
                "folder."
            ) from None
        return lock

    def close(self) -> None:
        """Let others open it."""
        self._lock.release()

    def _checked(self, identity: dict[str, Any]) -> dict[str, Any]:
        """The identity that counts: that of the search begun here, if there is one, since it has a seed."""
        path = self.folder / "search.json"
        if not path.exists():
            write_bytes(path, json.dumps(identity, indent=2).encode())
            return identity
        begun: dict[str, Any] = json.loads(path.read_text())
        for name, value in identity.items():
            if name == "seed" and value is None:
                continue
            if begun.get(name) != json.loads(json.dumps(value)):
                raise ConfigurationError(
                    f"storage={str(self.folder)!r} holds a search with {name}={begun.get(name)!r}, and this one has "
                    f"{name}={value!r}. Give the same arguments to go on with it, or another folder for a new search."
                )
        return begun

    def fix_seed(self, seed: int) -> int:
        """The search's seed: the one it was begun with, or this."""
        if self.identity["seed"] is None:
            self.identity["seed"] = seed
            write_bytes(self.folder / "search.json", json.dumps(self.identity, indent=2).encode())
        return int(self.identity["seed"])

    # -- trials and folds --------------------------------------------------------------------------------------------

    def trial_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def fold_folder(self, number: int, fold: int) -> Path:
        return self.trial_folder(number) / f"fold-{fold}"

    def params(self, number: int) -> dict[str, Any] | None:
        """Parameters of a trial begun earlier."""
        path = self.trial_folder(number) / "params.pkl"
        return dict(read(path)) if path.exists() else None

    def begin_trial(self, number: int, params: Mapping[str, Any]) -> None:
        folder = self.trial_folder(number)
        write_bytes(folder / "params.json", json.dumps(params, indent=2, default=repr).encode())
        write(folder / "params.pkl", dict(params))

    def result(self, number: int, fold: int) -> dict[str, Any] | None:
        """The finished fold, without its predictions and its model."""
        path = self.fold_folder(number, fold) / "result.pkl"
        return read(path) if path.exists() else None

    def forget_models(self, number: int) -> None:
        """Delete the models of a trial that another one has beaten."""
        for path in self.trial_folder(number).glob("fold-*/model.pkl"):
            with contextlib.suppress(OSError):
                path.unlink()

    def clean_fold(self, number: int, fold: int) -> Path:
        """An empty folder for a fold that begins."""
        folder = self.fold_folder(number, fold)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
