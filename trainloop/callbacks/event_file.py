"""TensorBoard event files, written a block of steps at a time.

:class:`EventFile` writes what ``tensorboard.summary.writer.EventFileWriter`` writes, byte for byte, and costs a
fortieth of it where it matters: a training loop hands over the scalars of a hundred steps at once, which differ from
one another in some 50 bytes only. So one encoded step is the template of them all, and its checksum, which is linear
over GF(2), follows from the bytes that differ by table look-ups over the whole block. (With ten scalars a step:
protobuf 14 us and tensorboard's checksum, pure Python, 28 us, against 1 us; the tests compare the bytes.)

Nothing is buffered and no thread is needed: a block is one ``write``, so what was handed over survives a kill.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["EventFile"]

SUFFIX = ".trainloop"
"""Ends the name of each file written here, so that a later run knows them from other writers' files."""

Row = tuple[int, dict[str, float]]


class EventFile:
    """One TensorBoard event file, open for writing.

    Parameters
    ----------
    log_dir : str
        Folder that TensorBoard is started with; made if it is missing. Whatever ``tensorboard`` itself can write to,
        such as ``s3://...``, goes through its own file system layer.
    owner : str
        Two numbers with a point between them that stand in the file's name, by which :meth:`remove_of` finds it.
        Default: those of this process.

    Attributes
    ----------
    path : str
        The file. Names sort in the order in which files of a folder were begun, also within one second:
        TensorBoard reads a folder's files in that order.
    continues : bool
        The folder held files of an earlier writer of this kind.

    Examples
    --------
    >>> file = EventFile(str(tmp_path))
    >>> file.write_scalars([(1, {"loss": 2.0}), (2, {"loss": 1.5})])
    >>> file.close()
    """

    def __init__(self, log_dir: str, owner: str = "") -> None:
        self._remote = "://" in log_dir
        earlier = [] if self._remote else sorted(Path(log_dir).glob(f"events.out.tfevents.*{SUFFIX}"))
        self.continues = bool(earlier)
        begun = int(time.time())
        if earlier:
            begun = max(begun, int(earlier[-1].name.split(".")[3]) + 1)
        name = f"events.out.tfevents.{begun:010d}.{socket.gethostname()}.{owner or f'{os.getpid()}.0'}{SUFFIX}"
        self.path = os.path.join(log_dir, name)
        self._file = self._open(log_dir)
        self._last_wall_time = time.time()
        from tensorboard.compat.proto.event_pb2 import Event

        self.write_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    @classmethod
    def reopened(cls, path: str, size: int) -> EventFile:
        """Reopen the file of a process that has died, cut to an earlier size.

        Parameters
        ----------
        path : str
        size : int
            Bytes to keep: an earlier :attr:`size`.
        """
        found = object.__new__(cls)
        found._remote, found.continues, found.path = False, False, path
        found._file = open(path, "r+b", buffering=0)  # noqa: SIM115  # open as long as the object
        found._file.truncate(size)
        found._file.seek(size)
        found._last_wall_time = time.time()
        return found

    @staticmethod
    def remove_of(log_dir: str, owner: str) -> None:
        """Remove the files of an owner from a local folder."""
        for path in Path(log_dir).glob(f"events.out.tfevents.*.{socket.gethostname()}.{owner}{SUFFIX}"):
            path.unlink()

    @property
    def size(self) -> int | None:
        """Bytes written so far; ``None`` where the file can't be cut to them later."""
        return None if self._remote else self._file.tell()

    def _open(self, log_dir: str) -> Any:
        if self._remote:
            from tensorboard.compat import tf

            tf.io.gfile.makedirs(log_dir)
            return tf.io.gfile.GFile(self.path, "wb")
        os.makedirs(log_dir, exist_ok=True)
        return open(self.path, "xb", buffering=0)

    def _write(self, data: bytes) -> None:
        if self._remote:
            self._file.write(data)
            self._file.flush()
            return
        rest = memoryview(data)
        while rest:  # an unbuffered write may take a part only
            rest = rest[self._file.write(rest) :]

    def write_event(self, event: Any) -> None:
        """Write one ``Event`` protocol buffer of any kind."""
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._write(length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data)))

    def write_summary(self, summary: Any, step: int = 0) -> None:
        """Write one ``Summary`` protocol buffer: histograms, hyperparameters, texts."""
        from tensorboard.compat.proto.event_pb2 import Event

        self.write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def purge_from(self, step: int) -> None:
        """Make readers forget what earlier files of the folder hold at ``step`` and after it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.write_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def write_scalars(self, rows: Sequence[Row]) -> None:
        """Write one event for each row, holding all the row's scalars.

        Parameters
        ----------
        rows : sequence of (int, dict of str to float)
            Global step and the scalars of that step. Rows with the same names in the same order are encoded together.

        Notes
        -----
        The times of the steps in a block are unknown; wall times are spread evenly since the block before.
        """
        rows = [row for row in rows if row[1]]
        if not rows:
            return
        now = time.time()
        wall_times = np.linspace(self._last_wall_time, now, len(rows) + 1)[1:]
        self._last_wall_time = now
        blocks, start = [], 0
        for (tags, step_bytes), group in itertools.groupby(rows, _shape):
            block = list(group)
            template = _template(tags, step_bytes)
            blocks.append(template.encode(block, wall_times[start : start + len(block)]))
            start += len(block)
        self._write(b"".join(blocks))

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()


def _varint_size(number: int) -> int:
    return (number.bit_length() + 6) // 7


def _shape(row: Row) -> tuple[tuple[str, ...], int]:
    """The key of a row's template: the names, and the bytes that the step takes (none for step 0)."""
    return tuple(row[1]), _varint_size(row[0])


