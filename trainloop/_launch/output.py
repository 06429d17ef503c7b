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

from trainloop._launch.forwarding import ForwardedStream, HandlerOfRank, Sender, Targets
from trainloop._support.output import GuardedStream
from trainloop.distributed import Rank

__all__ = ["Report", "least_level", "quieten_log_streams", "rank_streams", "reported_records"]

logger = logging.getLogger("trainloop")


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


class _Swallowed(io.TextIOBase):
    """Drop all text, and report the first line."""

    def __init__(self, report: Report) -> None:
        self._report: Report | None = report
        self._line = ""

    def write(self, text: str) -> int:
        if self._report is not None:
            self._line += text
            line, newline, _ = self._line.lstrip("\n").partition("\n")
            if newline or len(line) > 1000:
                report, self._report, self._line = self._report, None, ""
                report(f"printed a line that is not shown ({_short(line)}), because only rank 0 writes to stdout")
        return len(text)

    def writable(self) -> bool:
        return True


class _SwallowedRecords(HandlerOfRank):
    """Report the first record that another handler of this logger would show on rank 0, but not on this rank."""

    def __init__(self, level: int, report: Report) -> None:
        super().__init__(level)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.partition(".")[0] not in ("trainloop", "torch"):
            what = f"logged a record of level {record.levelname} that is not shown ({_short(record.getMessage())})"
            self._report(f"{what}, because ranks other than 0 show only warnings and errors")


class Report:
    """Say once, for all ranks of a host, that output is not shown.

    Parameters
    ----------
    claims : str
        Path of a file; the rank that creates it is the one that reports.
    """

    def __init__(self, claims: str) -> None:
        self._claims = claims
        self._done = False

    def __call__(self, what: str) -> None:
        if self._done:
            return
        self._done = True  # first, because the log record below may be printed
        try:
            os.close(os.open(self._claims, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError:  # another rank has reported
            return
        logger.warning(
            f"This rank {what}. To see the output of all ranks, set TRAINLOOP_ALL_RANKS_OUTPUT=1 in the "
            "environment, or print to sys.stderr. Further output that is not shown will not be reported."
        )


def _short(line: str) -> str:
    line = line.splitlines()[0] if line else line
    return repr(line if len(line) <= 80 else f"{line[:77]}...")


def least_level(me: Rank) -> int:
    """Return the lowest level of records that a rank shows: on all ranks except global rank 0, warnings and errors."""
    return logging.NOTSET if me.rank == 0 or _all_output_shown() else logging.WARNING


def quieten_log_streams(me: Rank, report: Report) -> None:
    """Let log handlers of the standard streams show only records from :func:`least_level` on; report the others."""
    if least_level(me) == logging.NOTSET:
        return
    for log in (logging.root, *logging.root.manager.loggerDict.values()):
        # Not subclasses: a FileHandler writes to a file that the user has chosen.
        shown = [handler for handler in getattr(log, "handlers", ()) if type(handler) is logging.StreamHandler]
        level = min((handler.level for handler in shown), default=logging.WARNING)
        for handler in shown:
            handler.setLevel(max(handler.level, least_level(me)))
        if isinstance(log, logging.Logger) and level < logging.WARNING:
            log.addHandler(_SwallowedRecords(level, report))


@contextlib.contextmanager
def reported_records(me: Rank, targets: Targets, report: Report) -> Iterator[None]:
    """Report the first record that the caller's own handlers would get from rank 0, but do not get from this rank."""
    added = []
    for name, level in targets.loggers.items() if least_level(me) != logging.NOTSET else ():
        added.append((logging.getLogger(name or None), _SwallowedRecords(level, report)))
    for log, handler in added:
        log.addHandler(handler)
    try:
        yield
    finally:
        for log, handler in added:
            log.removeHandler(handler)


def _all_output_shown() -> bool:
    return os.environ.get("TRAINLOOP_ALL_RANKS_OUTPUT", "0") not in ("", "0")


@contextlib.contextmanager
def rank_streams(
    me: Rank, sender: Sender | None = None, targets: Targets | None = None, report: Report | None = None
) -> Iterator[None]:
    """Leave global rank 0's output unchanged; prefix other ranks' stderr, and hide their stdout by default.

    Streams that are objects of the caller's process get the output through ``sender``. Output that can't be written
    does not end the rank's work. The first line that is hidden is passed to ``report``.
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
                shown = nowhere if report is None else _Swallowed(report)
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
