"""Keep ranks alive after the call that started them, to do the work of the next calls.

::

    with keeping():                 # TrainLoop.ranks()
        launch(first, ...)          # starts ranks
        launch(second, ...)         # the same processes: their group, their GPUs' memory, what they have imported
    # here the ranks end
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainloop._support.per_thread import PerThread

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
            self._ranks.begin_again()
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


_here: PerThread[KeptRanks] = PerThread()  # several threads may call fit, each with its own ranks


def kept_here() -> KeptRanks | None:
    """Return the ranks of this thread's innermost block, if it is in one."""
    return _here.get()


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks alive between the calls of :func:`~trainloop._launch.launch` in this block and in inner ones."""
    if kept_here() is not None:
        yield
        return
    kept = KeptRanks()
    with contextlib.closing(kept), _here.set_to(kept):
        yield