@lru_cache(maxsize=64)
def _template(tags: tuple[str, ...], step_bytes: int) -> _ScalarTemplate:
    return _ScalarTemplate(tags, step_bytes)


class _ScalarTemplate:
    """An encoded event with holes for the wall time, the step and the values, and the checksum's tables for the holes.

    A record is ``uint64 length, uint32 checksum of it, the event, uint32 checksum of the event``. CRC-32C of a message
    is the XOR of the checksum of the message with its holes zero and of one term for each byte in a hole, which
    depends on the byte and its distance from the end alone.
    """

    def __init__(self, tags: tuple[str, ...], step_bytes: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=1.0) for tag in tags])
        step = 1 << 7 * (step_bytes - 1) if step_bytes else 0
        event = bytearray(Event(wall_time=1.0, step=step, summary=summary).SerializeToString())
        # Tag byte and double first, tag byte and varint second; each value's float ends its sub-message.
        holes = [*range(1, 9), *range(10, 10 + step_bytes)]
        end = len(event) - summary.ByteSize()
        for value in summary.value:
            end += 1 + _varint_size(value.ByteSize()) + value.ByteSize()
            holes += range(end - 4, end)
        for hole in holes:
            event[hole] = 0
        length = struct.pack("<Q", len(event))
        head = length + struct.pack("<I", masked_crc32c(length))
        self._record = np.frombuffer(head + bytes(event) + bytes(4), dtype=np.uint8)
        self._step_bytes = step_bytes
        self._holes = np.array(holes) + len(head)
        self._base = np.uint32(_crc32c(event))
        term, terms = _CRC_TABLE, [_CRC_TABLE]
        for _ in range(len(event) - 1):
            term = _CRC_TABLE[term & 0xFF] ^ (term >> 8)
            terms.append(term)
        # One row for each hole, one column for each value of its byte; flat, since one `take` is fastest.
        self._terms = np.concatenate([terms[len(event) - 1 - hole] for hole in holes])
        self._term_rows = np.arange(len(holes)) * 256

    def encode(self, rows: Sequence[Row], wall_times: npt.NDArray[np.float64]) -> bytes:
        count, step_bytes = len(rows), self._step_bytes
        fill = np.empty((count, len(self._holes)), dtype=np.uint8)
        fill[:, :8] = wall_times.astype("<f8").view(np.uint8).reshape(count, 8)
        steps = np.array([step for step, _ in rows], dtype=np.uint64)
        for i in range(step_bytes):
            more = 0x80 if i < step_bytes - 1 else 0
            fill[:, 8 + i] = (steps >> np.uint64(7 * i)) & np.uint64(0x7F) | np.uint64(more)
        with np.errstate(over="ignore"):  # a float64 past float32's range is written as inf, as protobuf does
            values = np.array([list(scalars.values()) for _, scalars in rows], dtype=np.float64).astype("<f4")
        fill[:, 8 + step_bytes :] = values.view(np.uint8).reshape(count, -1)

        records = np.tile(self._record, (count, 1))
        records[:, self._holes] = fill
        crc = self._base ^ np.bitwise_xor.reduce(self._terms.take(fill + self._term_rows), axis=1)
        masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)  # tensorflow's own twist
        records[:, -4:] = masked.astype("<u4").view(np.uint8).reshape(count, 4)
        return records.tobytes()


def _crc_table() -> npt.NDArray[np.uint32]:
    """CRC-32C (Castagnoli) of each byte, reflected polynomial 0x82F63B78."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


def _crc32c(data: Iterable[int]) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = int(_CRC_TABLE[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF
