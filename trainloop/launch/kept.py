"""Ranks that outlive the call that started them and do the next calls' work.

::

    with keeping():                 # TrainLoop.ranks()
        launch(first, ...)          # starts ranks
        launch(second, ...)         # the same processes: their group, their GPUs' memory, what they have imported
                                    # here they end
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING

from trainloop.launch.messages import receive, send
from trainloop.per_thread import PerThread
from trainloop.transfer import Parcel

if TYPE_CHECKING:
    from trainloop.launch.spawning import Ranks

__all__ = ["KeptRanks", "Work", "keeping", "kept_here", "next_work"]


@dataclass(frozen=True)
class Work:
    """Work for ranks that are up, with the state that a newly started process would inherit."""

    parcel: Parcel
    inherited: tuple[int, ...]
    """Descriptors that the parcel refers to, its own among them."""
    settings: bytes
    main: tuple[str | None, str | None]
    environment: dict[str, str | None]
    """Changes of the caller's environment since the work before; ``None`` removes a variable."""
    folder: str | None
    """The current folder; ``None`` if it was removed."""
    cpus: list[int] | None
    """The caller's CPUs; ``None`` if they are the same as for the work before."""

    def send_over(self, line: socket.socket) -> None:
        """Send the work to a rank."""
        send(line, pickle.dumps(self), self.inherited)

    def take_place(self) -> None:
        """In a rank: enter the caller's present folder, environment and so on."""
        # Only what the caller changed, so that settings of the rank's own code and libraries stay.
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.folder is not None:
            os.chdir(self.folder)
        if self.cpus is not None:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # it has just ended
                    os.sched_setaffinity(int(thread), self.cpus)


def next_work(line: socket.socket) -> tuple[Work, dict[int, int]] | None:
    """In a rank: wait for the next work and the numbers of its descriptors here; ``None`` at the end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The sentinel too, as a fork of the caller may hold the line's other end.
    ready = connection.wait([line, parent.sentinel])
    message = receive(line) if line in ready else None
    if message is None:
        return None
    content, fds = message
    work: Work = pickle.loads(content)
    return work, dict(zip(work.inherited, fds, strict=True))


class KeptRanks:
    """The ranks of one block that are up, if any."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._terms: object = None
        self._undo = contextlib.ExitStack()

    def take_up(self, terms: object, undo: contextlib.ExitStack) -> Ranks | None:
        """Ranks with the same settings that are all up, ready for new work, and ended by ``undo``; others are ended."""
        if self._ranks is not None and (self._terms != terms or not self._ranks.are_up()):
            self.close()
        if self._ranks is not None:
            undo.callback(self.close)
            self._ranks.begin_again()
        return self._ranks

    def keep(self, ranks: Ranks, terms: object, undo: contextlib.ExitStack) -> None:
        """Keep these ranks, whose work went well; what ``undo`` would do now is done at their end."""
        ending = undo.pop_all()
        if ranks is not self._ranks:  # else it is this object's own close()
            self._ranks, self._terms, self._undo = ranks, terms, ending

    def close(self) -> None:
        """End them."""
        self._ranks, self._terms = None, None
        self._undo.close()


_here: PerThread[KeptRanks] = PerThread()  # several threads may call fit, each with its own ranks


def kept_here() -> KeptRanks | None:
    """The ranks of this thread's innermost block, if it is in one."""
    return _here.get()


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks up between the calls of :func:`~trainloop.launch.launch` in this block; an inner block shares them."""
    if kept_here() is not None:
        yield
        return
    kept = KeptRanks()
    with contextlib.closing(kept), _here.set_to(kept):
        yield
