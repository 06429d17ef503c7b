"""Find out if a progress bar on stderr is visible, and how wide it may be."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["bar_size", "has_screen", "in_notebook"]

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
