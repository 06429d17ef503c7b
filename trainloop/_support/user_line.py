"""Issue warnings at the user's line: the innermost line outside of this package and torch."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

_PYTHON = os.path.dirname(contextlib.__file__)
_BETWEEN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # this package
    *(os.path.join(_PYTHON, name) for name in ("contextlib.py", "threading.py", "multiprocessing" + os.sep)),
    "<frozen ",
    "<string>",  # python -c, which starts processes
)


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int
    module: str
    """Name of the line's module, which warning filters may match."""


_caller: Place | None = None  # in a process that this package has started: the user's line in the calling process
_shown: dict[Any, Any] = {}  # warnings already shown at that line, as in a module's __warningregistry__


def set_user_place(caller: Place) -> None:
    """Make warnings point to the caller's line, in a process that this package has started."""
    global _caller
    _caller = caller


def user_place() -> Place:
    """Return the user's line; if this process's stack has none, return the line in the caller's process."""
    return _find_user_line()[0]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn like ``warnings.warn``, but at the user's line, however many calls and decorators are in between."""
    place, registry = _find_user_line()
    warnings.warn_explicit(message, category, place.file, place.line, module=place.module, registry=registry)


def warn_or_print(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn; if warnings are errors, print instead, so that a warning cannot end the training, on one rank alone."""
    try:
        warn(message, category)
    except Warning:
        print(message, file=sys.stderr, flush=True)


def described_names(names: Sequence[str]) -> str:
    """Return a string with the first five names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _find_user_line() -> tuple[Place, dict[Any, Any]]:
    torch = sys.modules.get("torch")
    between = _BETWEEN if torch is None else (*_BETWEEN, os.path.dirname(torch.__file__ or "") + os.sep)
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_filename.startswith(between):
        if frame.f_back is None:
            if _caller is not None:
                return _caller, _shown
            break
        frame = frame.f_back
    place = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>"))
    return place, frame.f_globals.setdefault("__warningregistry__", {})
