"""Mark the output of ranks: each line that a rank other than global rank 0 writes to stderr begins with the rank."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from trainloop._launch.forwarding import ForwardedStream, Sender, Targets
from trainloop._support.output import GuardedStream
from trainloop.distributed import Rank

__all__ = ["least_level", "quieten_log_streams", "rank_streams"]


class _Prefixed(io.TextIOBase):
    """Write whole lines to another stream, each with a prefix."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._line = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            if lines:
                # One write for all lines, so that the output of two ranks does not mix within a line.
                self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Write the last line if it does not end with a newline."""
        if self._line:
            self.write("\n")

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


def least_level(me: Rank) -> int:
    """Return the lowest level of records that a rank shows: on all ranks except global rank 0, warnings and errors."""
    return logging.NOTSET if me.rank == 0 or _all_output_shown() else logging.WARNING


def quieten_log_streams(me: Rank) -> None:
    """Let log handlers of the standard streams show only records from :func:`least_level` on."""
    if least_level(me) == logging.NOTSET:
        return
    for log in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(log, "handlers", ()):
            # Not subclasses: a FileHandler writes to a file that the user has chosen.
            if type(handler) is logging.StreamHandler:
                handler.setLevel(max(handler.level, least_level(me)))


def _all_output_shown() -> bool:
    return os.environ.get("TRAINLOOP_ALL_RANKS_OUTPUT", "0") not in ("", "0")


@contextlib.contextmanager
def rank_streams(me: Rank, sender: Sender | None = None, targets: Targets | None = None) -> Iterator[None]:
    """Leave global rank 0's output unchanged; prefix other ranks' stderr, and hide their stdout by default.

    Streams that are objects of the caller's process get the output through ``sender``. Output that can't be written
    does not end the rank's work.
    """
    before = sys.stdout, sys.stderr
    own = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    if sender is not None and targets is not None:
        own.update((name, ForwardedStream(sender, name, own[name], *facts)) for name, facts in targets.streams.items())
    streams = {name: GuardedStream(stream, name) for name, stream in own.items() if stream is not None}
    prefixed = []
    with open(os.devnull, "w") as nowhere:
        for name, stream in streams.items():
            shown: Any = stream
            if me.rank != 0:
                shown = nowhere
                if name == "stderr" or _all_output_shown():
                    shown = _Prefixed(stream, f"[rank {me.rank}] ")  # type: ignore[arg-type]  # it has what is used
                    prefixed.append(shown)
            setattr(sys, name, shown)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for shown in prefixed:
                shown.finish()
            for stream in streams.values():
                stream.flush()
