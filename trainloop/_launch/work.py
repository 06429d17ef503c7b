"""Send work to ranks: over a connection to each rank, with the file descriptors that the work refers to."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, reduction
from typing import Any

from trainloop._support.platform import set_affinity
from trainloop._transfer.pages import path_of
from trainloop.resources.enforce import set_variable

__all__ = ["LAUNCH_VARIABLE", "Work", "next_work"]

LAUNCH_VARIABLE = "TRAINLOOP_LAUNCH"
"""Variable with a launch's token, in the environment of its ranks and of all processes that they start."""

_AT_ONCE = 200  # descriptors per message; Linux allows 253
_OPENED = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
_IN_FLIGHT_S = 60.0  # time for other ranks to receive descriptors: Linux limits a user's descriptors in flight


@dataclass(frozen=True)
class Work:
    """Work for a rank, and the changes of the caller's state since the previous work."""

    spec: Any
    """The rank's :class:`~trainloop._launch.rank_process.RankSpec`."""
    environment: dict[str, str | None]
    """Changed environment variables; ``None`` removes one."""
    folder: str | None = None
    """The caller's current folder; ``None`` to keep the rank's."""
    cpus: list[int] | None = None
    """The caller's CPUs; ``None`` if unchanged since the previous work."""

    def send_over(self, line: connection.Connection, descriptors: list[int]) -> None:
        """Send the work to a rank."""
        if sys.platform == "win32":  # ranks open files by their paths there
            line.send_bytes(pickle.dumps((self, {fd: path_of(fd) for fd in descriptors})))
            return
        line.send_bytes(pickle.dumps((self, descriptors)))
        with _socket_of(line) as stream:
            for i in range(0, len(descriptors), _AT_ONCE):
                _send_descriptors(stream, descriptors[i : i + _AT_ONCE])

    def apply(self) -> None:
        """Apply the caller's current folder, environment and CPUs to this rank."""
        # Apply only the caller's changes, to keep variables that the rank's own code and libraries have set.
        for name, value in self.environment.items():
            set_variable(name, value)
        if self.folder is not None:
            os.chdir(self.folder)
        if self.cpus is not None:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # the rank has just ended
                    set_affinity(self.cpus, int(thread))


def _send_descriptors(stream: socket.socket, descriptors: list[int]) -> None:
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + _IN_FLIGHT_S
    while True:
        try:
            reduction.sendfds(stream, descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def next_work(line: connection.Connection) -> tuple[Work, dict[int, int]] | None:
    """Wait in a rank for more work; return the work, and this process's descriptors by the sender's numbers.

    Return ``None`` if the caller has ended or closed the connection.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Wait for the sentinel too: a fork of the caller may keep the connection's other end open.
    if line not in connection.wait([line, parent.sentinel]):
        return None
    received: dict[int, int] = {}
    try:
        work: Work
        work, descriptors = pickle.loads(line.recv_bytes())
        if sys.platform == "win32":
            return work, {fd: os.open(path, _OPENED) for fd, path in descriptors.items()}
        with _socket_of(line) as stream:
            for i in range(0, len(descriptors), _AT_ONCE):
                some = descriptors[i : i + _AT_ONCE]
                received.update(zip(some, reduction.recvfds(stream, len(some)), strict=True))
    except (EOFError, OSError):  # the caller has ended
        return None
    for fd in received.values():
        os.set_inheritable(fd, False)  # not for programs that user code starts
    return work, received


@contextlib.contextmanager
def _socket_of(line: connection.Connection) -> Iterator[socket.socket]:
    if sys.platform == "win32":
        raise NotImplementedError
    with socket.fromfd(line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        yield stream
