"""Explain errors of unpickling, where a copy of a user's object can't be made: whose code raised it, and the remedy."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle

__all__ = ["explained_rebuilding"]


@contextmanager
def explained_rebuilding() -> Iterator[None]:
    """Add to an error of unpickling the method that raised it, and the remedy.

    An object may be pickled without an error, and yet fail when a copy of it is made from the pickle.
    """
    try:
        yield
    except ImportError:  # names the module
        raise
    except Exception as error:
        explanation = _explanation(error)
        if explanation is not None:
            # Python 3.10 has no add_note.
            error.args = (f"{error}. {explanation}",)
        raise


def _explanation(error: Exception) -> str | None:
    """Describe the first code of the user in the error's traceback; ``None`` if it is a module that is imported."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith("<frozen importlib"):
            return None
        if not path.startswith(_NOT_THE_USERS):
            name = frame.f_code.co_name
            # The first argument may be called other than self, and its repr() may raise the same error.
            owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
            method = f"{type(owner).__qualname__}.{name}" if hasattr(type(owner), name) else name
            advice = _ADVICE_OF_GETATTR if name == "__getattr__" else ""
            return f"{method} raised this ({path}, line {line}). {_REBUILT}{advice}"
    return _REBUILT


def _folder(path: str) -> str:
    return os.path.dirname(os.path.abspath(path)) + os.sep


_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(_folder(__file__))) + os.sep,
    _folder(cloudpickle.__file__),
    contextmanager.__code__.co_filename,
)
_REBUILT = (
    "An object that is sent from one process to another is rebuilt there from a pickle, and this object can't be "
    "rebuilt: pickle.loads(pickle.dumps(obj)) fails in the same way."
)
_ADVICE_OF_GETATTR = (
    " Pickle asks an object that has no attributes yet for __setstate__. So begin its __getattr__ with `if "
    "name.startswith('__'): raise AttributeError(name)`."
)
