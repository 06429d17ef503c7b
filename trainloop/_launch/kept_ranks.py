"""Keep the ranks of a launch for the next one, in a block of :func:`keeping`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from trainloop._launch.spawning import Ranks

__all__ = ["KeptRanks", "kept_here", "keeping"]


class KeptRanks:
    """The running ranks of one :func:`keeping` block, which may have no ranks."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._terms: object = None
        self._undo = contextlib.ExitStack()

    def resume(self, terms: object, undo: contextlib.ExitStack) -> Ranks | None:
        """Return the ranks, reset for new work; ``undo`` will end them.

        If settings differ or a rank has ended, end all ranks here and return None.
        """
        if self._ranks is not None and (self._terms != terms or not self._ranks.are_up()):
            self.close()
        if self._ranks is not None:
            undo.callback(self.close)
            self._ranks.reset()
        return self._ranks

    def keep(self, ranks: Ranks, terms: object, undo: contextlib.ExitStack) -> None:
        """Keep these ranks after their work has succeeded; ``undo`` then runs when they end."""
        ending, self._terms = undo.pop_all(), terms
        if ranks is not self._ranks:  # otherwise ``undo`` contains only the call to close()
            self._ranks, self._undo = ranks, ending

    def close(self) -> None:
        """End the ranks."""
        self._ranks, self._terms = None, None
        self._undo.close()


class _Block(threading.local):
    """The :func:`keeping` block that a thread is in. Several threads may call ``fit``; each has its own ranks."""

    kept: KeptRanks | None = None
    pid = 0


_block = _Block()


def kept_here() -> KeptRanks | None:
    """Return the ranks of this thread's block; None outside of a block and in a forked child, which can't use them."""
    return _block.kept if _block.pid == os.getpid() else None


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks alive between the calls of :func:`launch` in this block and in inner ones.

    ::

        with keeping():                 # TrainLoop.ranks()
            launch(first, ...)          # starts ranks
            launch(second, ...)         # in the same processes, with their process group, GPU memory and imports
        # the ranks have ended
    """
    if kept_here() is not None:
        yield
        return
    with contextlib.closing(KeptRanks()) as kept:
        _block.kept, _block.pid = kept, os.getpid()
        try:
            yield
        finally:
            _block.kept = None
