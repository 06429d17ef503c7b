"""Output on stdout and stderr: if it can't be written, training continues; recognise notebooks and progress bars."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from trainloop._support.user_line import warn

_NAMES = ("stdout", "stderr")


class GuardedStream:
    """A stream whose ``write`` and ``flush`` never raise an ``OSError``; the first one is reported by a warning.

    Each call tries again, since a disk may have space later. All other attributes are those of the stream.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._guarded, self._guarded_name = stream, name
        self._failed = False

    def write(self, text: str) -> int:
        """Write text; return the number of its characters."""
        try:
            written: int = self._guarded.write(text)
            return written
        except OSError as error:
            self._warn_once(error)
        except ValueError as error:  # it was closed
            if not getattr(self._guarded, "closed", False):
                raise
            self._warn_once(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write a list of lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._guarded.flush()
        except OSError as error:
            self._warn_once(error)
        except ValueError:
            # A closed stream has been flushed. (Python's logging flushes its handlers when the interpreter ends.)
            if not getattr(self._guarded, "closed", False):
                raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_guarded"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._guarded, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._guarded)

    def _warn_once(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        with contextlib.suppress(Exception):  # warnings may be errors, and stderr may be closed, too
            warn(
                f"sys.{self._guarded_name} can't be written to ({type(error).__name__}: {error}): its reader has "
                "ended, or its disk is full. Training continues, and tries again at each output.",
                RuntimeWarning,
            )


_lock = threading.Lock()
_users = 0
_guards: dict[str, GuardedStream] = {}


def unguarded(stream: Any) -> Any:
    """Return the stream within a :class:`GuardedStream`, and any other object unchanged."""
    # By type: an object that passes unknown attributes on, such as a Tee, may pass __class__ on, too.
    return stream._guarded if type(stream) is GuardedStream else stream


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Guard ``sys.stdout`` and ``sys.stderr`` in this context; several threads may be in it."""
    global _users
    with _lock:
        _users += 1
        for name in _NAMES if _users == 1 else ():
            stream = getattr(sys, name)
            if stream is not None:
                _guards[name] = GuardedStream(stream, name)
                setattr(sys, name, _guards[name])
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            for name in _NAMES if _users == 0 else ():
                guard = _guards.pop(name, None)
                if guard is not None and getattr(sys, name) is guard:  # else the user has replaced it meanwhile
                    setattr(sys, name, guard._guarded)


# -- progress bars -----------------------------------------------------------------------------------------------------


_WIDTH_UNKNOWN, _HEIGHT_UNKNOWN = 80, 24


def has_screen() -> bool:
    """Return True if stderr is a terminal or a notebook."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Return True if this process is a notebook's kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def bar_size() -> dict[str, Any]:
    """Return tqdm's arguments for the size of a bar: the terminal's size, or a default if the terminal reports none.

    Terminals of many containers report 0 columns and rows, with which tqdm would draw nothing.
    """
    try:
        columns = None if in_notebook() else os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or an object that imitates one
        columns = None
    if columns != 0:
        return {"dynamic_ncols": True}
    given = os.environ.get("COLUMNS", "")
    return {"ncols": int(given) if given.isdigit() and int(given) else _WIDTH_UNKNOWN, "nrows": _HEIGHT_UNKNOWN}
