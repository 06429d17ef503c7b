"""The warnings that a call gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def warnings_of(run: Callable[[], Any], about: str = "") -> list[str]:
    """Texts of all warnings of a call, or of those that contain a text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [text for one in caught if about in (text := str(one.message))]
