"""Values that exist for the length of a ``with`` block, in the thread that entered it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["PerThread"]

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """Value of each thread's innermost block; none in a forked child, which must not use its parent's processes."""

    _value: T | None = None
    _pid = 0

    def get(self) -> T | None:
        """Return this thread's value; None outside of a block."""
        return self._value if self._pid == os.getpid() else None

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Set ``value`` for a block; then restore the value of the block around it."""
        before = self.get()
        self._value, self._pid = value, os.getpid()
        try:
            yield
        finally:
            self._value = before
