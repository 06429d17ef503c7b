"""One object, sent once to all ranks of a node: a stream and its arrays in one file that every rank maps."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from dataclasses import dataclass
from multiprocessing.context import set_spawning_popen  # type: ignore[attr-defined]
from typing import Any

import numpy as np
import torch

from trainloop.transfer.pages import anonymous_file
from trainloop.transfer.pickling import Pickler, load_device

__all__ = ["Payload", "Parcel", "pack"]

_IN_STREAM = 256  # bytes; below, a buffer's own bookkeeping costs more than copying it
_ALIGNMENT = 64


@dataclass(frozen=True)
class Parcel:
    """What a rank needs to know to read the payload; small, picklable."""

    fd: int
    """Descriptor of the payload's file, the same number in every rank."""
    size: int
    """Bytes of the file."""
    stream_size: int
    """Bytes of the pickle stream, which is at the file's beginning."""
    table: tuple[int, int]
    """Place and number of the entries (place, bytes, read-only) of the buffers."""

    def open(self, device: torch.device | None = None) -> Any:
        """The object. Its arrays lie in the mapped file: shared as long as nobody writes, then this rank's own.

        Parameters
        ----------
        device : torch.device, optional
            Where tensors go that were on a CUDA device.
        """
        # MAP_PRIVATE: a rank's writes (into parameters, say) stay its own.
        mapped = mmap.mmap(self.fd, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(mapped)
        offset, count = self.table
        entries = np.frombuffer(mapped, dtype=np.int64, count=3 * count, offset=offset).reshape(count, 3).tolist()
        buffers = (
            view[place : place + nbytes].toreadonly() if readonly else view[place : place + nbytes]
            for place, nbytes, readonly in entries
        )
        with load_device(device):
            return pickle.loads(view[: self.stream_size], buffers=buffers)


class Payload:
    """The sender's side: keeps what was sent alive until :meth:`close`."""

    def __init__(self, parcel: Parcel, inherited: list[int]) -> None:
        self.parcel = parcel
        self.inherited = inherited
        """Descriptors that the ranks must inherit, the payload's own among them."""

    def close(self) -> None:
        """Give the file back."""
        os.close(self.parcel.fd)

    def __enter__(self) -> Payload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _CollectedDescriptors:
    """Stands for the process being spawned while the payload is pickled, so that locks, queues, connections can be."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def DupFd(self, fd: int) -> _Descriptor:  # noqa: N802, multiprocessing's name
        return _Descriptor(fd)

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


@dataclass(frozen=True)
class _Descriptor:
    fd: int

    def detach(self) -> int:
        return self.fd


def pack(obj: object, *, roots: dict[str, object] | None = None) -> Payload:
    """Pickle ``obj`` into a file that any number of ranks of this node can map.

    Parameters
    ----------
    obj : object
        What to send.
    roots : dict of str to object, optional
        Names that the paths in an :class:`UnpicklableError` start with; ``obj`` itself by default.

    Raises
    ------
    UnpicklableError
        If something in it can't be sent; the message has its path, its type and what to do.
    """
    fd = anonymous_file("payload")
    spawning = _CollectedDescriptors()
    buffers: list[memoryview] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_STREAM:
            return True
        buffers.append(raw)
        return False

    try:
        set_spawning_popen(spawning)
        try:
            with open(fd, "wb", closefd=False, buffering=1 << 20) as file:
                Pickler(file, keep_out).dump(obj)
                stream_size = file.tell()
        finally:
            set_spawning_popen(None)
        place = stream_size
        entries = np.empty((len(buffers), 3), dtype=np.int64)
        for i, raw in enumerate(buffers):
            place = -(-place // _ALIGNMENT) * _ALIGNMENT
            entries[i] = place, raw.nbytes, raw.readonly
            _write(fd, raw, place)
            place += raw.nbytes
        place = -(-place // _ALIGNMENT) * _ALIGNMENT
        _write(fd, memoryview(entries).cast("B") if entries.size else memoryview(b""), place)
        size = max(place + entries.nbytes, 1)
        os.ftruncate(fd, size)
        return Payload(Parcel(fd, size, stream_size, (place, len(buffers))), [fd, *spawning.fds])
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def _write(fd: int, data: memoryview, place: int) -> None:
    while data.nbytes:
        written = os.pwrite(fd, data, place)
        data, place = data[written:], place + written
