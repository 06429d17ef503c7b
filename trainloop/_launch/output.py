"""The output of ranks: mark the lines of ranks other than 0, and send what ranks print and log to the caller.

Ranks write to descriptors 1 and 2 themselves, and have handlers of their own for these streams; each line that a rank
other than global rank 0 writes to stderr begins with the rank. What only exists in the caller's process is reached by
messages over a pipe: a stream object that the script has put into ``sys.stdout``, and all other handlers (files, the
handlers of pytest and of other libraries). All ranks of a host, and the workers that they have forked, write to one
pipe; messages are divided into chunks that the system writes as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import select
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainloop._launch.script.settings import loggers, standard_stream_of
from trainloop._support.output import GuardedStream, unguarded
from trainloop._support.user_line import warn
from trainloop.distributed import Rank

logger = logging.getLogger("trainloop")

_HEADER = struct.Struct("=IIBH")  # process, number of the message, 1 for its last chunk, bytes
_CHUNK = getattr(select, "PIPE_BUF", 512)
_MOST_READS = 256  # per call, so that endless output does not keep the caller from watching its ranks


@dataclass(frozen=True)
class Targets:
    """What the ranks send to the caller."""

    streams: dict[str, tuple[bool, str]] = field(default_factory=dict)
    """Names of the streams that are objects of the caller's process, with ``isatty()`` and encoding."""
    loggers: dict[str, int] = field(default_factory=dict)
    """Names of the loggers with handlers that exist in the caller only, with the lowest level of these handlers."""


def targets_here() -> Targets:
    """Return the targets of this process, as they are now."""
    if sys.platform == "win32":  # descriptors of pipes can't be sent to ranks
        return Targets()
    streams = {}
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is not None and not _is_descriptor(stream, name, number):
            isatty = False
            with contextlib.suppress(Exception):  # an object that has only ``write``
                isatty = bool(stream.isatty())
            streams[name] = (isatty, getattr(stream, "encoding", None) or "utf-8")
    levels = {name: [handler.level for handler in _own_handlers(log)] for name, log in loggers().items()}
    return Targets(streams, {name: min(found) for name, found in levels.items() if found})


def _is_descriptor(stream: Any, name: str, number: int) -> bool:
    stream = unguarded(stream)
    if stream is getattr(sys, f"__{name}__"):
        return True
    try:  # by type: an object that passes unknown attributes on, such as a Tee, may pass __class__ on, too
        return issubclass(type(stream), io.TextIOWrapper) and os.path.sameopenfile(stream.fileno(), number)
    except (OSError, ValueError):
        return False


def _own_handlers(log: logging.Logger) -> list[logging.Handler]:
    """Return a logger's handlers that ranks do not have."""
    return [
        handler
        for handler in log.handlers
        if standard_stream_of(handler) is None and type(handler) is not logging.NullHandler
    ]


# --------------------------------------------------------------------------------------------------------------------
# In a rank: what is sent to the caller
# --------------------------------------------------------------------------------------------------------------------


class Sender:
    """Sends messages to the caller, from any thread, and from processes that a rank has forked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may send while a message is being sent
        self._number = 0

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; without effect if the caller has ended."""
        data = pickle.dumps(message)
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        with self._lock:
            self._number += 1
            number, size = self._number, _CHUNK - _HEADER.size
            for begin in range(0, len(data), size):
                part = data[begin : begin + size]
                chunk = _HEADER.pack(self._pid, number, begin + size >= len(data), len(part)) + part
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._fd, chunk)


class ForwardedStream(io.TextIOBase):
    """A stream whose text is written to the caller's stream of this name, line by line."""

    encoding = ""

    def __init__(self, sender: Sender, name: str, real: Any, isatty: bool, encoding: str) -> None:
        self._sender, self._name, self._real = sender, name, real
        self._isatty, self.encoding = isatty, encoding
        self._text, self._pid = "", os.getpid()
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._pid != os.getpid():  # in a fork, text of the parent would be written twice
            self._pid, self._lock, self._text = os.getpid(), threading.RLock(), ""
        with self._lock:
            self._text += text
            if "\n" in text or len(self._text) > _CHUNK:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._text = self._text, ""
        if text and self._pid == os.getpid():
            self._sender.send((self._name, text))

    def fileno(self) -> int:
        number: int = self._real.fileno()  # for programs that the rank starts
        return number

    def isatty(self) -> bool:
        return self._isatty

    def writable(self) -> bool:
        return True


class HandlerOfRank(logging.Handler):
    """Base of handlers that exist because the process is a rank, and that show nothing themselves."""


class _SendingHandler(HandlerOfRank):
    def __init__(self, sender: Sender, name: str, me: Rank, level: int) -> None:
        super().__init__(level)
        self._sender, self._logger, self._me = sender, name, me

    def emit(self, record: logging.LogRecord) -> None:
        # A module that this rank has imported may have added the handler that the caller has, such as one of a file.
        others = [one for one in logging.getLogger(self._logger or None).handlers if not isinstance(one, HandlerOfRank)]
        if any(standard_stream_of(one) is None and type(one) is not logging.NullHandler for one in others):
            return
        try:
            self._sender.send(("log", self._logger, _picklable_record(record, self._me)))
        except Exception:
            self.handleError(record)


def _picklable_record(record: logging.LogRecord, me: Rank) -> dict[str, Any]:
    """Return a record's attributes, which can be pickled: with its message, and the traceback as text."""
    plain = copy.copy(record)
    message = record.getMessage()
    plain.msg = plain.message = message if me.rank == 0 else f"[rank {me.rank}] {message}"
    plain.args = None
    if record.exc_info and record.exc_info[0] is not None:
        plain.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    plain.exc_info = None
    attributes = {**vars(plain), "rank": getattr(record, "rank", me.rank)}
    for name, value in attributes.items():
        try:
            pickle.dumps(value)
        except Exception:  # passed by ``extra``
            attributes[name] = str(value)
    return attributes


# --------------------------------------------------------------------------------------------------------------------
# In the caller
# --------------------------------------------------------------------------------------------------------------------


class Outlets:
    """The caller's end of the pipe.

    Attributes
    ----------
    sending_fd : int
        Descriptor to which ranks write; -1 on systems where descriptors can't be sent.
    """

    def __init__(self) -> None:
        self.sending_fd = self._fd = -1
        self._waiting = b""
        self._parts: dict[tuple[int, int], list[bytes]] = {}
        self._failed: set[str] = set()
        if sys.platform != "win32":
            self._fd, self.sending_fd = os.pipe()
            os.set_blocking(self._fd, False)

    @property
    def readable(self) -> list[int]:
        """The descriptor that becomes readable when a message arrives; empty if there is none."""
        return [self._fd] if self._fd >= 0 else []

    def pass_on(self) -> None:
        """Pass the messages that have arrived to the streams and handlers of this process."""
        for _ in range(_MOST_READS if self._fd >= 0 else 0):
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self._waiting += data
            while len(self._waiting) >= _HEADER.size:
                process, number, last, size = _HEADER.unpack_from(self._waiting)
                end = _HEADER.size + size
                if len(self._waiting) < end:
                    break
                self._parts.setdefault((process, number), []).append(self._waiting[_HEADER.size : end])
                self._waiting = self._waiting[end:]
                if last:
                    self._pass_one(*pickle.loads(b"".join(self._parts.pop((process, number)))))

    def _pass_one(self, kind: str, *message: Any) -> None:
        try:
            if kind == "log":
                _handle(*message)
            else:
                stream = getattr(sys, kind)
                if stream is not None:
                    stream.write(message[0])
                    stream.flush()
        except Exception as error:  # whatever a stream or handler of the user raises; an output can't end the training
            if kind not in self._failed:
                self._failed.add(kind)
                what = "a log handler" if kind == "log" else f"sys.{kind}"
                warn(f"{what} of this process failed with output of the ranks ({type(error).__name__}: {error}).")

    def close(self) -> None:
        """Close the pipe. The ranks must have ended."""
        if self._fd >= 0:
            self.pass_on()
            os.close(self._fd)
            os.close(self.sending_fd)
            self._fd = self.sending_fd = -1


def _handle(name: str, attributes: dict[str, Any]) -> None:
    """Give a rank's record to the handlers that only this process has, of the logger at which the rank took it."""
    record = logging.makeLogRecord(attributes)
    if not logging.getLogger(record.name if record.name != "root" else None).filter(record):
        return
    for handler in _own_handlers(logging.getLogger(name or None)):
        if record.levelno >= handler.level:
            handler.handle(record)


# --------------------------------------------------------------------------------------------------------------------
# Marked lines of a rank
# --------------------------------------------------------------------------------------------------------------------


class _Prefixed(GuardedStream):
    """Write whole lines, each with a prefix."""

    def __init__(self, stream: Any, name: str, prefix: str) -> None:
        super().__init__(stream, name)
        self._prefix = prefix
        self._line = ""
        self._lock = threading.RLock()  # the warning about a stream that fails is written to this one

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            if lines:
                # One write for all lines, so that the output of two ranks does not mix within a line.
                super().write("".join(f"{self._prefix}{line}\n" for line in lines))
                self.flush()
        return len(text)

    def isatty(self) -> bool:
        return False

    def finish(self) -> None:
        """Write the last line if it does not end with a newline."""
        if self._line:
            self.write("\n")


class _Swallowed(GuardedStream):
    """Drop all text, and report the first line. Other attributes are those of the stream, as on rank 0."""

    def __init__(self, stream: Any, name: str, report: Report) -> None:
        super().__init__(stream, name)
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

    def isatty(self) -> bool:
        return False


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
    for log in loggers().values():
        # Not subclasses: a FileHandler writes to a file that the user has chosen.
        shown = [handler for handler in log.handlers if type(handler) is logging.StreamHandler]
        level = min((handler.level for handler in shown), default=logging.WARNING)
        for handler in shown:
            handler.setLevel(max(handler.level, least_level(me)))
        if level < logging.WARNING:
            log.addHandler(_SwallowedRecords(level, report))


@contextlib.contextmanager
def rank_handlers(sender: Sender | None, targets: Targets, me: Rank, report: Report) -> Iterator[None]:
    """Send records to the caller's own handlers, from :func:`least_level` on; report the first record below it."""
    added: list[tuple[logging.Logger, logging.Handler]] = []
    for name, level in targets.loggers.items():
        log = logging.getLogger(name or None)
        if sender is not None:
            added.append((log, _SendingHandler(sender, name, me, max(level, least_level(me)))))
        if least_level(me) != logging.NOTSET:
            added.append((log, _SwallowedRecords(level, report)))
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
def rank_streams(me: Rank, sender: Sender | None, targets: Targets, report: Report) -> Iterator[None]:
    """Leave global rank 0's output unchanged; prefix other ranks' stderr, and hide their stdout by default.

    Streams that are objects of the caller's process get the output through ``sender``. Output that can't be written
    does not end the rank's work. The first line that is hidden is passed to ``report``.
    """
    before = sys.stdout, sys.stderr
    own = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    if sender is not None:
        own.update((name, ForwardedStream(sender, name, own[name], *facts)) for name, facts in targets.streams.items())
    streams: list[Any] = []
    for name, stream in own.items():
        if stream is None:
            continue
        if me.rank == 0:
            streams.append(GuardedStream(stream, name))
        elif name == "stderr" or _all_output_shown():
            streams.append(_Prefixed(stream, name, f"[rank {me.rank}] "))
        else:
            streams.append(_Swallowed(stream, name, report))
        setattr(sys, name, streams[-1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            if isinstance(stream, _Prefixed):
                stream.finish()
            stream.flush()
