"""Write TensorBoard's event files: one file for each call of fit, and all files of a run's folder as one log."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SUFFIX", "EventFile", "EventLog"]

SUFFIX = ".trainloop"
"""Suffix of event files from trainloop. It distinguishes them from files of other writers."""


class EventFile:
    """An event file with tensorboard's records.

    It replaces tensorboard's ``EventFileWriter``, which opens the file again for each record and writes in a thread.
    If the disk is full, that thread prints a traceback. The names of files created in the same second may also be in
    the wrong order.

    Parameters
    ----------
    log_dir : str
        Folder of the file, created if it is missing. If it is a URL, such as ``s3://...``, tensorboard's own file
        system layer writes the file.

    Attributes
    ----------
    path : str
        Path of the file. TensorBoard reads a folder's files in the order of their names, so names are in the order of
        creation, even within one second.
    continues : bool
        True if the folder already had files of this class. Always False for URLs.
    """

    def __init__(self, log_dir: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        remote = "://" in log_dir
        earlier = [] if remote else sorted(Path(log_dir).glob(f"events.out.tfevents.*{SUFFIX}"))
        self.continues = bool(earlier)
        begun = int(time.time())
        if earlier:
            begun = max(begun, int(earlier[-1].name.split(".")[3]) + 1)
        owner = f"{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self.path = os.path.join(log_dir, f"events.out.tfevents.{begun:010d}.{owner}{SUFFIX}")
        if remote:
            from tensorboard.compat import tf

            tf.io.gfile.makedirs(log_dir)
            self._file: Any = tf.io.gfile.GFile(self.path, "wb")
        else:
            os.makedirs(log_dir, exist_ok=True)
            self._file = open(self.path, "xb")  # noqa: SIM115  # stays open until close()
        self._records = RecordWriter(self._file)
        self._last_wall_time = time.time()
        self.write(file_version="brain.Event:2")

    def write(self, **fields: Any) -> None:
        """Write an ``Event`` with these fields, such as a step and a summary."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def write_scalars(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Write one event for each row (a step and its scalars), and flush.

        The time of each step is not known. Wall times are spread evenly over the time since the previous call.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        rows = [row for row in rows if row[1]]
        begun, self._last_wall_time = self._last_wall_time, time.time()
        for i, (step, scalars) in enumerate(rows, 1):
            event = Event(wall_time=begun + (self._last_wall_time - begun) * i / len(rows), step=step)
            for name, value in scalars.items():
                event.summary.value.add(tag=name, simple_value=value)
            self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


_files = itertools.count()  # counts the files of this process, so that names are unique


class EventLog:
    """The event files of one folder. Values of repeated steps replace the earlier ones.

    Attributes
    ----------
    file : EventFile or None
        The open file.
    newest : tuple of int and dict
        Step and all scalars that were written last.
    """

    def __init__(self) -> None:
        self.file: EventFile | None = None
        self.newest: tuple[int, dict[str, float]] = (0, {})
        self._last_step: int | None = None  # newest step in the folder; None if others may have written there
        self._first_step: int | None = None  # first step of this run

    def begin_run(self) -> None:
        """Begin a run, whose first step is not known yet."""
        self._first_step = None

    def note_step(self, step: int) -> None:
        """Note a step, which may be the first one of the run."""
        if self._first_step is None:
            self._first_step = step

    def first_step(self, now: int) -> int:
        """Return the run's first step; ``now`` if none has begun."""
        return now if self._first_step is None else self._first_step

    def open_at(self, log_dir: str, now: int) -> EventFile:
        """Return the open file; create it if there is none.

        Readers discard the values of earlier files from the run's first step on, unless this object wrote all of them.
        """
        if self.file is None:
            first = self.first_step(now)
            self.file = EventFile(log_dir)
            if self.file.continues and (self._last_step is None or first <= self._last_step):
                from tensorboard.compat.proto.event_pb2 import SessionLog

                # As in SummaryWriter(purge_step=first).
                self.file.write(step=first, session_log=SessionLog(status=SessionLog.START))
                if self.newest[0] == first:  # these steps were written before the checkpoint, and are now discarded
                    self.file.write_scalars([self.newest])
        return self.file

    def write_scalars(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Write rows of a step and its scalars into the open file."""
        assert self.file is not None
        self.file.write_scalars(rows)
        for step, scalars in rows:
            newest, before = self.newest
            if step >= newest:
                self.newest = step, {**(before if step == newest else {}), **scalars}

    def note(self, step: int) -> None:
        """Note that all values up to a step are in the folder."""
        self._last_step = max(step, self._last_step or 0)

    def distrust(self) -> None:
        """Note that another process may have written later values into the folder."""
        self._last_step = None

    def close(self) -> None:
        """Close the file if it is open."""
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}
