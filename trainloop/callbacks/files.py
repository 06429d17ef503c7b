"""Files that callbacks write: check their places before training, and warn if one can't be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainloop._support.user_line import warn
from trainloop.checkpoint.storage import why_not_writable
from trainloop.errors import ConfigurationError

__all__ = ["check_figure_file", "save_figure", "warning_if_not_written"]


def check_figure_file(owner: str, path: str) -> None:
    """Raise an error if a figure can't be saved at ``path``. Matplotlib must be installed."""
    from matplotlib.backend_bases import FigureCanvasBase

    ending = os.path.splitext(path)[1][1:].lower()
    known = FigureCanvasBase.get_supported_filetypes()
    if ending and ending not in known:
        raise ConfigurationError(
            f"{owner}: path={path!r}: matplotlib has no format {ending!r}. Use one of {', '.join(sorted(known))}."
        )
    why = f"{path} is a folder" if os.path.isdir(path) else why_not_writable(os.path.dirname(path))
    if why:
        raise ConfigurationError(f"{owner}: path={path!r} can't be written to: {why}. Choose another path.")


def save_figure(owner: str, figure: Any, path: str) -> None:
    """Save a figure. If this fails, as on a full disk, only warn."""
    with warning_if_not_written(owner, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        figure.savefig(path, dpi=150)


@contextmanager
def warning_if_not_written(owner: str, path: str) -> Iterator[None]:
    """Return a context in which an ``OSError`` is only a warning."""
    try:
        yield
    except OSError as error:
        warn(
            f"{owner}: {path} could not be written ({error}). Training continues. Free space, or choose another path.",
            RuntimeWarning,
        )
