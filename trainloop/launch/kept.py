"""Ranks that outlive the call that started them, and are given the next call's work.

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
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING

from trainloop.launch.messages import receive, send
from trainloop.transfer import Parcel

if TYPE_CHECKING:
    from trainloop.launch.spawning import Ranks

__all__ = ["KeptRanks", "Work", "kept_here", "keeping", "next_work"]


@dataclass(frozen=True)
class Work:
    """What ranks that are up are given to do, and what a process that was started for it would have inherited."""

    parcel: Parcel
    inherited: tuple[int, ...]
    """Descriptors that the parcel refers to, its own among them."""
    settings: bytes
    main: tuple[str | None, str | None]
    environment: dict[str, str | None]
    """What has changed in the caller's since the work before; ``None``: no longer set."""
    folder: str | None
    """The current one; ``None`` where it was removed."""
    cpus: list[int] | None
    """The caller's; ``None`` where they are those of the work before."""

    def send_over(self, line: socket.socket) -> None:
        """Give it to the rank at the other end."""
        send(line, pickle.dumps(self), self.inherited)

    def take_place(self) -> None:
        """In a rank: be where the caller is now."""
        # Changes alone: what the rank's own code and libraries have set stays, as they do.
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
    """In a rank: wait for the next work, and the numbers that its descriptors have here; ``None`` at the end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The sentinel, too: a process that the caller has forked may hold the line's other end.
    ready = connection.wait([line, parent.sentinel])
    message = receive(line) if line in ready else None
    if message is None:
        return None
    content, fds = message
    work: Work = pickle.loads(content)
    return work, dict(zip(work.inherited, fds, strict=True))


class KeptRanks:
    """Of one block: the ranks that are up now, if any."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._terms: object = None
        self._undo = contextlib.ExitStack()

    def fitting(self, terms: object) -> Ranks | None:
        """Ranks that were started under the same terms and are all up; others are ended."""
        if self._ranks is not None and (self._terms != terms or not self._ranks.are_up()):
            self.close()
        return self._ranks

    def keep(self, ranks: Ranks, terms: object, undo: contextlib.ExitStack) -> None:
        """Have these from now on; ``undo`` ends them and takes back what was made for them."""
        self._ranks, self._terms, self._undo = ranks, terms, undo

    def close(self) -> None:
        """End them."""
        self._ranks, self._terms = None, None
        self._undo.close()


_here = threading.local()  # fits may run in threads, each with ranks of its own


def kept_here() -> KeptRanks | None:
    """The innermost block's, where this thread is in one."""
    kept: KeptRanks | None = getattr(_here, "kept", None)
    return kept if kept is not None and _here.pid == os.getpid() else None


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep ranks up between the calls of :func:`~trainloop.launch.launch` in this block; in a block inside, go on."""
    if kept_here() is not None:
        yield
        return
    kept = KeptRanks()
    _here.kept, _here.pid = kept, os.getpid()
    try:
        yield
    finally:
        _here.kept = None
        kept.close()
