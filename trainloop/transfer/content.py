"""What an object would be in another process, as bytes that can be compared."""

from __future__ import annotations

import os
import types
from typing import Any

import numpy as np
import torch

from trainloop.transfer.pickling import Pickler

__all__ = ["content_of"]


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
    sink = _Sink(most)
    pickler = _ContentPickler(sink)
    try:
        pickler.dump(obj)
    except Exception:  # whatever a user's __reduce__ or __getstate__ raises
        return None
    # An unpickler reads no further than the pickle's end.
    return b"".join([*sink.pieces, repr(pickler.files).encode()])


class _Sink:
    """Collects what is written, up to a limit."""

    def __init__(self, most: int) -> None:
        self.pieces: list[bytes] = []
        self._left = most

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._left -= len(piece)
        if self._left < 0:
            raise OverflowError("more bytes than allowed")
        self.pieces.append(piece)
        return len(piece)


class _ContentPickler(Pickler):
    """Refuses what the bytes don't tell: memory of several processes, locks, queues."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
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
        if storage.device.type == "cpu" and storage.is_shared():
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
