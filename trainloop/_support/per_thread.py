"""What is there for as long as a ``with`` block, for the thread that entered it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["PerThread"]

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """The value of each thread's innermost block; none in a forked child, which may not use its parent's processes."""

    _value: T | None = None
    _pid = 0

    def get(self) -> T | None:
        """This thread's value, if it is in a block."""
        return self._value if self._pid == os.getpid() else None

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """A block with ``value``; after it the value of the block around it is back."""
        before = self.get()
        self._value, self._pid = value, os.getpid()
        try:
            yield
        finally:
            self._value = before
