"""Keep ranks alive after the call that started them, to do the work of the next calls.

::

    with keeping():                 # TrainLoop.ranks()
        launch(first, ...)          # starts ranks
        launch(second, ...)         # the same processes: their group, their GPUs' memory, what they have imported
    # here the ranks end
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainloop._launch.spawning import Ranks

__all__ = ["KeptRanks", "keeping", "kept_here"]


class KeptRanks:
    """The running ranks of one block, if any."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._terms: object = None
        self._undo = contextlib.ExitStack()

    def resume(self, terms: object, undo: contextlib.ExitStack) -> Ranks | None:
        """Return the ranks, reset for new work and ended by ``undo``; end them if settings differ or one has ended."""
        if self._ranks is not None and (self._terms != terms or not self._ranks.are_up()):
            self.close()
        if self._ranks is not None:
            undo.callback(self.close)
            self._ranks.reset()
        return self._ranks

    def keep(self, ranks: Ranks, terms: object, undo: contextlib.ExitStack) -> None:
        """Keep these ranks, whose work has succeeded; ``undo`` then runs when they end."""
        ending = undo.pop_all()
        if ranks is not self._ranks:  # otherwise ``undo`` has only this object's close()
            self._ranks, self._terms, self._undo = ranks, terms, ending

    def close(self) -> None:
        """End the ranks."""
        self._ranks, self._terms = None, None
        self._undo.close()


class _Block(threading.local):
    """The block that a thread is in: several threads may call fit, each with its own ranks."""

    kept: KeptRanks | None = None
    pid = 0


_block = _Block()


def kept_here() -> KeptRanks | None:
    """Return the ranks of this thread's block, if it is in one; None in a forked child, whose ranks they are not."""
    return _block.kept if _block.pid == os.getpid() else None


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks alive between the calls of :func:`~trainloop._launch.launch` in this block and in inner ones."""
    if kept_here() is not None:
        yield
        return
    with contextlib.closing(KeptRanks()) as kept:
        _block.kept, _block.pid = kept, os.getpid()
        try:
            yield
        finally:
            _block.kept = None
