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

from trainloop.distributed import Rank

__all__ = ["quieten_log_streams", "rank_streams"]


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


def quieten_log_streams(me: Rank) -> None:
    """On all ranks except global rank 0, let log handlers of the standard streams show only warnings and errors."""
    if me.rank == 0 or _all_output_shown():
        return
    for log in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(log, "handlers", ()):
            # Not subclasses: a FileHandler writes to a file that the user has chosen.
            if type(handler) is logging.StreamHandler:
                handler.setLevel(max(handler.level, logging.WARNING))


def _all_output_shown() -> bool:
    return os.environ.get("TRAINLOOP_ALL_RANKS_OUTPUT", "0") not in ("", "0")


@contextlib.contextmanager
def rank_streams(me: Rank) -> Iterator[None]:
    """Leave global rank 0's output unchanged; prefix other ranks' stderr, and hide their stdout by default."""
    if me.rank == 0:
        yield
        return
    stdout, stderr = sys.stdout, sys.stderr
    prefix = f"[rank {me.rank}] "
    errors = _Prefixed(stderr, prefix)
    sys.stderr = errors
    with open(os.devnull, "w") as nowhere:
        shown = _all_output_shown()
        output: Any = _Prefixed(stdout, prefix) if shown else nowhere
        sys.stdout = output
        try:
            yield
        finally:
            sys.stdout, sys.stderr = stdout, stderr
            errors.finish()
            if shown:
                output.finish()
