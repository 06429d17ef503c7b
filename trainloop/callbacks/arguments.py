"""Check the arguments of callbacks; each error names the callback, the argument and its value."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from typing import Any

from trainloop._support.platform import absolute_path
from trainloop.devices import is_bool, whole_number
from trainloop.errors import ConfigurationError

__all__ = ["check_counts", "check_flags", "choice_of", "count_of", "dict_of", "number_of", "path_of", "texts_of"]


def count_of(owner: str, name: str, value: Any, least: int = 1, *, optional: bool = False) -> Any:
    """Return an argument if it is a valid number of steps, epochs or similar. Otherwise raise ConfigurationError."""
    number = whole_number(value)
    if not (optional and value is None) and (number is None or number < least):
        also = ", or None" if optional else ""
        raise ConfigurationError(f"{owner}: {name}={value!r}: must be an int of {least} or more{also}.")
    return number


def check_counts(callback: Any, *names: str, least: int = 1, optional: bool = False) -> None:
    """Check attributes of a callback with :func:`count_of`."""
    for name in names:
        value = count_of(type(callback).__name__, name, getattr(callback, name), least, optional=optional)
        setattr(callback, name, value)


def choice_of(owner: str, name: str, value: Any, *known: str) -> Any:
    """Return an argument if it is one of the known words. Otherwise raise ConfigurationError."""
    if not isinstance(value, str) or value not in known:
        words = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ConfigurationError(f"{owner}: {name}={value!r}: must be {words}.")
    return value


def check_flags(owner: str, **flags: Any) -> None:
    """Raise ConfigurationError unless all arguments are True or False, rather than just truthy."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{owner}: {name}={value!r}: must be True or False.")


def number_of(
    owner: str,
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    optional: bool = False,
    nan: bool = False,
    finite: bool = False,
) -> Any:
    """Return an argument if it is a number within the limits, a NaN if ``nan``, or None if it is ``optional``.

    Numbers of other classes, such as numpy's, are converted to an int or a float.
    """
    if value is None and optional:
        return None
    # A tensor with one element is a number, too; each library has its own numbers.
    one = not isinstance(value, (str, bytes)) and not is_bool(value) and getattr(value, "shape", ()) == ()
    try:
        number = float(value) if one else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is not None and math.isnan(number) and nan:
        return value
    limits = [
        (above, "above {}", operator.gt),
        (least, "of {} or more", operator.ge),
        (most, "of {} or less", operator.le),
    ]
    outside = number is not None and not all(limit is None or ok(number, limit) for limit, _, ok in limits)
    endless = finite and number is not None and math.isinf(number)
    if number is None or math.isnan(number) or outside or endless:
        shown = " and ".join(text.format(limit) for limit, text, _ in limits if limit is not None)
        kind = f"must be a {'finite ' * endless}number {shown}".rstrip() + ", or None" * optional
        raise ConfigurationError(f"{owner}: {name}={value!r}: {kind}.")
    if type(value) in (int, float):
        return value
    return number if (whole := whole_number(value)) is None else whole


def path_of(owner: str, name: str, value: Any, *, optional: bool = False) -> str | None:
    """Return an argument as an absolute path, with ``~`` expanded, or as a URL; None if it is ``optional``."""
    if value is None and optional:
        return None
    if not isinstance(value, (str, os.PathLike)) or value == "" or "\0" in str(value):
        raise ConfigurationError(f"{owner}: {name}={value!r}: must be a path{', or None' * optional}.")
    return absolute_path(value)


def texts_of(owner: str, name: str, value: Any) -> list[str]:
    """Return an argument as a list of texts; a single text is a list of one, and other items are converted."""
    if isinstance(value, str):
        return [value]
    try:
        if isinstance(value, (bytes, Mapping)):
            raise TypeError
        return [str(item) for item in value]
    except TypeError:
        raise ConfigurationError(f"{owner}: {name}={value!r}: must be a list of texts.") from None


def dict_of(owner: str, name: str, value: Any) -> dict[str, Any] | None:
    """Return an argument as a dict, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigurationError(f"{owner}: {name}={value!r}: must be a dict, or None.")
    return None if value is None else dict(value)
