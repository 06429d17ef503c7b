"""What an object would be in another process, as bytes that can be compared."""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainloop.transfer.pickling import Pickler

__all__ = ["content_of", "digest_of_content"]


def content_of(obj: object, most: int) -> bytes | None:
    """The pickle of an object with all its memory; ``None`` where that can't tell whether two are the same.

    Equal bytes: whoever unpickles them has the same. None where something in it can't be pickled, or lies in memory
    that other processes write, or where it takes more than ``most`` bytes.

    Parameters
    ----------
    obj : object
    most : int
        Bytes, which are at most so many more by the last write.
    """
    pieces: list[bytes] = []
    return b"".join(pieces) if _write(obj, most, lambda data: pieces.append(bytes(data))) else None


def digest_of_content(obj: object, most: int) -> bytes | None:
    """A digest of what :func:`content_of` gives, without as much memory; in a worker's own copy shared memory is read.

    A worker that is not forked has its data in memory that it shares with who sent it.
    """
    digest = hashlib.sha256()
    return digest.digest() if _write(obj, most, digest.update, reads_shared=True) else None


def _write(obj: object, most: int, write: Callable[[Any], object], *, reads_shared: bool = False) -> bool:
    sink = _Sink(most, write)
    pickler = _ContentPickler(sink, reads_shared)
    try:
        pickler.dump(obj)
    except Exception:  # whatever a user's __reduce__ or __getstate__ raises
        return False
    write(repr(pickler.files).encode())  # an unpickler reads no further than the pickle's end
    return True


class _Sink:
    """Passes on what is written, up to a limit."""

    def __init__(self, most: int, write: Callable[[Any], object]) -> None:
        self._left, self._write = most, write

    def write(self, data: Any) -> int:
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise OverflowError("more bytes than allowed")
        self._write(data)
        return size


class _ContentPickler(Pickler):
    """Refuses what the bytes don't tell: memory of several processes, locks, queues."""

    def __init__(self, file: Any, reads_shared: bool) -> None:
        super().__init__(file)
        self._reads_shared = reads_shared
        self.files: list[tuple[int, int]] = []
        """Files that hold mapped arrays: their paths, which are pickled, may come to name others."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind.__module__.startswith(("multiprocessing.", "torch.multiprocessing.")) and not isinstance(
            obj, (type, types.FunctionType)
        ):
            raise TypeError(f"{kind.__qualname__} is shared between processes")
        return super().reducer_override(obj)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if not self._reads_shared and storage.device.type == "cpu" and storage.is_shared():
            raise TypeError("memory that is shared between processes")
        return super()._reduce_storage(storage)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        reduced = super()._reduce_array(array)
        if (
            isinstance(array, np.memmap)
            and isinstance(reduced, tuple)
            and isinstance(reduced[1][0], (str, os.PathLike))
        ):
            there = os.stat(reduced[1][0])
            self.files.append((there.st_dev, there.st_ino))
        return reduced
